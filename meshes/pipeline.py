# SPDX-License-Identifier: Apache-2.0
"""A stack of layers as pipeline stages: GPipe, and circular stages with several chunks each.

Stage s holds chunks s, s + pp, s + 2 pp, ... of the model, `interleave` of them; with one chunk
that is GPipe (Huang et al. 2019), with more each micro-batch goes round the ring of stages that
often, and the bubble shrinks by as much (Narayanan et al. 2021). One tick is one chunk on every
stage, then a shift to the next stage. Stage s works at tick t on step u = t - s of

    group u // (pp v), chunk u % (pp v) // pp, micro-batch group * pp + u % pp

so micro-batches go round in groups of pp, and what leaves the last stage is needed by the first at
the very next tick: nothing waits in a buffer.

Invariant: layer order in storage is `storage_order`, chunks of a stage side by side, so that the
leading dim of every stacked parameter is spread over stages in one piece.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from geojax.meshes.axes import PIPELINE
from geojax.meshes.strategy import Strategy
from geojax.models.collectives import Collectives


def storage_order(layers: int, strategy: Strategy) -> np.ndarray | None:
    """Model layer at each place of the stacked parameters [L]; None where they are in order."""
    if strategy.interleave == 1:
        return None
    chunks = np.arange(layers).reshape(strategy.interleave, strategy.pp, -1)
    return chunks.swapaxes(0, 1).reshape(-1)


def run_pipeline(
    layers: Callable[[Any, Array, Array, Any], Array],
    weights: Any,
    first: Float[Array, "m b r d"],
    inputs: Any,
    depth: int,
    strategy: Strategy,
    collectives: Collectives,
    keep: Callable[..., bool] = jax.checkpoint_policies.everything_saveable,
) -> Float[Array, "m b r d"]:
    """Outputs of all layers for all micro-batches, on every stage; inside a shard_map over 'pp'.

    `layers(weights, x, numbers, inputs)` runs a chunk on one micro-batch; `weights` are the stage's
    own, stacked; `first` is the input of layer 0, the same on every stage; `inputs` a pytree of
    [m, ...] that goes with the micro-batch; `depth` the layers of the whole model; `keep` the
    policy of `jax.checkpoint` that says what of a tick the backward pass finds.
    """
    pp, rounds, count = strategy.pp, strategy.interleave, strategy.micro_batches
    size = depth // (pp * rounds)
    stage = jax.lax.axis_index(PIPELINE)
    chunks = jax.tree.map(lambda x: x.reshape(rounds, size, *x.shape[1:]), weights)

    # The chunk's weights are picked again: each tick would keep a copy.
    @partial(jax.checkpoint, policy=keep, prevent_cse=False)
    def work(chunks, chunk, x, numbers, inputs):
        mine = jax.tree.map(lambda w: w[chunk], chunks) if rounds > 1 else weights
        return layers(mine, x, numbers, inputs)

    def tick(carry, t):
        arriving, outputs = carry
        step = jnp.clip(t - stage, 0, rounds * count - 1)
        busy = (t >= stage) & (t - stage < rounds * count)
        chunk = step % (pp * rounds) // pp
        micro = step // (pp * rounds) * pp + step % pp
        x = jnp.where((stage == 0) & (chunk == 0), first[micro], arriving)
        numbers = (chunk * pp + stage) * size + jnp.arange(size)
        y = work(chunks, chunk, x, numbers, jax.tree.map(lambda v: v[micro], inputs))
        last = busy & (stage == pp - 1) & (chunk == rounds - 1)
        outputs = outputs.at[micro].set(jnp.where(last, y, outputs[micro]))
        shifted = jax.lax.ppermute(y, PIPELINE, [(i, (i + 1) % pp) for i in range(pp)])
        return (shifted, outputs), None

    # Zeros, not garbage: what a waiting stage computes is thrown away, its gradient is 0 times it.
    empty = (
        collectives.vary(jnp.zeros(first.shape[1:], first.dtype)),
        collectives.vary(jnp.zeros_like(first)),
    )
    (_, outputs), _ = jax.lax.scan(tick, empty, jnp.arange(rounds * count + pp - 1))
    wide = jnp.promote_types(first.dtype, jnp.float32)
    ended = jnp.where(stage == pp - 1, outputs, 0).astype(wide)
    return collectives.vary(jax.lax.psum(ended, PIPELINE)).astype(first.dtype)
