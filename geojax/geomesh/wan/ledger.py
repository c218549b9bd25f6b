# SPDX-License-Identifier: Apache-2.0
"""Slices' records put together into the run's `metrics.jsonl`, by the coordinator.

Every slice sends, for each round, its own record with the seconds of what it did (`Part` of
geojax.geomesh.timeline), how long it waited then, and the round's line as it saw it. Invariant:
rounds are written in order, once; a slice's compute, straggler wait, WAN wait and outer step sum to
the round's seconds. A round of which no slice can tell any more, for all were killed, is written as
one of no time and no tokens, and as `lost`.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geojax.geomesh.timeline import Part, closing_seconds, round_times
from geojax.geomesh.wan.history import History
from geojax.track.console import RunConsole
from geojax.track.metrics import MetricsWriter, Record, read_records

_PATIENCE_ROUNDS = 2  # for a slice that was merged and died before it sent its record


class Ledger:
    """Takes records in any order; slices send them again until they are written."""

    def __init__(
        self,
        writer: MetricsWriter,
        path: Path,
        names: Sequence[str],
        console: RunConsole | None = None,
    ):
        """`path`: the writer's; `console`: shows what is written."""
        self._writer, self._path, self._names = writer, path, names
        self._console = console
        self._load()

    def _load(self) -> None:
        self._parts: dict[int, dict[int, Record]] = defaultdict(dict)
        self._others: dict[int, dict[str, Record]] = defaultdict(dict)
        self._written: set[tuple[str, int]] = set()
        self.round = 0
        """The last one that is written."""
        self.tokens = 0
        self._seconds = 0.0
        self._slices: list[Record] = []  # of the round that is being written
        self._last: tuple[Record, list[Record]] | None = None
        for record in read_records(self._path):
            self._note(record)
        if self._slices:  # a crash cut its round short; slices send it again
            self._writer.rewind(self.round)
            self._load()

    def _note(self, record: Record) -> None:
        """It is written."""
        kind = record["kind"]
        self._written.add((kind, record.get("round", 0)))
        if kind == "slice":
            self._slices.append(record)
        elif kind == "round":
            self.round, self._seconds = record["round"], record["seconds"]
            self.tokens = record["tokens"]
            self._last, self._slices = (record, self._slices), []
        elif kind == "switch":
            self._seconds += record["switch_seconds"]

    def follow(self, history: History) -> None:
        """Forget what a rollback undid."""
        if self.round > history.round:
            self._writer.rewind(history.round)
            self._load()

    def take(self, index: int, record: Record, history: History) -> None:
        """From slice `index`: of kind slice, or one that all slices send alike."""
        number, kind = record["round"], record["kind"]
        if not history.holds(record["epoch"], number):
            return
        if kind == "slice" and number > self.round:
            self._parts[number][index] = record
        elif kind != "slice" and number >= self.round and (kind, number) not in self._written:
            self._others[number].setdefault(kind, record)

    def write(self, history: History, patience_rounds: int = _PATIENCE_ROUNDS) -> None:
        """What is complete, and what is that many rounds old."""
        self._write_others(self.round)
        while self.round < history.round:
            number = self.round + 1
            merged, parts = history.rounds[number - 1]["merged"], self._parts[number]
            if set(merged) - set(parts) and history.round - number < patience_rounds:
                return
            del self._parts[number]
            if parts:
                self._write_round(number, merged, parts)
            elif self._last:
                self._write_lost(number, *self._last)
            else:
                return
            self._write_others(number)

    def end(self, reason: str) -> None:
        """The run is over."""
        if ("end", self.round) not in self._written:
            fields = {"round": self.round, "tokens": self.tokens, "seconds": self._seconds}
            self._put("end", **fields, reason=reason)

    def _write_round(self, number: int, merged: Sequence[int], parts: dict[int, Record]) -> None:
        present = sorted(parts)
        done = [Part(**parts[i]["seconds"]) for i in present]
        closing = closing_seconds(done, [parts[i]["waited_seconds"] for i in present])
        names = [parts[i]["slice"]["slice"] for i in present]
        late = {r["slice"]: r["late_seconds"] for r in (self._last[1] if self._last else [])}
        times = round_times(done, [late.get(name, 0.0) for name in names], closing)
        slices = []
        for place, index in enumerate(present):
            record = parts[index]["slice"] | times.fields(place)
            record["merged"] = record["merged"] and index in merged
            self._put("slice", round=number, **record)
            slices.append(record)
        line = parts[min(parts)]["line"] | {
            "round": number,
            "round_seconds": times.total,
            "seconds": self._seconds + times.total,
        }
        self._put("round", **line)
        if self._console:
            self._console.round_line(line, slices)

    def _write_lost(self, number: int, line: Record, slices: list[Record]) -> None:
        nothing = round_times([Part(0.0, 0.0, 0.0, 0.0)], [0.0], 0.0).fields(0)
        empty = {"steps": 0, "tokens": 0, "loss": None, "merged": False}
        for record in (*slices, line):
            mine = {"round_seconds": 0.0, "lost": True} if record is line else nothing | empty
            fields: Record = {**record, **mine, "round": number}
            self._put(fields.pop("kind"), **fields)

    def _write_others(self, number: int) -> None:
        for kind, record in self._others.pop(number, {}).items():
            fields = {k: v for k, v in record.items() if k not in ("kind", "epoch")}
            if kind == "start":
                fields.pop("round")
            if kind == "eval":
                fields["seconds"] = self._seconds
                if self._console:
                    self._console.eval_line(fields)
            self._put(kind, **fields)

    def _put(self, kind: str, **fields: Any) -> None:
        self._writer.write(kind, **fields)
        self._note({"kind": kind, **fields})
