# SPDX-License-Identifier: Apache-2.0
"""One slice's side: it tells the coordinator what it does, follows the journal, and moves bytes.

Peers' messages arrive in the threads of a server of its own. Invariant: a slice that hears nothing
of the coordinator waits; it never goes on alone.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from geojax.config import GrpcConfig, RunError
from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.journal import Entry
from geojax.geomesh.wan.link import Link
from geojax.geomesh.wan.rpc import CallError, Client, Header, Server, chunks
from geojax.geomesh.wan.seat import Message, Offer, Overtaken, Stopped

_LONGEST_PAUSE_SECONDS = 5.0  # between tries
_RETRY_SECONDS = 0.2


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


class Member:
    """See geojax.geomesh.wan.seat.Seat; use as a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __init__(
        self,
        config: GrpcConfig,
        names: Sequence[str],
        index: int,
        coordinator: str,
        fingerprint: str,
        check: Callable[[int, int, Message], None],
        message_bytes: int,
        stop: threading.Event,
        say: Callable[[str], None] = lambda text: None,
    ):
        """`check(round, slice, message)` raises a RunError unless the message is that; a message
        has `message_bytes`. `stop` ends every wait."""
        self._config, self._names, self.index = config, names, index
        self._check, self._stop, self._say = check, stop, say
        self._message_bytes = message_bytes
        self._client = Client(config)
        self._changed = threading.Condition()
        self._status: dict[str, Any] = {"phase": "starting", "epoch": 0, "border": 0}
        self._records: list[dict[str, Any]] = []
        self._identity = {
            "name": names[index],
            "fingerprint": fingerprint,
            "incarnation": secrets.token_hex(4),
        }
        self.history = History()
        """As far as it is known here."""
        self._entries: list[Entry] = []
        self._chain = ""
        self._addresses: dict[int, str] = {}
        self._mail: dict[tuple[int, int], dict[int, Message]] = {}
        self._offer: Offer | None = None
        self._underway: UnderWay | None = None
        """Or the last one."""
        self.finished = False
        self._beat: Callable[[], None] = lambda: None
        self._failure: RunError | None = None
        self._heard = time.monotonic()
        self._server = Server(
            config,
            config.port,
            2 * len(names) + 4,
            receive={"message": self._take_message, "probe": lambda header, data: {}},
            unary={"border": lambda header: self._described()},
            send={"fetch": self._give_message, "state": self._give_state},
            largest_bytes=message_bytes,
        )
        self._status["address"] = self._server.address
        self._link = Link(
            self._client,
            coordinator,
            config.lease_seconds,
            self._say_this,
            self._where,
            self._heard_back,
            self._read_on,
            self._was_refused,
            say,
        )

    def close(self) -> None:
        """Say good-bye, and end."""
        with self._changed:
            done = self._status["phase"] == "done"
            self._status["phase"] = "gone" if done else "stopping"
            self._changed.notify_all()
        self._link.close()
        self._server.stop()
        self._client.close()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def while_waiting(self, beat: Callable[[], None]) -> None:
        self._beat = beat

    def say(self, text: str) -> None:
        self._say(text)

    def snapshot(self) -> History:
        with self._changed:
            return self.history.copy()

    def entries(self, after: int) -> list[Entry]:
        """Of the journal, all but the first `after`."""
        with self._changed:
            return self._entries[after:]

    def tell(self, **changes: Any) -> None:
        """What this slice does, from now on."""
        with self._changed:
            self._status |= changes
        self._link.hurry()

    def record(self, *records: dict[str, Any]) -> None:
        """For the run's records, each with `kind` and `round`; sent until they are written."""
        with self._changed:
            self._records += [{"epoch": self.history.epoch, **record} for record in records]
        self._link.hurry()

    @property
    def unwritten(self) -> list[dict[str, Any]]:
        """Records that are not known to be written."""
        with self._changed:
            return list(self._records)

    def offer(self, offer: Offer) -> None:
        """What peers get when they ask for the state."""
        with self._changed:
            self._offer = offer

    def wait(self, reached: Callable[[History], bool], seconds: float | None = None) -> bool:
        """Until `reached` is true of the history; False where `seconds` passed before. Stopped;
        RunError where the run cannot go on."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while not reached(self.history):
                self._raise_failure()
                if self.history.stopped:
                    raise RunError(self.history.stopped)
                if self._stop.is_set():
                    raise Stopped
                self._beat()
                left = 0.2 if deadline is None else min(0.2, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def wait_past(self, epoch: int, number: int) -> None:
        """Until that round is over, or was undone. Stopped; RunError."""
        self.wait(lambda h: h.epoch != epoch or h.round >= number)

    def is_past(self, epoch: int, number: int) -> bool:
        """Whether that round is over, or was undone."""
        with self._changed:
            return self.history.epoch != epoch or self.history.round >= number

    def send(self, epoch: int, number: int, message: Message) -> None:
        """Begin to send this slice's message of the round to the others in it."""
        with self._changed:
            members = self.history.members
            self._box(epoch, number)[self.index] = message
            self._underway = UnderWay(epoch, number, time.perf_counter())
        header = {"epoch": epoch, "round": number, "slice": self.index}
        for other in members:  # nobody waits for a peer that does not answer
            if other != self.index:
                threading.Thread(
                    target=self._send, args=(other, header, message), name="send", daemon=True
                ).start()

    def times(self, number: int, merged: Iterable[int]) -> tuple[float, float | None]:
        """Seconds until this slice's message of a round was with the others that it merged, and
        until the round's end was known here; 0 and None where this process did not send it."""
        with self._changed:
            way = self._underway
            if way is None or way.number != number or way.over is None:
                return 0.0, None
            waited = way.over - way.began
            taken = [way.taken.get(i, way.over) for i in merged if i != self.index]
            return min(waited, max(taken, default=way.began) - way.began), waited

    @property
    def phase(self) -> str:
        """What this slice last said that it does."""
        with self._changed:
            return self._status["phase"]

    def collect(self, number: int) -> list[Message | None]:
        """Messages of the slices that a round merged, by index, None for the others; those that are
        not here are fetched from whoever has them. Overtaken."""
        with self._changed:
            entry = self.history.rounds[number - 1]
            epoch, merged = entry["epoch"], entry["merged"]
            self._prune(epoch, number)
            box = dict(self._box(epoch, number))
        row: list[Message | None] = [None] * len(self._names)
        for index in merged:
            message = box.get(index)
            if message is None:
                message = self._fetch(epoch, number, index, merged)
            if message is None:
                raise Overtaken
            row[index] = message
        return row

    def fetch_state(
        self, wanted: Callable[[int, int], bool], size_bytes: int
    ) -> tuple[Offer, np.ndarray] | None:
        """A state of a peer's that `wanted(epoch, border)` accepts, and its bytes; None: nobody has
        it now."""
        for address in self._peers():
            try:
                found = self._client.call(address, "border", {})
                if not wanted(found["epoch"], found["border"]):
                    continue
                found, data = self._client.pull(address, "state", {}, size_bytes)
            except CallError as error:
                self.say(f"no state from {error}")
                continue
            if wanted(found["epoch"], found["border"]):
                return Offer(found["epoch"], found["border"], found["digest"], ()), data
        return None

    def probe(self, message: Message) -> float:
        """Seconds that sending a message to every peer, at once, takes."""
        started = time.perf_counter()
        peers = self._peers()
        with ThreadPoolExecutor(max(len(peers), 1)) as pool:
            for address in peers:
                pool.submit(self._quietly, address, message)
        return time.perf_counter() - started

    def wait_for_the_end(self) -> None:
        """Until every slice has reached the end, or the coordinator has gone."""
        with self._changed:
            while not (self.finished and not self._records):
                config, silent = self._config, time.monotonic() - self._heard
                patience = config.lease_seconds if self.finished else config.join_seconds
                if self._stop.is_set() or self._failure or silent > patience:
                    return
                self._changed.wait(0.2)

    def knows_all(self) -> bool:
        return len(self._addresses) == len(self._names)

    def _quietly(self, address: str, message: Message) -> None:
        try:
            self._client.push(address, "probe", {}, message)
        except CallError as error:
            self.say(f"cannot send to {error}")

    def _send(self, other: int, header: Header, message: Message) -> None:
        """Until it is there, or the round is over."""
        pause, said = _RETRY_SECONDS, False

        def over() -> bool:
            history = self.history
            gone = history.epoch != header["epoch"] or history.round >= header["round"]
            return gone or self._stop.is_set() or self._link.ending

        while not over():
            address = self._addresses.get(other)
            try:
                if address:
                    self._client.push(address, "message", header, message)
                    self._arrived(other, header)
                    return
            except CallError as error:
                if not said:
                    self.say(f"cannot send to slice {self._names[other]} at {error}; trying again")
                    said = True
            with self._changed:
                self._changed.wait_for(over, timeout=pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _arrived(self, other: int, header: Header) -> None:
        with self._changed:
            way = self._underway
            if way and (way.epoch, way.number) == (header["epoch"], header["round"]):
                way.taken[other] = time.perf_counter()

    def _fetch(self, epoch: int, number: int, index: int, merged: Iterable[int]) -> Message | None:
        """From its sender, or from any other slice that was merged with it."""
        header = {"epoch": epoch, "round": number, "slice": index}
        for holder in [index, *(i for i in merged if i not in (index, self.index))]:
            address = self._addresses.get(holder)
            if address is None or holder == self.index:
                continue
            try:
                _, message = self._client.pull(address, "fetch", header, self._message_bytes)
                self._check(number, index, message)
            except RunError:
                continue
            return message
        return None

    def _take_message(self, header: Header, message: Message) -> Header:
        key, sender = (header["epoch"], header["round"]), header["slice"]
        try:
            self._check(header["round"], sender, message)
        except RunError as error:
            self.say(f"refused a message: {error}")
            raise
        with self._changed:
            history = self.history
            same, later = key[0] == history.epoch, key[0] > history.epoch
            current = later or (same and key[1] > history.round)
            if current:  # it may be ahead of what this slice has read of the journal
                self._mail.setdefault(key, {})[sender] = message
                if key == (history.epoch, history.round + 1):
                    self._link.hurry()
        return {"taken": current}

    def _give_message(self, header: Header) -> tuple[Header, Iterable[memoryview]]:
        with self._changed:
            box = self._mail.get((header["epoch"], header["round"]), {})
            message = box.get(header["slice"])
        if message is None:
            raise LookupError(f"no message of slice {header['slice']}, round {header['round']}")
        return {"size_bytes": message.size}, chunks([message])

    def _give_state(self, header: Header) -> tuple[Header, Iterable[memoryview]]:
        with self._changed:
            described, offer = self._described(), self._offer
        assert offer is not None, "it is described"
        size = sum(array.nbytes for array in offer.arrays)
        return described | {"size_bytes": size}, chunks(offer.arrays)

    def _described(self) -> Header:
        with self._changed:
            if self._offer is None:
                raise LookupError("no state yet")
            epoch, border, digest, _ = self._offer
            return {"epoch": epoch, "border": border, "digest": digest}

    def _box(self, epoch: int, number: int) -> dict[int, Message]:
        return self._mail.setdefault((epoch, number), {})

    def _prune(self, epoch: int, number: int) -> None:
        """Peers that are one round behind find its messages here, and no older ones."""
        for key in [k for k in self._mail if k < (epoch, number)]:
            del self._mail[key]

    def _peers(self) -> list[str]:
        with self._changed:
            return [a for i, a in sorted(self._addresses.items()) if i != self.index]

    def _say_this(self) -> Header:
        with self._changed:
            # What is here is looked up when it is said: messages come at any moment.
            epoch, border = self._status["epoch"], self._status["border"]
            received = sorted(self._mail.get((epoch, border + 1), {}))
            told = {"received": received, "records": list(self._records)}
            return self._status | self._identity | told

    def _where(self) -> Header:
        return {"after": len(self._entries), "chain": self._chain} | self._identity

    def _heard_back(self, told: Header, reply: Header) -> None:
        with self._changed:
            self._heard = time.monotonic()
            done = [r for r in told["records"] if r["round"] <= reply["recorded"]]
            self._records = [r for r in self._records if r not in done]

    def _read_on(self, reply: Header) -> None:
        with self._changed:
            self._heard = time.monotonic()
            for entry in reply["entries"]:
                self.history.add(entry)
            way = self._underway
            if way and way.over is None and self.is_past(way.epoch, way.number):
                way.over = time.perf_counter()
            self._entries += reply["entries"]
            self._chain = reply["chain"]
            self._addresses = {int(i): a for i, a in reply["addresses"].items()}
            self.finished = reply["finished"]
            self._changed.notify_all()

    def _was_refused(self, why: str) -> None:
        with self._changed:
            self._failure = RunError(f"the coordinator refuses this slice: {why}")
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure
