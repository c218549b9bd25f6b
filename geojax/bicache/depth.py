# SPDX-License-Identifier: Apache-2.0
"""How deep a prefix may be shared: from its share of a request to a number of layers; and when a
request stops sharing.

Invariant: a larger share is never shared less deep.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int32

from geojax.config import require

_ROUNDING = 1e-9  # of 56 / 80 to 0.7
_WATCHED = 0.05  # of a refresh's row-layers, what looking costs at most

Covered = Literal["whole", "chained", "both"]
"""Prefixes in one piece, or built segment after segment."""


@dataclass(frozen=True)
class Depths:
    """Depth by share, a step function."""

    steps: tuple[tuple[float, int], ...]
    """(share from which on, layers), both increasing; below the first nothing is shared."""
    covers: Covered = "both"
    """The prefixes that they were made for."""

    def __post_init__(self):
        require(self.steps, "a table of depths is empty; give (share, layers)")
        for share, depth in self.steps:
            require(
                0 <= share < 1 and depth >= 0,
                f"a table of depths has {depth} layers from a share of {share} on; shares lie in "
                "[0, 1), and depths are 0 or more",
            )
        for (before, shallow), (share, depth) in pairwise(self.steps):
            require(
                share > before and depth >= shallow,
                f"a table of depths has {shallow} layers from {before} on and {depth} from {share} "
                "on; shares must increase, and depths must not fall",
            )

    def at(self, share: float) -> int:
        """Layers that a prefix of this share is shared in."""
        place = bisect_right([s for s, _ in self.steps], share + _ROUNDING)
        return self.steps[place - 1][1] if place else 0

    @property
    def distinct(self) -> tuple[int, ...]:
        """Depths above 0, increasing."""
        return tuple(sorted({depth for _, depth in self.steps if depth}))


@dataclass(frozen=True)
class Guard:
    """When a request stops sharing: where its own rows of the prefix are too far from the store's.

    Up to `rows` rows of the prefix, evenly spaced, run with the suffix through the shared layers in
    the first step of each refresh, so that they see it. Where their hidden state at the request's
    depth is farther from the stored one than the bound, that step is taken back, and the request
    goes on with a prefix of its own, refreshed as policy `refresh` does.
    """

    bounds: tuple[tuple[int, float], ...]
    """(depth, drift from which on sharing stops); depths without a bound are not watched."""
    rows: int = 8

    def bound(self, depth: int) -> float:
        return dict(self.bounds).get(depth, math.inf)

    @property
    def least(self) -> int:
        """Of the depths that are watched; 0: none is."""
        return min((d for d, drift in self.bounds if d and math.isfinite(drift)), default=0)

    def count(self, suffix: int, prefix: int, depth: int, layers: int) -> int:
        """Rows that are looked at, of a request of so many tokens: as many as are 5 % of a
        refresh's row-layers, up to `rows`, and 1 at least."""
        without = suffix * layers + prefix * (layers - depth)
        return max(1, min(self.rows, int(_WATCHED * without / depth)))


def probe_places(prefix: int, count: int) -> Int32[np.ndarray, " n"]:
    """Positions of the rows of a prefix that are looked at."""
    return ((np.arange(count) + 0.5) * prefix / max(count, 1)).astype(np.int32)


class Effect(NamedTuple):
    """Of reuse below one depth, over the masked rows of the kind of sequences where it is worst."""

    kl: float
    """Mean divergence of the predictions from those of the whole pass, in nats."""
    kl_p95: float
    agreement: float
    """Share of rows whose likeliest token stays."""


@dataclass(frozen=True)
class ShareProfile:
    """Of one share of the prefix."""

    share: float
    key_cosine: tuple[float, ...]
    """By layer: mean over rows and heads of the cosine of prefix-only and whole keys."""
    value_cosine: tuple[float, ...]
    effects: tuple[Effect, ...]
    """By depth 0..L, under the share of masks where it is worst for some kind."""
    worst_masked: tuple[float, ...]
    """By depth: that share of masks."""
    drift: tuple[float, ...]
    """By depth: what the guard's probes of 99 in 100 of these requests do not exceed."""
