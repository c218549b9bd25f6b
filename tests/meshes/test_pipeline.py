# SPDX-License-Identifier: Apache-2.0
"""Micro-batches go through all layers, each once and in order, wherever the layers are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from strategies import QUICK

from geojax.meshes.axes import PIPELINE, strategy_mesh
from geojax.meshes.pipeline import run_pipeline, storage_order
from geojax.meshes.strategy import Strategy
from geojax.models.collectives import Collectives

LAYERS = 8


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_stage_s_stores_chunks_s_and_every_pp_th_after_it(pp, interleave, size):
    layers = pp * interleave * size
    order = storage_order(layers, Strategy(1, 1, pp, 1, pp, interleave))
    if order is None:
        assert interleave == 1
        order = np.arange(layers)
    assert sorted(order) == list(range(layers))
    for stage, stored in enumerate(order.reshape(pp, -1)):
        chunks = stored.reshape(interleave, size)
        assert [list(chunk) for chunk in chunks] == [
            list(range(c * size, (c + 1) * size)) for c in range(stage, pp * interleave, pp)
        ]
    restored = order[np.argsort(order)]
    np.testing.assert_array_equal(restored, np.arange(layers))


def layer(weights, x, number, inputs):
    """Element 0 of x records in base 10 which layers it passed, in which order; the others are
    mixed by the weight, so that layers do not commute."""
    weight, own = weights
    record = x[..., :1] * 10 + jnp.where(own == number, number + 1, jnp.nan)
    return jnp.concatenate([record, jnp.sin(weight * x[..., 1:] + number) + inputs], -1)


def loss_and_outputs(outputs):
    return jnp.sum(outputs[..., 1:] ** 2), outputs


def on_one_device(weights, own, first, inputs):
    x = first
    for number in range(LAYERS):
        x = layer((weights[number], own[number]), x, number, inputs[:, None, None, None])
    return loss_and_outputs(x)


def in_stages(strategy, weights, own, first, inputs):
    """Outputs, and the slopes of `loss_and_outputs` by the weights and by `first`."""
    collectives = Collectives(axes=(PIPELINE,))

    def chunk(weights, x, numbers, inputs):
        def one(x, item):
            return layer(item[0], x, item[1], inputs), None

        return jax.lax.scan(one, x, (weights, numbers))[0]

    def body(weights, own, first, inputs):
        def share(weights, first):
            args = (chunk, (weights, own), first, inputs, LAYERS, strategy, collectives)
            loss, outputs = loss_and_outputs(run_pipeline(*args))
            return loss / strategy.pp, outputs

        varying = collectives.vary(weights), collectives.vary(first)
        slopes, outputs = jax.grad(share, (0, 1), has_aux=True)(*varying)
        return jax.lax.pmean(outputs, PIPELINE), slopes[0], jax.lax.psum(slopes[1], PIPELINE)

    mesh = strategy_mesh(strategy, jax.devices()[: strategy.devices])
    stages, whole = PartitionSpec(PIPELINE), PartitionSpec()
    run = jax.shard_map(
        body, mesh=mesh, in_specs=(stages, stages, whole, whole), out_specs=(whole, stages, whole)
    )
    return jax.jit(run, compiler_options=QUICK)(weights, own, first, inputs)


@pytest.mark.parametrize(
    ("pp", "interleave", "count"),
    [(2, 1, 3), (4, 1, 7), (8, 1, 8), (2, 4, 2), (4, 2, 8)],
)
def test_each_micro_batch_meets_each_layer_once_in_order_with_its_own_inputs(pp, interleave, count):
    strategy = Strategy(1, 1, pp, 1, count, interleave)
    order = storage_order(LAYERS, strategy)
    order = np.arange(LAYERS) if order is None else order
    rng = np.random.default_rng(0)
    weights, own = rng.standard_normal(LAYERS), np.arange(LAYERS)
    first, inputs = rng.standard_normal((count, 1, 2, 3)), rng.standard_normal(count)
    first[..., 0] = np.arange(1, count + 1)[:, None, None]
    with jax.enable_x64(True):
        outputs, *slopes = in_stages(strategy, weights[order], own[order], first, inputs)
        expected, plain = jax.grad(on_one_device, (0, 2), has_aux=True)(weights, own, first, inputs)
    assert (np.asarray(outputs[..., 0]) == 12345678 + 10.0**LAYERS * first[..., 0]).all()
    np.testing.assert_allclose(outputs, plain, atol=1e-13)
    np.testing.assert_allclose(slopes[0], expected[0][order], atol=1e-12)
    np.testing.assert_allclose(slopes[1], expected[1], atol=1e-12)
