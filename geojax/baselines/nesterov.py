# SPDX-License-Identifier: Apache-2.0
"""Delayed Nesterov: momentum for updates that come one by one, from slices that began at different
times.

Every update moves the parameters at once; the momentum takes in the sum of `every` updates and acts
when it has, so that updates of the same age enter it together (Liu et al. 2024, "Asynchronous
Local-SGD Training for Language Modeling"; without their activation of momentum in between). With
every = 1 it is Nesterov momentum.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax


class DelayedNesterovState(NamedTuple):
    """Invariant: `gathered` holds `count` mod `every` updates."""

    count: np.ndarray
    momentum: Any
    gathered: Any


def delayed_nesterov(momentum: float, every: int) -> optax.GradientTransformation:
    """Direction before the learning rate. On the host: not for jit."""

    def init(params: Any) -> DelayedNesterovState:
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), params)
        return DelayedNesterovState(np.zeros((), np.int32), zeros, zeros)

    def update(
        updates: Any, state: Any, params: Any = None, **_: Any
    ) -> tuple[Any, DelayedNesterovState]:
        del params
        count = state.count + np.int32(1)
        gathered = jax.tree.map(np.add, state.gathered, updates)
        if count % every:
            return updates, DelayedNesterovState(count, state.momentum, gathered)
        beta = np.float32(momentum)
        trace = jax.tree.map(lambda m, g: beta * m + g, state.momentum, gathered)
        direction = jax.tree.map(lambda u, m: u + beta * m, updates, trace)
        return direction, DelayedNesterovState(count, trace, jax.tree.map(np.zeros_like, gathered))

    return optax.GradientTransformation(init, update)
