# SPDX-License-Identifier: Apache-2.0
"""The inner step, and many of them in one compiled loop.

Invariant: a step is a pure function of (state, batch, rate); its loss and gradient are sums over
loss-bearing tokens divided by their number, whatever the division into micro-batches and devices.
A step that would do harm leaves the state as it was and is counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from geojax.config import TrainConfig
from geojax.data import Batch
from geojax.models.transformer import Params
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


InnerLoop = jax.stages.Wrapped
"""(state, chunk, count, begin, stride, done) -> (TrainState, StepStats): see make_inner_loop."""
LossSum = Callable[[Params, Batch], tuple[Float[Array, ""], Float[Array, ""]]]


def init_state(params: Params, config: TrainConfig) -> TrainState:
    """State before the first step."""
    opt_state = make_optimizer(config.optimizer).init(params)
    return TrainState(params, opt_state, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))


def make_loss(apply: Callable[..., Array], dtype: str) -> LossSum:
    """`loss(params, batch)`: sum of next-token losses in nats, and the tokens that bear one.

    Batch arrays are [b, t].
    """

    def loss(params: Params, batch: Batch):
        logits = apply(params, batch.tokens, batch.positions, batch.segments, jnp.dtype(dtype))
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return jnp.sum(nats * batch.weights), jnp.sum(batch.weights)

    return loss


def make_train_step(loss: LossSum, config: TrainConfig):
    """`step(state, batch, progress)` with batch arrays [m, b, t], m micro-batches.

    `progress` is tokens seen over tokens of the run, in [0, 1].
    """
    optimizer = make_optimizer(config.optimizer)
    schedule = make_schedule(config.schedule, config.optimizer.learning_rate)
    spike = config.anomalies.spike_factor

    def step(state: TrainState, batch: Batch, progress) -> tuple[TrainState, StepStats]:
        (loss_sum, tokens), grads = _accumulate(loss, state.params, batch)
        count = jnp.maximum(tokens, 1.0)
        grads = jax.tree.map(lambda g: g / count, grads)
        mean_loss, norm = loss_sum / count, optax.tree.norm(grads)
        good = jnp.isfinite(mean_loss) & jnp.isfinite(norm) & (tokens > 0)
        if spike:
            good &= (state.step < _SPIKE_WARMUP) | (mean_loss <= spike * state.mean_loss)
        if config.clip_norm:
            factor = jnp.minimum(1.0, config.clip_norm / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: g * factor, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        rate = schedule(progress)
        memory = jnp.where(state.step == 0, 0.0, _SPIKE_MEMORY)
        new = TrainState(
            params=jax.tree.map(lambda p, u: p - rate * u, state.params, updates),
            opt_state=opt_state,
            step=state.step + 1,
            mean_loss=memory * state.mean_loss + (1 - memory) * mean_loss,
        )
        stats = StepStats(loss_sum, tokens.astype(jnp.int32), norm, jnp.int32(1), jnp.int32(0))
        none = jax.tree.map(jnp.zeros_like, stats)._replace(skipped=jnp.int32(1))
        return _choose(good, new, state), _choose(good, stats, none)

    return step


def make_inner_loop(loss: LossSum, config: TrainConfig) -> InnerLoop:
    """`loop(state, chunk, count, begin, stride, done)`: `count` steps over a chunk [c, m, b, t].

    `count` <= c is an argument, so one compilation serves every number of inner steps. Step i of
    the chunk runs at progress begin + stride * (done + i), so the bits do not depend on where a
    round is cut into chunks. The state is donated.
    """
    step = make_train_step(loss, config)

    @partial(jax.jit, donate_argnums=0)
    def loop(state: TrainState, chunk: Batch, count, begin, stride, done):
        def body(i, carry):
            state, total = carry
            batch = jax.tree.map(lambda x: x[i], chunk)
            state, stats = step(state, batch, begin + stride * (done + i))
            return state, jax.tree.map(jnp.add, total, stats)

        zero = StepStats(*(jnp.zeros((), t) for t in ("f4", "i4", "f4", "i4", "i4")))
        return jax.lax.fori_loop(0, count, body, (state, zero))

    return loop


def _accumulate(loss: LossSum, params: Params, batch: Batch):
    """Sums of loss, tokens and gradients over micro-batches."""
    gradient = jax.value_and_grad(loss, has_aux=True)

    def add(total, micro):
        return jax.tree.map(jnp.add, total, gradient(params, micro)), None

    zero = ((jnp.float32(0), jnp.float32(0)), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, zero, batch)[0]


def _choose(condition, yes, no):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
