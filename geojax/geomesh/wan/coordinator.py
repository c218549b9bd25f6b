# SPDX-License-Identifier: Apache-2.0
"""The coordinator: hears slices, decides, writes the journal, and lets slices read it.

Invariant: all that it must remember is in the journal and in the records; what slices last said is
said again within a second. So it may be killed and started again at any moment. A slice that has
read another journal than this one is refused.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from geojax.config import GrpcConfig
from geojax.geomesh.wan.decide import LOOKING, Status, at_border, decide, is_alive
from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.journal import Entry, Journal
from geojax.geomesh.wan.ledger import Ledger
from geojax.geomesh.wan.rpc import Header, Server

_TICK_SECONDS = 0.05
_PAGE_BYTES = 1 << 20  # of entries in one reply
_LONGEST_WAIT_SECONDS = 10.0
_AT_THE_END = ("done", "gone")
_TOLD = {f.name for f in fields(Status)} - {
    "seen",
    "since",
    "worked",
    "busied",
    "looked",
    "restarted",
    "arrived",
}


@dataclass(frozen=True)
class Run:
    """What slices must agree on before they begin."""

    names: tuple[str, ...]
    fingerprint: str
    """Of the config."""


class Coordinator:
    """Answers `tell` and `follow`; `tick` decides. Without a network, and with any clock."""

    def __init__(
        self,
        run: Run,
        rules: GrpcConfig,
        journal: Journal,
        ledger: Ledger | None = None,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`ledger`: where slices' records go; `say`: takes lines for the user."""
        self._run, self._rules, self._journal = run, rules, journal
        self._ledger, self._say, self._clock = ledger, say, clock
        self.history = History()
        for entry in journal.entries:
            self.history.add(entry)
        if ledger:
            ledger.follow(self.history)
        self._statuses: dict[int, Status] = {}
        self._heirs: dict[int, tuple[str, float]] = {}
        """Processes that wait for the end of the one that is their slice, and since when."""
        self._retired: set[str] = set()
        """Incarnations of processes in whose place another one is."""
        self._dead: set[int] = set()
        self._began = self._opened = self._awake = clock()
        self._asleep = 0.0
        self._changed = threading.Condition()
        self._stopped = False

    def tell(self, header: Header) -> Header:
        """A slice says what it does; its records are taken, and how many are safe is told."""
        with self._changed:
            self._wake()
            index = self._index(header)
            self._require_known(header)
            now, before = self._now(), self._statuses.get(index)
            if before and before.incarnation != header["incarnation"]:
                if is_alive(before, now, self._rules):
                    return self._hold_off(before, header, now)
                self._retired.add(before.incarnation)
                self._heirs.pop(index, None)
            told = {name: header[name] for name in _TOLD if name in header}
            received = {int(j): tuple(v) for j, v in header.get("received", {}).items()}
            refused = tuple(header.get("refused", ()))
            told |= {"slice": index, "received": received, "refused": refused}
            status = Status(**told, seen=now, since=now, looked=now)
            known: dict[tuple[int, str], float] = {}
            if before:
                same = before.incarnation == status.incarnation
                status.worked, status.restarted = before.worked, before.restarted or not same
                if same and (before.border, before.epoch) == (status.border, status.epoch):
                    known = before.arrived
                    if before.phase == status.phase:
                        status.since = before.since
                if same:
                    status.busied = before.busied
                    if before.phase == "busy" != status.phase:
                        status.busied = now - before.since
                    if before.phase in LOOKING:
                        status.looked = before.looked
            versions = [(j, version) for j, held in received.items() for version in held]
            status.arrived = {key: known.get(key, now) for key in versions}
            if status.phase == "working":
                status.worked = status.since
            if before is None or before.incarnation != status.incarnation:
                self._say(f"slice {self._run.names[index]} is here, at {status.address}")
                self._changed.notify_all()
            self._statuses[index] = status
            if self._ledger:
                for record in header.get("records", ()):
                    self._ledger.take(index, record, self.history)
                self._ledger.write(self.history)
            self._decide()
            recorded = self._ledger.round if self._ledger else self.history.round
            return {"recorded": recorded, "epoch": self.history.epoch}

    def _hold_off(self, before: Status, header: Header, now: float) -> Header:
        """Another process is that slice and may be alive: the new one waits until it is silent for
        a lease, or is refused once it was heard again."""
        name, mine = self._run.names[before.slice], header["incarnation"]
        if self._heirs.get(before.slice, ("", 0.0))[0] != mine:
            self._heirs[before.slice] = mine, now
            self._say(
                f"slice {name}: another process, at {header['address']}, waits for the end of the "
                f"one at {before.address}"
            )
        if before.seen - self._heirs[before.slice][1] > self._rules.lease_seconds / 2:
            raise ValueError(
                f"slice {name} is at {before.address} already, and that process lives; this one, "
                f"at {header['address']}, is a second one. Stop one of them"
            )
        return {"waits": True, "recorded": -1, "epoch": self.history.epoch}

    def follow(self, header: Header) -> Header:
        """Entries after the first `after`, and which process is which slice; waits for what is not
        known to the caller yet up to `wait_seconds`."""
        self._index(header)
        after, journal = header["after"], self._journal
        wait = min(header.get("wait_seconds", 0.0), _LONGEST_WAIT_SECONDS)
        with self._changed:
            if after >= len(journal.chains) or journal.chains[after] != header["chain"]:
                raise ValueError(
                    "the coordinator's journal is not the one that this slice has followed; "
                    "another coordinator, or an old copy of its folder, answers at this address"
                )
            known = header.get("peers", {})
            self._changed.wait_for(
                lambda: (
                    len(journal.entries) > after
                    or any(s.incarnation != known.get(str(i)) for i, s in self._statuses.items())
                ),
                timeout=wait,
            )
            page = _page(journal.entries, after)
            return {
                "entries": page,
                "chain": journal.chains[after + len(page)],
                "peers": {str(i): [s.address, s.incarnation] for i, s in self._statuses.items()},
                "finished": self.history.ended,
            }

    def tick(self) -> None:
        """Time has passed."""
        with self._changed:
            self._wake()
            self._decide()
            self._mourn()
            if self.history.ended and self._ledger:
                self._ledger.write(self.history, patience_rounds=0)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to decide."""
        return self.history.stopped is not None or self.history.ended

    def _all_done(self) -> bool:
        """Whether every slice has reached the end of the run; one that says nothing for long, or
        nothing new since another has, is not waited for."""
        there = {
            index: status
            for index, status in self._statuses.items()
            if status.phase in _AT_THE_END and at_border(status, self.history)
        }
        if not there:
            return False
        first = min(status.since for status in there.values())
        now, rules = self._now(), self._rules
        for index in range(len(self._run.names)):
            status = self._statuses.get(index)
            if index in there:
                continue
            heard = status.seen if status else self._began
            if status and is_alive(status, now, rules):
                heard = max(status.since, first)
            if now - heard <= rules.join_seconds:
                return False
        return True

    def farewell_seconds(self) -> float:
        """How long slices are still answered once the run has ended: not at all where all have
        gone; for a lease where all are at its end; and longer where some come to it yet, as when
        they are started again."""
        with self._changed:
            found, now = list(self._statuses.values()), self._now()
        if found and not any(is_alive(s, now, self._rules) for s in found):
            return 0.0
        there = found and all(s.phase in _AT_THE_END for s in found)
        if there or self.history.stopped is not None:
            return self._rules.lease_seconds
        return self._rules.join_seconds

    def stop(self) -> None:
        """Decide nothing any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _now(self) -> float:
        """Seconds, but those while this process could not listen: they are held against nobody."""
        return self._clock() - self._asleep

    def _wake(self) -> None:
        before, self._awake = self._awake, self._clock()
        if self._awake - before > self._rules.lease_seconds / 2:
            then = before - self._asleep
            lived = [s for s in self._statuses.values() if is_alive(s, then, self._rules)]
            self._asleep += self._awake - before
            for status in lived:
                status.seen = self._now()
            self._heirs.clear()

    def _index(self, header: Mapping[str, Any]) -> int:
        name, run = header.get("name"), self._run
        if name not in run.names:
            raise ValueError(f"the run has no slice {name!r}; it has {', '.join(run.names)}")
        if header.get("fingerprint") != run.fingerprint:
            raise ValueError(
                f"slice {name} runs another config, or version, than the coordinator; start both "
                "with the same one"
            )
        if header.get("incarnation") in self._retired:
            raise ValueError(
                f"another process has taken the place of this one as slice {name}, which said "
                f"nothing for {self._rules.lease_seconds:g} s; it is at "
                f"{self._statuses[run.names.index(name)].address}"
            )
        return run.names.index(name)

    def _require_known(self, header: Mapping[str, Any]) -> None:
        """ValueError where a slice stands beyond this journal: decisions are written down before
        anybody acts on them."""
        history, place = self.history, (header.get("epoch", 0), header.get("border", 0))
        if history.start is not None and place > (history.epoch, history.round):
            raise ValueError(
                f"slice {header['name']} stands after round {place[1]}, and the coordinator's "
                f"journal ends with round {history.round}: it is an old copy; put the newest back, "
                "or start a new run"
            )

    def _decide(self) -> None:
        decided = False
        while not (self._stopped or self.history.ended):
            entry = decide(
                self._now(),
                self._began,
                self._opened,
                self.history,
                self._statuses,
                len(self._run.names),
                self._rules,
            )
            if entry is None and not decided and self._all_done():
                entry = {"kind": "end", "round": self.history.round}
            if entry is None:
                return
            decided = True
            before = set(self.history.members)
            self._journal.append(entry)
            self.history.add(entry)
            if self._ledger:
                self._ledger.follow(self.history)
            self._opened = self._now()
            for status in self._statuses.values():
                status.busied = 0.0
            self._narrate(entry, before)
            self._changed.notify_all()

    def _narrate(self, entry: Mapping[str, Any], before: set[int]) -> None:
        kind = entry["kind"]
        if kind == "round":
            number, members = entry["round"], set(entry["members"])
            if out := before - set(entry["merged"]):
                why = ", ".join(f"{self._run.names[i]} ({self._state(i)})" for i in sorted(out))
                self._say(f"round {number}: goes on without {why}")
            if back := members - before:
                self._say(f"round {number + 1}: {self._named(back)} is back")
        elif kind == "rollback":
            named = self._named(set(entry["members"]))
            self._say(f"from the end of round {entry['round']} again, with {named}")
        elif kind == "stop":
            self._say(f"the run stops: {entry['reason']}")

    def _state(self, index: int) -> str:
        """What is known of a slice, in words."""
        status, now = self._statuses.get(index), self._now()
        if status is None:
            return "never heard of"
        if not is_alive(status, now, self._rules):
            return f"silent for {now - status.seen:.1f} s"
        return f"{status.phase} at round {status.border + 1} for {now - status.since:.1f} s"

    def _mourn(self) -> None:
        now = self._now()
        for index, status in self._statuses.items():
            alive = is_alive(status, now, self._rules)
            if not alive and index not in self._dead and status.phase != "done":
                self._dead.add(index)
                why = "stops" if status.phase == "stopping" else "says nothing any more"
                self._say(f"slice {self._run.names[index]} {why}")
            elif alive:
                self._dead.discard(index)

    def _named(self, indices: set[int]) -> str:
        return ", ".join(self._run.names[i] for i in sorted(indices))


class Served:
    """A coordinator on the network, in a `with` block."""

    def __init__(
        self, coordinator: Coordinator, config: GrpcConfig, slices: int, stop: threading.Event
    ):
        self._coordinator, self._stop, self._config = coordinator, stop, config
        calls = {"tell": coordinator.tell, "follow": coordinator.follow}
        self._server = Server(config, config.port, 2 * slices + 4, calls)
        self.address = self._server.address

    def run(self) -> bool:
        """Until the run has ended, and slices have heard of it; False where `stop` was set."""
        ended = None
        while not self._stop.wait(_TICK_SECONDS):
            self._coordinator.tick()
            if not self._coordinator.ended:
                ended = None
            elif ended is None:
                ended = time.monotonic()
            elif time.monotonic() - ended > self._coordinator.farewell_seconds():
                return True
        return False

    def close(self) -> None:
        self._coordinator.stop()
        self._server.stop()


def _page(entries: Sequence[Entry], after: int) -> list[Entry]:
    """As many as one reply may hold, one at least."""
    page, size = [], 0
    for entry in islice(entries, after, None):
        size += len(json.dumps(entry))
        if page and size > _PAGE_BYTES:
            break
        page.append(entry)
    return page
