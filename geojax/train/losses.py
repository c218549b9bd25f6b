# SPDX-License-Identifier: Apache-2.0
"""Compiled losses of held-out batches.

Invariant: one for each layout of one task on one set of devices: programs that differ in the batch
they train by alone share it, and whoever asks for it first, in whichever thread, compiles it.
"""

import threading
from collections.abc import Callable

import jax

from geojax.meshes.strategy import Strategy


class Losses:
    """By strategy, of the batch that is evaluated."""

    def __init__(self):
        self._compiled: dict[Strategy, jax.stages.Compiled] = {}
        self._lock = threading.Lock()

    def get(
        self, strategy: Strategy, lower: Callable[[Strategy], jax.stages.Lowered]
    ) -> jax.stages.Compiled:
        """Compiled now, if it is not yet; waits where another thread does that, and for nothing
        where it is."""
        if found := self._compiled.get(strategy):
            return found
        with self._lock:
            if strategy not in self._compiled:
                self._compiled[strategy] = lower(strategy).compile()
            return self._compiled[strategy]
