# SPDX-License-Identifier: Apache-2.0
"""What a journal's entries come to: which rounds are over, and which slices the open one has.

Entries, by `kind`:
start     all slices are there; `members` of round 1, and `facts` of each slice (its profile)
round     `round` is over: `merged` slices, the `versions` of their messages, `members` of the next
          one, the `digest` of the shared state that it began with, `seconds` that slices took to
          report, and their `facts`; `longest`: seconds, by what was awaited, of whoever took
          longest, where nobody was left out for it; `late`: for what somebody was
rollback  nobody holds the state after later rounds any more, or the open one has lost too many
          members: `round` is the last one (again), `members` are those of the next
stop      the run cannot go on, for a `reason`
end       every slice has reached the run's end, or is not waited for any more

A border is a place between rounds: border r lies after round r. A state is that of a border in an
epoch, the number of rollbacks before it. Invariant: rounds are numbered from 1 without a gap.
"""

from collections.abc import Mapping
from typing import Any

from geojax.config import require
from geojax.geomesh.wan.journal import Entry


class History:
    """A fold over entries; the same in the coordinator and in every slice."""

    def __init__(self):
        self.start: Entry | None = None
        self.rounds: list[Entry] = []
        """Those that count, each with the `epoch` that it was over in; what a rollback undid is not
        among them."""
        self._opened: list[tuple[int, ...]] = []
        self.stopped: str | None = None
        self.ended = False
        self._rollbacks: list[int] = []

    def add(self, entry: Mapping[str, Any]) -> None:
        """The next entry. ConfigError where an older version of geojax wrote it."""
        kind = entry["kind"]
        if kind == "stop":
            self.stopped = entry["reason"]
            return
        if kind == "end":
            self.ended = True
            return
        if kind == "start":
            self.start = dict(entry)
        elif kind == "round":
            require(
                "versions" in entry,
                f"round {entry['round']} of the journal names no versions of messages: an older "
                "version of geojax wrote it; end that run with it, or start a new one",
            )
            assert entry["round"] == self.round + 1, f"round {entry['round']} after {self.round}"
            self.rounds.append({**entry, "epoch": self.epoch})
        else:
            assert kind == "rollback", f"an entry of kind {kind!r}; is it of a newer version?"
            del self.rounds[entry["round"] :]
            del self._opened[entry["round"] :]
            self._rollbacks.append(entry["round"])
        self._opened.append(tuple(entry["members"]))

    def copy(self) -> "History":
        """One that later entries do not change."""
        other = History()
        other.start, other.stopped, other.ended = self.start, self.stopped, self.ended
        other.rounds, other._opened = list(self.rounds), list(self._opened)
        other._rollbacks = list(self._rollbacks)
        return other

    @property
    def members(self) -> tuple[int, ...]:
        """Of the open round."""
        return self._opened[-1] if self._opened else ()

    def members_of(self, number: int) -> tuple[int, ...]:
        """Of a round that is over, or open."""
        return self._opened[number - 1]

    def version(self, number: int, index: int) -> str:
        """Of that slice's message in round `number`; empty where the round is not over, or has no
        message of it."""
        return (
            self.rounds[number - 1]["versions"].get(str(index), "") if number <= self.round else ""
        )

    @property
    def epoch(self) -> int:
        return len(self._rollbacks)

    @property
    def round(self) -> int:
        """The last one that is over."""
        return len(self.rounds)

    def holds(self, epoch: int, border: int) -> bool:
        """Whether a state of that epoch and border is one of this history."""
        undone = self._rollbacks[epoch:]
        return 0 <= epoch <= self.epoch and border <= min([self.round, *undone])

    def last_merged(self, index: int) -> int:
        """The last round that merged that slice; 0: none did."""
        numbers = (e["round"] for e in reversed(self.rounds) if index in e["merged"])
        return next(numbers, 0)
