# SPDX-License-Identifier: Apache-2.0
"""The training step, and many of them in one loop.

Invariant: a step is a pure function of (state, batch, rate); its loss and gradient are sums over
loss-bearing tokens divided by their number, whatever the division into micro-batches and devices.
A step that would do harm leaves the state as it was and is counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from geojax.cona.noise import Moments
from geojax.config import TrainConfig
from geojax.data import Batch
from geojax.meshes.gradient import LossSums
from geojax.meshes.squares import Squares
from geojax.models.transformer import Params
from geojax.train.noise import Measure
from geojax.train.optim import make_optimizer, make_schedule

_SPIKE_MEMORY = 0.95  # decay of the running mean loss that spikes are measured against
_SPIKE_WARMUP = 20  # steps before that mean is trusted


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What inner steps change."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]
    """Steps taken, skipped ones left out."""
    mean_loss: Float[Array, ""]
    """Running mean of the loss, for spikes."""


class StepStats(NamedTuple):
    """Sums over steps. Skipped steps count in `skipped` alone."""

    loss: Float[Array, ""]
    """Sum over loss-bearing tokens, in nats."""
    tokens: Int[Array, ""]
    grad_norm: Float[Array, ""]
    """Sum over steps of the global gradient norm before clipping."""
    steps: Int[Array, ""]
    skipped: Int[Array, ""]
    noise: Mapping[str, Moments] = {}
    """Of the gradient's noise, by source; empty where it is not measured."""


Gradient = Callable[[Params, Batch, Int[Array, ""]], tuple[LossSums, Params, *tuple[Squares, ...]]]
"""(params, batch, step) -> sums over the batch, the gradient of the summed nats and, where noise is
measured, squares of its parts."""


def init_state(params: Params, config: TrainConfig) -> TrainState:
    """State before the first step."""
    opt_state = make_optimizer(config.optimizer).init(params)
    return TrainState(params, opt_state, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))


def make_train_step(
    gradient: Gradient,
    config: TrainConfig,
    settle: Callable[[TrainState], TrainState] = lambda state: state,
    measure: Measure | None = None,
    batch_factor: float = 1.0,
):
    """`step(state, batch, progress, scale)` with batch arrays [m, b, t], m micro-batches.

    `progress` is tokens seen over tokens of the run, in [0, 1]; `scale` multiplies the schedule's
    rate, and not the decay: with `batch_factor`, the batch over the one that the config is for,
    weights decay at the same pace by tokens under any rate. `settle` says where the parts of the
    new state lie.
    """
    optimizer = make_optimizer(config.optimizer)
    schedule = make_schedule(config.schedule, config.optimizer.learning_rate)
    spike = config.anomalies.spike_factor

    def step(state: TrainState, batch: Batch, progress, scale=1.0) -> tuple[TrainState, StepStats]:
        (loss_sum, tokens), grads, *measured = gradient(state.params, batch, state.step)
        noise = {}
        if measure:
            noise = measure(grads, measured[0], tokens, state.opt_state)
        count = jnp.maximum(tokens, 1.0)
        grads = jax.tree.map(lambda g: g / count, grads)
        mean_loss, norm = loss_sum / count, optax.tree.norm(grads)
        good = jnp.isfinite(mean_loss) & jnp.isfinite(norm) & (tokens > 0)
        if spike:
            good &= (state.step < _SPIKE_WARMUP) | (mean_loss <= spike * state.mean_loss)
        if config.clip_norm:
            factor = jnp.minimum(1.0, config.clip_norm / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: g * factor, grads)
        # The optimizer looks at the parameters to decay them, and for nothing else.
        decayed = jax.tree.map(lambda p: p * (batch_factor / scale), state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, decayed)
        rate = schedule(progress) * scale
        memory = jnp.where(state.step == 0, 0.0, _SPIKE_MEMORY)
        new = TrainState(
            params=jax.tree.map(lambda p, u: p - rate * u, state.params, updates),
            opt_state=opt_state,
            step=state.step + 1,
            mean_loss=(memory * state.mean_loss + (1 - memory) * mean_loss).astype(jnp.float32),
        )
        stats = StepStats(
            loss_sum, jnp.rint(tokens).astype(jnp.int32), norm, jnp.int32(1), jnp.int32(0), noise
        )
        none = jax.tree.map(jnp.zeros_like, stats)._replace(skipped=jnp.int32(1))
        return settle(_choose(good, new, state)), _choose(good, stats, none)

    return step


def make_loop(step: Callable[..., tuple[TrainState, StepStats]]):
    """`loop(state, chunk, count, begin, stride, done, scale)`: `count` steps over a chunk
    [c, m, b, t].

    `count` <= c is an argument, so one compilation serves every number of steps. Step i of the
    chunk runs at progress begin + stride * (done + i), so the bits do not depend on where a round
    is cut into chunks.
    """

    def loop(state: TrainState, chunk: Batch, count, begin, stride, done, scale=1.0):
        def body(i, carry):
            state, total = carry
            batch = jax.tree.map(lambda x: x[i], chunk)
            state, stats = step(state, batch, begin + stride * (done + i), scale)
            return state, jax.tree.map(jnp.add, total, stats)

        first = jax.tree.map(lambda x: x[0], chunk)
        shapes = jax.eval_shape(step, state, first, begin)[1]
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.fori_loop(0, count, body, (state, zero))

    return loop


def _choose(condition, yes, no):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
