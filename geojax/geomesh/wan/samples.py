# SPDX-License-Identifier: Apache-2.0
"""Which global samples a round takes, where slices may fail.

Invariant: every sample below the cursor is merged, in the hands of a slice of the open round, or
returned, and exactly one of these.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
    def merged(self) -> int:
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


def _joined(parts: Iterable[range]) -> Share:
    """Neighbours that touch become one."""
    joined: list[range] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            part = range(joined.pop().start, part.stop)
        joined.append(part)
    return tuple(joined)
