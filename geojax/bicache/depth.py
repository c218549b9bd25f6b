# SPDX-License-Identifier: Apache-2.0
"""How deep a prefix may be shared: from its share of a request to a number of layers; and when a
request stops sharing.

Invariant: a larger share is never shared less deep.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from geojax.config import require


@dataclass(frozen=True)
class Depths:
    """Depth by share, a step function."""

    steps: tuple[tuple[float, int], ...]
    """(share from which on, layers), both increasing; below the first nothing is shared."""

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
        """Layers that a prefix of this share, rounded to hundredths, is shared in."""
        place = bisect_right([s for s, _ in self.steps], round(share, 2))
        return self.steps[place - 1][1] if place else 0

    @property
    def distinct(self) -> tuple[int, ...]:
        """Depths above 0, increasing."""
        return tuple(sorted({depth for _, depth in self.steps if depth}))


@dataclass(frozen=True)
class Guard:
    """When a request stops sharing: where its own rows of the prefix are too far from the store's.

    `rows` rows of the prefix, evenly spaced, run with the suffix in the first step of each refresh,
    so that they see it. Where their hidden state at the request's depth is farther from the
    stored one than the bound, that step is taken back, and the request goes on with a prefix of its
    own, refreshed as policy `refresh` does.
    """

    bounds: tuple[tuple[int, float], ...]
    """(depth, drift from which on sharing stops); depths without a bound are not watched."""
    rows: int = 8

    def bound(self, depth: int) -> float:
        return dict(self.bounds).get(depth, math.inf)
