# SPDX-License-Identifier: Apache-2.0
"""Messages that a slice holds, by round, and how its own last one fares; under its member's lock.

Invariant: peers that are a few rounds behind find those rounds' messages here, and no older ones;
of two messages that processes of one slice sent for a round, none takes the other's place.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from geojax.geomesh.message import version
from geojax.geomesh.wan.seat import Message


@dataclass
class UnderWay:
    """A message of this slice's; all times on this machine's clock."""

    epoch: int
    number: int
    """Of its round."""
    began: float
    over: float | None = None
    """When the round's end was known."""
    taken: dict[int, float] = field(default_factory=dict)
    """When it was with which slice."""


class Mail:
    """Empty, at first."""

    def __init__(self):
        self._boxes: dict[tuple[int, int], dict[tuple[int, str], Message]] = {}
        self._refused: dict[tuple[int, int], set[int]] = {}
        self._underway: UnderWay | None = None
        """Or the last one."""

    def put(self, epoch: int, number: int, index: int, message: Message) -> None:
        """Slice `index`'s message of that round."""
        self._boxes.setdefault((epoch, number), {})[index, version(message)] = message

    def of(self, epoch: int, number: int) -> dict[tuple[int, str], Message]:
        """Messages of that round, by slice and version."""
        return dict(self._boxes.get((epoch, number), {}))

    def versions(self, epoch: int, number: int) -> dict[str, list[str]]:
        """Of that round, by slice; for JSON."""
        found: dict[str, list[str]] = {}
        for index, held in sorted(self._boxes.get((epoch, number), {})):
            found.setdefault(str(index), []).append(held)
        return found

    def refuse(self, epoch: int, number: int, index: int) -> None:
        """What came as slice `index`'s message of that round is none."""
        self._refused.setdefault((epoch, number), set()).add(index)

    def refused(self, epoch: int, number: int) -> list[int]:
        """Slices of which that is so."""
        return sorted(self._refused.get((epoch, number), ()))

    def prune(self, epoch: int, number: int) -> None:
        """Forget rounds before that one."""
        for rounds in (self._boxes, self._refused):
            for key in [k for k in rounds if k < (epoch, number)]:
                del rounds[key]

    def sent(self, epoch: int, number: int) -> None:
        """This slice's own message is under way."""
        self._underway = UnderWay(epoch, number, time.perf_counter())

    def arrived(self, epoch: int, number: int, other: int) -> None:
        """It is with that slice."""
        way = self._underway
        if way and (way.epoch, way.number) == (epoch, number):
            way.taken[other] = time.perf_counter()

    def past(self, epoch: int, number: int) -> None:
        """Of that epoch, rounds up to that one are over; of earlier ones, all."""
        way = self._underway
        if way and way.over is None and (way.epoch != epoch or way.number <= number):
            way.over = time.perf_counter()

    def times(self, number: int, others: Iterable[int]) -> tuple[float, float | None]:
        """Seconds until this slice's message of a round was with the others, and until the round's
        end was known here; 0 and None where it was not sent from here."""
        way = self._underway
        if way is None or way.number != number or way.over is None:
            return 0.0, None
        waited = way.over - way.began
        taken = [way.taken.get(i, way.over) for i in others]
        return min(waited, max(taken, default=way.began) - way.began), waited
