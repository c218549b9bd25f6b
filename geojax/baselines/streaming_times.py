# SPDX-License-Identifier: Apache-2.0
"""When fragments go and come in a Streaming DiLoCo run, in modelled time.

In a round of H inner steps, P fragments are sent in turn: each `lag_steps` before the P-th part of
the round that it is taken in at the end of. An exchange begins when the last slice has come to its
step and the one before is over; a slice that comes to the end of the part first waits for it.

Invariant: nothing is under way at a round's end, so that a round depends on what was before only
by how far its slices are apart.

Douillard et al. 2025, "Streaming DiLoCo with overlapping communication".
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax

from geojax.baselines.fragments import take
from geojax.baselines.ledger import Ledger, Span
from geojax.config import RunConfig
from geojax.geomesh.layout import make_layout
from geojax.geomesh.sync import payload_bytes
from geojax.models.transformer import abstract_params


class Part(NamedTuple):
    """A fragment's part of a round: steps before it is sent, and steps until it is taken in."""

    before: int
    beside: int


def parts(inner_steps: int, fragments: int, lag_steps: int) -> list[Part]:
    """Of a round, in order; their steps sum to `inner_steps`."""
    borders = [i * inner_steps // fragments for i in range(fragments + 1)]
    return [Part(stop - start - lag_steps, lag_steps) for start, stop in pairwise(borders)]


def fragment_bytes(config: RunConfig) -> list[int]:
    """One slice's message for each fragment of the clocked model."""
    assert config.streaming is not None, "fragments are Streaming DiLoCo's"
    params, count = abstract_params(config.clocked_model()), config.streaming.fragments
    fragments = [
        jax.eval_shape(partial(take, index=i, fragments=count), params) for i in range(count)
    ]
    return [payload_bytes(make_layout(fragment, config.exchange)) for fragment in fragments]


class StreamClock:
    """Times of one round after another."""

    def __init__(
        self,
        step_seconds: Sequence[float],
        of_round: Sequence[Part],
        end: Callable[[int, float, float], float],
        exchange: Callable[[int, int], float],
    ):
        """`step_seconds`: by slice; `end(slice, begin, seconds)`: when so much compute is done;
        `exchange(round, fragment)`: seconds."""
        self._steps = step_seconds
        self._parts = of_round
        self._end = end
        self._exchange = exchange
        self._at = [0.0] * len(step_seconds)
        self._over = 0.0
        self._ledger = Ledger(len(step_seconds))
        self.seconds = 0.0
        """Since the run's beginning."""

    def round(self, number: int) -> Span:
        """The next round. It ends when its last slice is through."""
        for fragment, part in enumerate(self._parts):
            self._compute(part.before)
            self._over = max(*self._at, self._over) + self._exchange(number, fragment)
            self._compute(part.beside)
            self._at = [max(at, self._over) for at in self._at]
        self.seconds = max(self._at)
        return self._ledger.close(self.seconds)

    def _compute(self, steps: int) -> None:
        for i, seconds in enumerate(self._steps):
            begin = self._at[i]
            self._at[i] = self._end(i, begin, steps * seconds)
            self._ledger.compute(i, begin, self._at[i])
