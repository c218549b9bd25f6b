# SPDX-License-Identifier: Apache-2.0
"""A slice without a model: its shared state counts how often each sample was merged.

Run as a program it is a slice's process, counting_replica.py INDEX SLICES ROUNDS AHEAD COORDINATOR
LOG, or the coordinator's, counting_replica.py SLICES PORT FOLDER.
"""

import hashlib
import json
import secrets
import sys
import threading
import time
from pathlib import Path

import numpy as np

from geojax.config import GrpcConfig
from geojax.geomesh.message import FRAME_BYTES, Header, pack, unpack, version
from geojax.geomesh.wan.coordinator import Coordinator, Run, Served
from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.journal import Journal
from geojax.geomesh.wan.member import Member, Stopped
from geojax.geomesh.wan.rounds import run_rounds
from geojax.geomesh.wan.samples import Border, Opened

WANTED = 3  # samples of slice i a round: this plus i
PARTS = 16
MOST = 20_000
FINGERPRINT = "counting"
FAST = {
    "deadline_floor_seconds": 0.5,
    "lease_seconds": 1.0,
    "join_seconds": 20.0,
    "call_seconds": 2.0,
}


def names(slices: int) -> tuple[str, ...]:
    return tuple(f"s{i}" for i in range(slices))


def wanted(members) -> dict[int, int]:
    return {i: WANTED + i for i in members}


def open_round(data: Border, number: int, members, rounds: int, overlap: bool) -> Opened:
    """The next round, `number`, of a run of so many."""
    return data.open(wanted(members), overlap, lambda merged: number >= rounds)


def data_at(history: History, border: int, rounds: int, overlap: bool) -> Border:
    """Of a border, from the journal alone."""
    data = Border()
    for number in range(1, border + 1):
        opened = open_round(data, number, history.members_of(number), rounds, overlap)
        data = Border.after(opened, history.rounds[number - 1]["merged"])
    return data


def check_frame(names):
    def check(number, index, message):
        unpack(message, number, index, names[index])

    return check


class CountingReplica:
    """Merges messages that list samples; the inner steps are sleep. `ahead`: the share of a round's
    that it does while its last message is under way. `stamp`, of its process, is in all messages,
    and the state tells which stamps were merged."""

    def __init__(
        self,
        index: int,
        rounds: int,
        seconds: float,
        stop: threading.Event,
        ahead: float = 0.0,
        stamp: int | None = None,
    ):
        self.stamp = secrets.randbits(32) if stamp is None else stamp
        self.stamps = np.zeros(1, np.uint64)
        self.index, self.rounds, self.seconds, self.stop = index, rounds, seconds, stop
        self.ahead = ahead
        self.epoch = self.border = 0
        self.counts = np.zeros(MOST, np.uint8)
        self.state_bytes = self.counts.nbytes + self.stamps.nbytes
        self.version = ""
        self.data = Border()
        self.feedback = 0
        """Rounds whose message changed what is fed back."""
        self.feedback_round = 0
        self.adopted = 0
        self.share, self.next, self.done = (), (), 0.0
        """Of the open round, and of the one after it; how much of that one's sleep is done."""
        self.gone_on = 0
        self.before_message = lambda number: None

    def digest(self) -> str:
        return hashlib.sha256(self.counts.tobytes() + self.stamps.tobytes()).hexdigest()

    def arrays(self):
        return [self.counts, self.stamps]

    def facts(self, member):
        return {"speed": 1 + self.index}

    def follow(self, history):
        self.data = data_at(history, self.border, self.rounds, self.ahead > 0)

    @property
    def finished(self):
        waiting = self.data.samples.returned or self.data.ahead
        return self.border >= self.rounds and not waiting

    def work(self, members):
        opened = open_round(self.data, self.border + 1, members, self.rounds, self.ahead > 0)
        begun = opened.shares[self.index] == self.next
        self.share = opened.shares[self.index]
        self.next = opened.ahead.get(self.index, ())
        if self.stop.wait(self.seconds * (1 - begun * self.done)):
            raise Stopped
        self.done = 0.0

    def go_on(self):
        if not self.next:
            return False
        if self.stop.wait(self.seconds * self.ahead):
            raise Stopped
        self.done, self.gone_on = self.ahead, self.gone_on + 1
        return True

    def message(self):
        body = np.zeros((PARTS, 2), np.int64)
        for row, part in zip(body[:-1], self.share, strict=False):
            row[:] = part.start, part.stop
        body[-1] = self.stamp
        self.before_message(self.border + 1)
        tokens = sum(map(len, self.share))
        frame = pack(Header(self.border + 1, self.index, tokens, 1), body.view(np.uint8).ravel())
        self.version = version(frame)
        return frame, {"expected_seconds": 1.0}

    def settle(self, number, merged, history):
        if merged and merged == self.version and self.feedback_round < number:
            self.feedback, self.feedback_round = self.feedback + 1, number

    def apply(self, number, row, history):
        counts, stamps = self.counts.copy(), self.stamps
        for index, message in enumerate(row):
            if message is not None:
                _, body = unpack(message, number, index, f"s{index}")
                *parts, (stamp, _) = body.copy().view(np.int64).reshape(PARTS, 2).tolist()
                for start, stop in parts:
                    counts[start:stop] += 1
                stamps = np.array(
                    [hash((*stamps.tolist(), number, index, stamp)) % 2**63], np.uint64
                )
        self.counts, self.stamps = counts, stamps

    def adopt(self, data, border, history):
        self.counts, self.stamps = data[:MOST].copy(), data[MOST:].copy().view(np.uint64)
        self.adopted += 1
        if history.last_merged(self.index) > self.feedback_round:
            self.feedback = 0

    def reached(self, history):
        pass


MESSAGE_BYTES = FRAME_BYTES + PARTS * 16


def join(index, slices, coordinator, stop, say=lambda text: None, settings=FAST) -> Member:
    return Member(
        GrpcConfig(**settings),
        names(slices),
        index,
        coordinator,
        FINGERPRINT,
        check_frame(names(slices)),
        MESSAGE_BYTES,
        stop,
        say,
    )


def main(index: int, slices: int, rounds: int, ahead: float, coordinator: str, log: Path) -> None:
    stop = threading.Event()
    replica = CountingReplica(index, rounds, 0.1, stop, ahead)
    with log.open("a") as file:

        def say(text):
            print(f"{time.time():.2f} {text}", file=file, flush=True)

        with join(index, slices, coordinator, stop, say) as member:
            run_rounds(member, replica)
    result = {
        "counts": np.trim_zeros(replica.counts).tolist(),
        "digest": replica.digest(),
        "rounds": replica.border,
        "adopted": replica.adopted,
        "feedback": replica.feedback,
        "gone_on": replica.gone_on,
    }
    log.with_suffix(".json").write_text(json.dumps(result))


def coordinate(slices: int, port: int, folder: Path) -> None:
    config = GrpcConfig(**FAST, port=port)
    journal = Journal(folder / "journal.jsonl")
    with (folder / "coordinator.log").open("a") as file:

        def say(text):
            print(f"{time.time():.2f} {text}", file=file, flush=True)

        run = Run(names(slices), FINGERPRINT)
        coordinator = Coordinator(run, config, journal, say=say)
        served = Served(coordinator, config, slices, threading.Event())
        (folder / "address").write_text(served.address)
        served.run()
        served.close()
    journal.close()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        coordinate(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(*map(int, sys.argv[1:4]), float(sys.argv[4]), sys.argv[5], Path(sys.argv[6]))
