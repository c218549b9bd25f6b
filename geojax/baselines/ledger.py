# SPDX-License-Identifier: Apache-2.0
"""What each slice does in modelled time, cut into rounds that begin and end for all at once.

Invariant: the parts of a slice in a round sum to its length; what is neither compute nor transfer
is a wait.
"""

import math
from typing import NamedTuple


class Span(NamedTuple):
    """A round's seconds, by slice."""

    seconds: float
    compute: list[float]
    transfer: list[float]
    idle: list[float]


class Ledger:
    """Of K slices. Entries may reach past the end of a round, into the next ones."""

    def __init__(self, slices: int):
        self._from = 0.0
        self._entries: list[list[tuple[bool, float, float]]] = [[] for _ in range(slices)]

    def compute(self, index: int, begin: float, end: float) -> None:
        """Slice `index` computes from `begin` to `end`; not before the last round's end."""
        self._entries[index].append((True, begin, end))

    def transfer(self, index: int, begin: float, end: float) -> None:
        """It waits for bytes of its own."""
        self._entries[index].append((False, begin, end))

    def close(self, until: float, quiet_from: float = math.inf) -> Span:
        """The round from the last one's end `until` then.

        From `quiet_from` on nobody has work left, and all wait for the last bytes: a transfer.
        """
        seconds = until - self._from
        parts: list[list[float]] = [[], []]
        for entries in self._entries:
            for part, kind in zip(parts, (True, False), strict=True):
                part.append(
                    sum(
                        max(0.0, min(end, until) - max(begin, self._from))
                        for of, begin, end in entries
                        if of == kind
                    )
                )
            entries[:] = [entry for entry in entries if entry[2] > until]
        self._from = until
        compute, transfer = parts
        idle = [max(0.0, seconds - c - t) for c, t in zip(compute, transfer, strict=True)]
        late = [min(i, max(0.0, until - quiet_from)) for i in idle]
        transfer = [t + more for t, more in zip(transfer, late, strict=True)]
        idle = [i - more for i, more in zip(idle, late, strict=True)]
        return Span(seconds, compute, transfer, idle)
