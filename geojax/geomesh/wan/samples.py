# SPDX-License-Identifier: Apache-2.0
"""Which global samples a round takes, where slices may fail.

Slices may begin a round before the one before it is over, so the samples of that round are given
out with those of the one before, to the slices that are in it. Invariant: every sample below the
cursor is merged, in the hands of a slice of the open round or of the one after it, or returned, and
exactly one of these.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

Share = tuple[range, ...]
"""Global samples of one slice and round, in the order in which it takes them."""


@dataclass(frozen=True)
class Samples:
    """The state of the data, where rounds may lose slices."""

    cursor: int = 0
    """Next global sample that nobody had."""
    returned: tuple[range, ...] = ()
    """Samples below it whose round did not merge them; ascending, with gaps between."""

    @property
    def given(self) -> int:
        """Samples below the cursor that are not returned."""
        return self.cursor - sum(map(len, self.returned))

    def allot(self, wanted: Mapping[int, int]) -> tuple[dict[int, Share], "Samples"]:
        """So many samples for each slice, in slice order, returned ones first; and what is left."""
        cursor, returned = self.cursor, list(self.returned)
        shares: dict[int, Share] = {}
        for index in sorted(wanted):
            parts, missing = [], wanted[index]
            while missing and returned:
                first = returned.pop(0)
                parts.append(first[:missing])
                if first[missing:]:
                    returned.insert(0, first[missing:])
                missing -= len(parts[-1])
            if missing:
                parts.append(range(cursor, cursor + missing))
                cursor += missing
            shares[index] = _joined(parts)
        return shares, Samples(cursor, tuple(returned))

    def put_back(self, shares: Iterable[Share]) -> "Samples":
        """With the samples of slices that were left out returned."""
        ranges = [part for share in shares for part in share]
        every = sorted((*self.returned, *ranges), key=lambda part: part.start)
        return Samples(self.cursor, _joined(every))


@dataclass(frozen=True)
class Opened:
    """Who has which samples while a round is open."""

    shares: Mapping[int, Share]
    """Of its slices."""
    ahead: Mapping[int, Share]
    """Of the next round; empty where slices wait for this one's end."""
    samples: Samples


@dataclass(frozen=True)
class Border:
    """The state of the data between two rounds."""

    samples: Samples = Samples()
    ahead: Mapping[int, Share] = field(default_factory=dict)
    """Of the next round, given out with the one that is over."""

    @property
    def merged(self) -> int:
        """How many samples are."""
        return self.samples.given - count(self.ahead)

    def open(
        self, wanted: Mapping[int, int], overlap: bool, enough: Callable[[int], bool]
    ) -> Opened:
        """The next round, of slices that take so many samples. Slices that had been given theirs
        and are not in it return them. `overlap`: whether the round after it is given out, too, if
        there will be one: not where so many merged samples are `enough`."""
        samples = self.samples.put_back(s for i, s in self.ahead.items() if i not in wanted)
        kept = {i: share for i, share in self.ahead.items() if i in wanted}
        new, samples = samples.allot({i: n for i, n in wanted.items() if i not in kept})
        shares = kept | new
        ahead: Mapping[int, Share] = {}
        after = self.merged + count(shares)
        if overlap and (samples.returned or not enough(after)):
            ahead, samples = samples.allot(wanted)
        return Opened(shares, ahead, samples)

    @staticmethod
    def after(opened: Opened, merged: Collection[int]) -> "Border":
        """That round is over, with these slices."""
        out = [share for i, share in opened.shares.items() if i not in merged]
        return Border(opened.samples.put_back(out), opened.ahead)


def in_order(share: Share) -> range | np.ndarray:
    """The samples of a share."""
    if len(share) == 1:
        return share[0]
    return np.concatenate([np.arange(part.start, part.stop) for part in share])


def count(shares: Mapping[int, Share]) -> int:
    """Samples of all of them."""
    return sum(len(part) for share in shares.values() for part in share)


def _joined(parts: Iterable[range]) -> Share:
    """Neighbours that touch become one."""
    joined: list[range] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            part = range(joined.pop().start, part.stop)
        joined.append(part)
    return tuple(joined)
