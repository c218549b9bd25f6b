# SPDX-License-Identifier: Apache-2.0
"""Slices, coordinators and a network in one thread and virtual time, for what takes days to happen.

The coordinator's code is the real one; slices do in steps what geojax.geomesh.wan.rounds does in
threads. Time passes a second a step; a round's work takes two, of which some may be done while the
message before is under way; a slice then says that it waits for the round before until it has sent
its message. Messages arrive at once, or after `transfer_seconds` of their sender, if the round is
still open there.
"""

import hashlib
from itertools import count

import numpy as np
from counting_replica import FINGERPRINT, data_at, names, open_round

from geojax.config import GrpcConfig
from geojax.geomesh.wan.coordinator import Coordinator, Run
from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.journal import _chain
from geojax.geomesh.wan.samples import Border
from geojax.geomesh.wan.seat import KEPT_ROUNDS

RULES = GrpcConfig(lease_seconds=3, deadline_floor_seconds=4, join_seconds=20)
WORK_SECONDS = 2
EVALUATED_ROUNDS = 4  # between evaluations
SAVED_ROUNDS = 5  # between checkpoints, of each slice at another round
MOST = 20_000


class MemoryJournal:
    """A journal whose disk is a list."""

    def __init__(self, entries=()):
        self.entries, self.chains = [], [""]
        for entry in entries:
            self.append(entry)

    def append(self, entry):
        self.chains.append(_chain(self.chains[-1], entry))
        self.entries.append(entry)


class Slice:
    """One slice's process, and those that take its place."""

    incarnations = count()

    def __init__(self, world, index):
        self.world, self.index = world, index
        self.saved = 0, 0, np.zeros(MOST, np.uint8), ""
        self.restart()

    def restart(self):
        """A new process, from the last checkpoint."""
        self.incarnation = str(next(self.incarnations))
        self.alive, self.stuck = True, False
        self.epoch, self.border, counts, self.merged = self.saved
        self.counts = counts.copy()
        self.history, self.read, self.chain = History(), 0, ""
        self.phase, self.mail, self.began = "starting", {}, None
        self.data = Border()
        self.next, self.done = (), 0.0
        """Samples of the round after the open one, and seconds of its work that are done."""
        self.told = None
        self.refuses = set()
        """Messages that came damaged, by round and sender."""
        self.evaluated, self.busy_until = 0, 0.0
        self.coming = None
        """A state that is under way, and since when."""
        self.refused = self.waits = False

    @property
    def digest(self):
        counts = self.counts[: self.counts.nonzero()[0].size + 200]
        return hashlib.sha256(counts.tobytes() + self.merged.encode()).hexdigest()

    def step(self):
        if not self.alive:
            return
        self.talk()
        if self.stuck or self.waits:
            return
        self.act()
        self.talk()

    def talk(self):
        coordinator = self.world.coordinator_of(self.index)
        if coordinator is None:
            return
        identity = {"name": f"s{self.index}", "fingerprint": FINGERPRINT}
        try:
            place = {"after": self.read, "chain": self.chain}
            reply = coordinator.follow(identity | place)
            told = coordinator.tell(
                identity
                | {
                    "incarnation": self.incarnation,
                    **(self.told or self.status()),
                    "sent": self.incarnation,
                    "received": {str(i): sorted(held) for i, held in self.box().items()},
                    "refused": [i for key, i in self.refuses if key == self.open_round],
                    "facts": self.world.facts,
                    "address": "",
                }
            )
        except ValueError:
            self.refused = True
            return
        self.waits = told.get("waits", False)
        for entry in reply["entries"]:
            self.history.add(entry)
        self.read += len(reply["entries"])
        self.chain = reply["chain"]

    def status(self):
        place = {"epoch": self.epoch, "border": self.border, "digest": self.digest}
        return {"phase": self.phase} | place

    def box(self):
        return self.mail.get(self.open_round, {})

    def act(self):
        history = self.history
        assert history.stopped is None, history.stopped
        if history.start is None:
            self.phase = "standby"
            return
        valid = history.holds(self.epoch, self.border)
        if valid and self.border < history.round:
            valid = history.rounds[self.border]["digest"] == self.digest
        if valid:
            self.epoch = history.epoch
        if not valid:
            self.take_state()
        elif self.border < history.round:
            near = self.border >= history.round - KEPT_ROUNDS
            if self.coming or not (near and self.apply(self.border + 1)):
                self.take_state()
        else:
            self.work()

    def take_state(self):
        self.phase, self.began, self.told = "syncing", None, None
        before = self.border if self.history.holds(self.epoch, self.border) else -1
        if self.coming is None:
            for peer in self.world.asked_by(self.index):
                if peer.border > before and self.history.holds(peer.epoch, peer.border):
                    state = peer.epoch, peer.border, peer.counts.copy(), peer.merged
                    self.coming = self.world.now, state
                    break
        if self.coming and self.world.now - self.coming[0] >= self.world.state_seconds:
            (epoch, border, counts, merged), self.coming = self.coming[1], None
            if self.history.holds(epoch, border):
                self.epoch, self.border = self.history.epoch, border
                self.counts, self.merged = counts, merged

    def apply(self, number):
        entry = self.history.rounds[number - 1]
        key, row = (entry["epoch"], number), []
        for index, version in entry["versions"].items():
            boxes = [s.mail.get(key, {}) for s in [self, *self.world.asked_by(self.index)]]
            held = [box[int(index)] for box in boxes if int(index) in box]
            found = [messages[version] for messages in held if version in messages]
            if not found:
                return False
            row.append(found[0])
        self.merged = f"{hash((self.merged, number, *entry['versions'].items()))}"
        for share in row:
            for part in share:
                self.counts[part.start : part.stop] += 1
        self.border, self.began = number, None
        if number % SAVED_ROUNDS == self.index:
            self.saved = self.epoch, number, self.counts.copy(), self.merged
        oldest = (key[0], number + 1 - KEPT_ROUNDS)
        self.mail = {k: v for k, v in self.mail.items() if k >= oldest}
        return True

    def work(self):
        history, rounds, ahead = self.history, self.world.rounds, self.world.ahead_seconds
        self.data = data_at(history, self.border, rounds, ahead > 0)
        if self.border >= rounds and not (self.data.samples.returned or self.data.ahead):
            self.phase, self.told = "done", None
            return
        place = (history.epoch, history.round)
        if self.index not in history.members:
            self.phase, self.began, self.told = "standby", None, None
            return
        if self.border % EVALUATED_ROUNDS == 0 and self.border > self.evaluated:
            self.evaluated = self.border
            self.busy_until = self.world.now + self.world.busy_seconds[self.index]
        if self.world.now < self.busy_until:
            self.phase, self.began, self.told = "busy", None, None
            return
        if self.began is None or self.began[0] != place:
            opened = open_round(self.data, self.border + 1, history.members, rounds, ahead > 0)
            share = opened.shares[self.index]
            done = min(self.done, ahead) if share == self.next else 0.0
            self.phase, self.told = "working", self.told if done else None
            self.began = place, self.world.now - done, share
            self.next, self.done = opened.ahead.get(self.index, ()), 0.0
        if self.world.now - self.began[1] >= self.world.work_seconds[self.index]:
            self.phase = "waiting"
            self.told = self.status() if self.next else None
            self.done += 1.0 if self.next else 0.0
            self.post_to(self)
            self.post()

    @property
    def open_round(self):
        return self.history.epoch, self.history.round + 1

    def post(self):
        """Its message is under way to all others."""
        now, takes = self.world.now, self.world.transfer_seconds[self.index]
        for receiver in self.world.reached_by(self.index):
            way = (receiver.incarnation, self.incarnation, self.open_round)
            stalled = (self.index, receiver.index) in self.world.stalled
            if now - self.world.posted.setdefault(way, now) >= takes and not stalled:
                self.post_to(receiver)

    def post_to(self, receiver):
        if self.index in self.world.garbled and receiver is not self:
            receiver.refuses.add((self.open_round, self.index))
            return
        box = receiver.mail.setdefault(self.open_round, {})
        box.setdefault(self.index, {})[self.incarnation] = self.began[2]


