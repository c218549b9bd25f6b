# SPDX-License-Identifier: Apache-2.0
"""One slice's side: it tells the coordinator what it does, follows the journal, and moves bytes.

Peers' messages arrive in the threads of a server of its own. Invariant: a slice that hears nothing
of the coordinator waits; it never goes on alone.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np

from geojax.config import GrpcConfig, RunError
from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.journal import Entry
from geojax.geomesh.wan.link import Link
from geojax.geomesh.wan.mail import Mail
from geojax.geomesh.wan.peers import Peers, Place
from geojax.geomesh.wan.rpc import CallError, Client, Header, Server, Streamed, chunks
from geojax.geomesh.wan.seat import KEPT_ROUNDS, Message, Offer, Overtaken, Stopped

_LONGEST_PAUSE_SECONDS = 5.0  # between tries
_RETRY_SECONDS = 0.2


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
        self._streamed = Streamed()
        self._client = Client(config, self._streamed)
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
        self._peers, self._mail = Peers(self._client, names, index, say), Mail()
        self._kept_rounds = 1
        self._offer: Offer | None = None
        self.finished = False
        self._admitted = False
        """Whether this process is the slice; another one may be, until it is silent for long."""
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
            streamed=self._streamed,
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
        with self._changed:
            self._status |= changes
        self._link.hurry()

    def record(self, *records: dict[str, Any]) -> None:
        with self._changed:
            self._records += [{"epoch": self.history.epoch, **record} for record in records]
        self._link.hurry()

    @property
    def unwritten(self) -> list[dict[str, Any]]:
        with self._changed:
            return list(self._records)

    def offer(self, offer: Offer) -> None:
        with self._changed:
            self._offer = offer

    def keep_messages(self, most_bytes: int) -> None:
        a_round = len(self._names) * self._message_bytes
        self._kept_rounds = min(max(most_bytes // a_round, 1), KEPT_ROUNDS)

    def wait(self, reached: Callable[[History], bool], seconds: float | None = None) -> bool:
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while not (self._admitted and reached(self.history)):
                self._raise_failure()
                if self.history.stopped:
                    raise RunError(self.history.stopped)
                silent = time.monotonic() - self._heard
                if self.history.ended and silent > self._config.join_seconds:
                    raise RunError(
                        "the run is over, and nobody is there to give its state to this slice; "
                        "start coordinator and slices again"
                    )
                if self._stop.is_set():
                    raise Stopped
                self._beat()
                left = 0.2 if deadline is None else min(0.2, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def wait_past(self, epoch: int, number: int) -> None:
        self.wait(lambda h: h.epoch != epoch or h.round >= number)

    def is_past(self, epoch: int, number: int) -> bool:
        with self._changed:
            return self.history.epoch != epoch or self.history.round >= number

    def send(self, epoch: int, number: int, message: Message) -> None:
        with self._changed:
            members = self.history.members
            self._mail.put(epoch, number, self.index, message)
            self._mail.sent(epoch, number)
        header = {"epoch": epoch, "round": number, "slice": self.index}
        for other in members:  # nobody waits for a peer that does not answer
            if other != self.index:
                threading.Thread(
                    target=self._send, args=(other, header, message), name="send", daemon=True
                ).start()

    def times(self, number: int, merged: Iterable[int]) -> tuple[float, float | None]:
        with self._changed:
            return self._mail.times(number, [i for i in merged if i != self.index])

    @property
    def sent_bytes(self) -> int:
        return self._streamed.sent_bytes

    @property
    def phase(self) -> str:
        with self._changed:
            return self._status["phase"]

    def collect(self, number: int) -> list[Message | None]:
        with self._changed:
            if number > self.history.round:  # it was undone
                raise Overtaken
            entry = self.history.rounds[number - 1]
            epoch, merged, versions = entry["epoch"], entry["merged"], entry["versions"]
            self._mail.prune(epoch, number + 1 - self._kept_rounds)
            box = self._mail.of(epoch, number)
        row: list[Message | None] = [None] * len(self._names)
        for index in merged:
            version = versions[str(index)]
            message = box.get((index, version))
            if message is None:
                header = {"epoch": epoch, "round": number, "slice": index, "version": version}
                message = self._peers.fetch(header, merged, self._message_bytes, self._check)
            if message is None:
                raise Overtaken
            row[index] = message
        return row

    def fetch_state(self, after: int, size_bytes: int) -> tuple[Offer, np.ndarray] | None:
        def wanted(epoch: int, border: int) -> bool:
            with self._changed:  # which may be further than when it was asked for
                return border > after and self.history.holds(epoch, border)

        return self._peers.fetch_state(wanted, size_bytes)

    def probe(self, message: Message) -> float:
        return self._peers.probe(message)

    def wait_for_the_end(self) -> None:
        with self._changed:
            while not (self.finished and not self._records):
                config, silent = self._config, time.monotonic() - self._heard
                patience = config.lease_seconds if self.finished else config.join_seconds
                if self._stop.is_set() or self._failure or silent > patience:
                    return
                self._changed.wait(0.2)

    def knows_all(self) -> bool:
        return self._peers.all_known

    def _send(self, other: int, header: Header, message: Message) -> None:
        """Until the round is over: to the process that is that slice, and to any that takes its
        place."""
        pause, said, reached = _RETRY_SECONDS, False, ""

        def over() -> bool:
            history = self.history
            gone = history.epoch != header["epoch"] or history.round >= header["round"]
            return gone or self._stop.is_set() or self._link.ending

        def due() -> bool:
            return self._peers.process_of(other) not in ("", reached)

        while not over():
            with self._changed:
                self._changed.wait_for(lambda: over() or due(), timeout=_LONGEST_PAUSE_SECONDS)
            if over() or not due():
                continue
            process = self._peers.process_of(other)
            try:
                self._peers.push(other, header, message, over)
            except CallError as error:
                if error.refused:  # as it will be the next time
                    self.say(f"slice {self._names[other]} does not take the message: {error}")
                    reached = process
                    continue
                if not said and not over():
                    self.say(f"cannot send to slice {self._names[other]} at {error}; trying again")
                    said = True
                with self._changed:
                    self._changed.wait_for(over, timeout=pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                reached, pause = process, _RETRY_SECONDS
                with self._changed:
                    self._mail.arrived(header["epoch"], header["round"], other)

    def _take_message(self, header: Header, message: Message) -> Header:
        key, sender = (header["epoch"], header["round"]), header["slice"]
        try:
            self._check(header["round"], sender, message)
        except RunError as error:
            self.say(f"refused a message: {error}")
            with self._changed:
                self._mail.refuse(*key, sender)
            self._link.hurry()
            raise
        with self._changed:
            history = self.history
            same, later = key[0] == history.epoch, key[0] > history.epoch
            current = later or (same and key[1] > history.round)
            if current:  # it may be ahead of what this slice has read of the journal
                self._mail.put(*key, sender, message)
                if key == (history.epoch, history.round + 1):
                    self._link.hurry()
        return {"taken": current}

    def _give_message(self, header: Header) -> tuple[Header, Iterable[memoryview]]:
        with self._changed:
            box = self._mail.of(header["epoch"], header["round"])
            message = box.get((header["slice"], header["version"]))
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

    def _say_this(self) -> Header:
        with self._changed:
            # What is here is looked up when it is said: messages come at any moment.
            epoch, border = self._status["epoch"], self._status["border"]
            received = self._mail.versions(epoch, border + 1)
            refused = self._mail.refused(epoch, border + 1)
            told = {"received": received, "refused": refused, "records": list(self._records)}
            return self._status | self._identity | told

    def _where(self) -> Header:
        with self._changed:
            known = {str(i): place.incarnation for i, place in self._peers.places.items()}
            place = {"after": len(self._entries), "chain": self._chain, "peers": known}
        return place | self._identity

    def _heard_back(self, told: Header, reply: Header) -> None:
        with self._changed:
            self._heard = time.monotonic()
            done = [r for r in told["records"] if r["round"] <= reply["recorded"]]
            self._records = [r for r in self._records if r not in done]
            self._admitted = not reply.get("waits", False)
            self._changed.notify_all()

    def _read_on(self, reply: Header) -> None:
        with self._changed:
            self._heard = time.monotonic()
            for entry in reply["entries"]:
                self.history.add(entry)
            self._mail.past(self.history.epoch, self.history.round)
            self._entries += reply["entries"]
            self._chain = reply["chain"]
            self._peers.places = {int(i): Place(*place) for i, place in reply["peers"].items()}
            self.finished = reply["finished"]
            self._changed.notify_all()

    def _was_refused(self, why: str) -> None:
        with self._changed:
            self._failure = RunError(f"the coordinator refuses this slice: {why}")
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure
