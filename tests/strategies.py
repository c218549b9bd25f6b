# SPDX-License-Identifier: Apache-2.0
"""Small models, batches and one-device answers that tests of strategies share.

All of it in float64, under `jax.enable_x64`: in float32 a share counted twice in some small leaf
hides among roundings.
"""

import gc
import math
import weakref
from dataclasses import replace
from functools import cache, lru_cache

import jax
import numpy as np
from jax.sharding import NamedSharding

from geojax.meshes.axes import strategy_mesh
from geojax.meshes.gradient import Sequences, ShardedModel
from geojax.meshes.pipeline import storage_order
from geojax.meshes.rules import state_specs
from geojax.meshes.strategy import Strategy
from geojax.models.config import TransformerConfig
from geojax.models.params import roles
from geojax.models.transformer import abstract_params

LENGTH = 16
ROWS = 64  # sequences of the one-device answer, which batches are filled up to
ONE = Strategy(1, 1, 1, 8, ROWS)
QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options: what is tested compiles for seconds and runs for milliseconds."""

_GPT = TransformerConfig(
    vocab_size=200,  # padded to 256
    dim=32,
    layers=8,
    heads=8,
    kv_heads=8,
    mlp_dim=64,
    tied=True,
    family="gpt",
    context=32,
    dropout=0.1,
    attention_dropout=0.2,
)
MODELS = {
    "gpt": _GPT,
    "gpt-untied": replace(_GPT, tied=False),
    "bert": replace(_GPT, family="bert"),
    "llama": replace(_GPT, family="llama", kv_heads=4, tied=False),
    "llama-tied": replace(_GPT, family="llama"),
    # A Dream, which has all that a llama can have.
    "dream": replace(
        _GPT,
        family="llama",
        kv_heads=4,
        tied=False,
        bidirectional=True,
        qkv_bias=True,
        shifted=True,
    ),
}


@cache
def random_params(model: TransformerConfig):
    """Host parameters with every leaf random, biases and norms too, so that no gradient is
    trivially 0; rows of padding are 0, as they are in a fresh model."""
    rng = np.random.default_rng(0)
    shapes = abstract_params(model)

    def draw(path, leaf, role):
        x = rng.standard_normal(leaf.shape)
        if role.kind == "vector":
            x = (path[-1].key == "scale") + 0.3 * x
        else:
            x /= np.sqrt(leaf.shape[-1] if role.kind == "table" else leaf.shape[-2])
        if path[0].key in ("embed", "head", "head_bias"):
            x[model.vocab_size :] = 0
        return x

    return jax.tree_util.tree_map_with_path(draw, shapes, roles(shapes))


def random_batch(model, micro_batches, rows, length=LENGTH, seed=0, steps=None) -> Sequences:
    """A batch [m, b, t] whose loss-bearing tokens are as uneven as can be.

    Of two and more micro-batches the second has none, of three and more the last has one; every
    third sequence has hardly any. Sequences hold up to three documents. `steps`: as many batches
    [c, m, b, t], of samples that go on.
    """
    rng = np.random.default_rng(seed)
    lead = (steps or 1, micro_batches, rows)
    tokens, targets = rng.integers(0, model.vocab_size, (2, *lead, length), np.int32)
    density = rng.choice([0.05, 0.4, 0.9], (*lead, 1))
    weights = (rng.random((*lead, length)) < density).astype(np.float32)
    if micro_batches > 1:
        weights[:, 1] = 0
    if micro_batches > 2:
        weights[:, -1] = 0
        weights[:, -1, -1, -1] = 1
    segments = np.sort(rng.integers(0, 3, (*lead, length)), -1).astype(np.int32)
    starts = np.argmax(segments[..., None, :] == segments[..., :, None], -1)
    positions = (np.arange(length) - starts).astype(np.int32)
    samples = np.arange(2**32 - np.prod(lead), 2**32).astype(np.uint32).reshape(lead)
    batch = Sequences(tokens, targets, weights, segments, positions, samples)
    return batch if steps else jax.tree.map(lambda x: x[0], batch)


def filled(batch: Sequences, micro_batch=ONE.micro_batch, rows=ROWS) -> Sequences:
    """The same sequences and others without loss, `rows` of them, in one-device micro-batches."""

    def fill(x):
        x = x.reshape(-1, *x.shape[2:])
        assert len(x) <= rows
        pad = np.zeros((rows - len(x), *x.shape[1:]), x.dtype)
        return np.concatenate([x, pad]).reshape(-1, micro_batch, *x.shape[1:])

    return jax.tree.map(fill, batch)


def loss_and_gradient(model, strategy, batch, seed=0, length=LENGTH):
    """(nats, tokens), and the gradient of nats on the host, layers in the model's order.

    `seed`: of dropout.
    """
    on, gradient, _ = jitted(model, strategy, length)
    sums, grads = gradient(*placed(on, random_params(model), batch), jax.random.key(seed))
    order = storage_order(model.layers, strategy)
    back = None if order is None else np.argsort(order)
    return tuple(map(float, sums)), reorder(jax.tree.map(np.asarray, grads), back)


@lru_cache(8)  # one answer of every model, and those that are compared with it
def jitted(model, strategy, length=LENGTH):
    """The model laid over the first devices, its gradient and its loss."""
    mesh = strategy_mesh(strategy, jax.devices()[: strategy.devices])
    on = ShardedModel(model, strategy, mesh, "float64", True, length)
    return on, *(jax.jit(f, compiler_options=QUICK) for f in (on.gradient, on.loss))


def placed(on: ShardedModel, params, batch):
    """Host parameters and a batch where `on` has them."""
    params = reorder(params, storage_order(on.config.layers, on.strategy))
    specs, _ = state_specs(on.rules, on.strategy)
    shardings = jax.tree.map(lambda spec: NamedSharding(on.mesh, spec), specs)
    return jax.device_put(params, shardings), jax.device_put(
        batch, NamedSharding(on.mesh, on.batch_spec)
    )


def reorder(params, order):
    """Parameters with their layers in another order; None: the same."""
    if order is None:
        return params
    return {**params, "blocks": jax.tree.map(lambda x: x[order], params["blocks"])}


def norms(a, b=None):
    """Norm of each leaf of a, or of its difference to b, by name."""
    difference = a if b is None else jax.tree.map(np.subtract, a, b)
    leaves = jax.tree_util.tree_leaves_with_path(difference)
    return {jax.tree_util.keystr(path): float(np.linalg.norm(x)) for path, x in leaves}


def learnt(sizes):
    """Norms of the leaves that bear a gradient: a key's bias adds the same to all scores of a
    query, and softmax takes no notice."""
    return [size for name, size in sizes.items() if "key_bias" not in name]


def device_bytes(arrays=None):
    """Memory of arrays on all devices; None: of all that are alive. Views count once."""
    buffers = {}
    for array in jax.live_arrays() if arrays is None else arrays:
        for shard in array.addressable_shards:
            place = (shard.device, shard.data.unsafe_buffer_pointer())
            buffers[place] = max(shard.data.nbytes, buffers.get(place, 0))
    return sum(buffers.values())


def assert_one_leaf_at_a_time(monkeypatch, move, taken, shardings):
    """That `move(taken)` frees each old leaf before the next one moves: memory stays within that
    of all leaves, each where it takes more of its old and its new place, and one leaf more."""
    gc.collect()
    leaves, targets = jax.tree.leaves(taken[0]), jax.tree.leaves(shardings)
    before = [device_bytes([leaf]) for leaf in leaves]
    after = [
        math.prod(target.shard_shape(leaf.shape)) * leaf.dtype.itemsize * len(target.device_set)
        for leaf, target in zip(leaves, targets, strict=True)
    ]
    strangers = device_bytes() - sum(before)
    olds = [weakref.ref(leaf) for leaf in leaves]
    del leaves
    seen, device_put = [], jax.device_put

    def watch(x, place):
        moved = device_put(x, place)
        seen.append((device_bytes() - strangers, [leaf() is not None for leaf in olds]))
        return moved

    monkeypatch.setattr(jax, "device_put", watch)
    moved = move(taken)
    larger = [max(pair) for pair in zip(before, after, strict=True)]
    assert max(alive for alive, _ in seen) <= sum(larger) + max(larger)
    assert all(left == sorted(left) for _, left in seen)  # they go from the first to the last
    assert sum(seen[-1][1]) <= 1
    assert not any(leaf() for leaf in olds)
    assert device_bytes() - strangers == sum(after)
    return moved
