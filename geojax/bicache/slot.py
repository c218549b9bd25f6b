# SPDX-License-Identifier: Apache-2.0
"""A request, what of it is a prefix, and where it stands while it is answered.

Invariant: the pages of a slot's prefix are the store's below its depth and its own from there on.

Shapes: L layers, b of them below its depth, j pages of a prefix, i of a suffix, n pages in all, s
positions.
"""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from geojax.bicache.pages import pages_of
from geojax.bicache.store import Entry
from geojax.diffusion.canvas import Canvas, Rules
from geojax.diffusion.request import Request


@dataclass(frozen=True)
class Job:
    """A request, and what of it is a prefix."""

    request: Request
    segments: tuple[int, ...] = ()
    """Tokens of each segment of the prefix, from the first token on; () where nothing is shared."""
    salt: str = ""
    """Prefixes are shared among requests of one salt only."""
    exact: bool = False
    """Nothing is reused for it, neither between requests nor between steps."""

    @property
    def prefix(self) -> int:
        return sum(self.segments)


@dataclass(eq=False)
class Slot:
    """A request that is being answered."""

    job: Job
    canvas: Canvas
    """Its row [1, s], on the host."""
    rules: Rules
    depth: int
    since: int
    every: int
    counts: Int32[np.ndarray, " j"]
    table: Int32[np.ndarray, "L j"]
    hidden: Int32[np.ndarray, " j"]
    suffix: Int32[np.ndarray, "L i"]
    own: Int32[np.ndarray, " n"]
    """Pages that are its own."""
    spare: Int32[np.ndarray, "b j"]
    """Those of them for its prefix below its depth, should the guard stop its sharing; b is 0 where
    none watches."""
    chain: list[Entry] = field(default_factory=list)
    generation: int = 0
    """Of the engine's pool that its pages are of."""

    @property
    def prefix(self) -> int:
        """Tokens whose rows are kept."""
        return int(self.counts.sum())

    @property
    def done(self) -> bool:
        return bool(self.canvas.done[0])

    @property
    def broken(self) -> bool:
        """Whether the model gave it logits that are no numbers; then there is no answer."""
        return bool(self.canvas.broken[0])


def page_counts(rows: int, page: int) -> Int32[np.ndarray, " j"]:
    """Rows of each page of a segment."""
    at = np.arange(pages_of(rows, page)) * page
    return np.minimum(rows - at, page).astype(np.int32)