class World:
    """Who is there, and who reaches whom."""

    def __init__(self, slices, rounds, ahead_seconds=0.0):
        self.now, self.rounds, self.ahead_seconds = 0.0, rounds, ahead_seconds
        self.run = Run(names(slices), FINGERPRINT)
        self.side_of_slice = [0] * slices
        self.transfer_seconds = [0.0] * slices
        self.stalled = set()
        """Pairs of sender and receiver that nothing goes between."""
        self.deaf = set()
        """Slices that get no answer of a peer."""
        self.garbled = set()
        """Slices whose messages are none."""
        self.busy_seconds = [0] * slices
        self.work_seconds = [WORK_SECONDS] * slices
        self.state_seconds = 0
        """That taking over a peer's state takes."""
        self.facts = {}
        self.posted = {}
        """Since when a message is under way, by the processes of both ends and its round."""
        self.coordinators = {0: self.make_coordinator(MemoryJournal())}
        self.slices = [Slice(self, i) for i in range(slices)]

    def make_coordinator(self, journal):
        return Coordinator(self.run, RULES, journal, clock=lambda: self.now)

    def stop_coordinator(self, seconds):
        """It hears and decides nothing for so long."""
        stopped, self.coordinators = self.coordinators, {}
        self.pass_seconds(seconds)
        self.coordinators = stopped

    def coordinator_of(self, index):
        return self.coordinators.get(self.side_of_slice[index])

    def reached_by(self, index):
        side = self.side_of_slice[index]
        return [
            s
            for s in self.slices
            if s.index != index and s.alive and not s.stuck and self.side_of_slice[s.index] == side
        ]

    def asked_by(self, index):
        return [] if index in self.deaf else self.reached_by(index)

    def pass_seconds(self, seconds):
        for _ in range(seconds):
            self.now += 1
            for coordinator in self.coordinators.values():
                coordinator.tick()
            for slice_ in self.slices:
                slice_.step()

    def restart_coordinator(self, side=0):
        journal = self.coordinators[side]._journal
        self.coordinators[side] = self.make_coordinator(MemoryJournal(journal.entries))
