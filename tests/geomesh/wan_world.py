# SPDX-License-Identifier: Apache-2.0
"""Slices, coordinators and a network in one thread and virtual time, for what takes days to happen.

The coordinator's code is the real one; slices do in steps what geojax.geomesh.wan.rounds does in
threads. Time passes a second a step; a round's work takes two.
"""

import hashlib
from itertools import count

import numpy as np
from counting_replica import FINGERPRINT, names, samples_at, wanted

from geojax.config import GrpcConfig
from geojax.geomesh.wan.coordinator import Coordinator, Run
from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.journal import _chain
from geojax.geomesh.wan.samples import Samples

RULES = GrpcConfig(lease_seconds=3, deadline_floor_seconds=4, join_seconds=20)
WORK_SECONDS = 2
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
        self.saved = 0, 0, np.zeros(MOST, np.uint8)
        self.restart()

    def restart(self):
        """A new process, from the last checkpoint."""
        self.incarnation = str(next(self.incarnations))
        self.alive, self.stuck = True, False
        self.epoch, self.border, counts = self.saved
        self.counts = counts.copy()
        self.history, self.read, self.chain = History(), 0, ""
        self.phase, self.mail, self.began = "starting", {}, None
        self.samples = Samples()
        self.refused = False

    @property
    def digest(self):
        return hashlib.sha256(self.counts[: self.counts.nonzero()[0].size + 64].data).hexdigest()

    def step(self):
        if not self.alive:
            return
        self.talk()
        if self.stuck:
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
            coordinator.tell(
                identity
                | {
                    "incarnation": self.incarnation,
                    "phase": self.phase,
                    "epoch": self.epoch,
                    "border": self.border,
                    "digest": self.digest,
                    "received": sorted(self.box()),
                    "facts": {},
                    "address": "",
                }
            )
        except ValueError:
            self.refused = True
            return
        for entry in reply["entries"]:
            self.history.add(entry)
        self.read += len(reply["entries"])
        self.chain = reply["chain"]

    def box(self):
        return self.mail.get((self.history.epoch, self.history.round + 1), {})

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
        if not valid or self.border < history.round - 1:
            self.take_state()
        elif self.border == history.round - 1:
            if not self.apply(history.round):
                self.take_state()
        else:
            self.work()

    def take_state(self):
        self.phase, self.began = "syncing", None
        before = self.border if self.history.holds(self.epoch, self.border) else -1
        for peer in self.world.reached_by(self.index):
            if peer.border > before and self.history.holds(peer.epoch, peer.border):
                self.counts, self.border = peer.counts.copy(), peer.border
                self.epoch = self.history.epoch
                return

    def apply(self, number):
        key = (self.history.rounds[number - 1]["epoch"], number)
        row = []
        for index in self.history.rounds[number - 1]["merged"]:
            boxes = [self, *self.world.reached_by(self.index)]
            found = [s.mail[key][index] for s in boxes if index in s.mail.get(key, {})]
            if not found:
                return False
            row.append(found[0])
        for share in row:
            for part in share:
                self.counts[part.start : part.stop] += 1
        self.border, self.began = number, None
        if number % SAVED_ROUNDS == self.index:
            self.saved = self.epoch, number, self.counts.copy()
        self.mail = {k: v for k, v in self.mail.items() if k >= key}
        return True

    def work(self):
        history = self.history
        self.samples = samples_at(history, self.border)
        if self.border >= self.world.rounds and not self.samples.returned:
            self.phase = "done"
            return
        place = (history.epoch, history.round)
        if self.index not in history.members:
            self.phase = "standby"
            return
        if self.began is None or self.began[0] != place:
            self.began, self.phase = (place, self.world.now), "working"
        if self.world.now - self.began[1] >= WORK_SECONDS:
            self.phase = "waiting"
            share = self.samples.allot(wanted(history.members))[0][self.index]
            key = (history.epoch, history.round + 1)
            for receiver in [self, *self.world.reached_by(self.index)]:
                receiver.mail.setdefault(key, {})[self.index] = share


class World:
    """Who is there, and who reaches whom."""

    def __init__(self, slices, rounds):
        self.now, self.rounds = 0.0, rounds
        self.run = Run(names(slices), FINGERPRINT)
        self.side_of_slice = [0] * slices
        self.coordinators = {0: self.make_coordinator(MemoryJournal())}
        self.slices = [Slice(self, i) for i in range(slices)]

    def make_coordinator(self, journal):
        return Coordinator(self.run, RULES, journal, clock=lambda: self.now)

    def coordinator_of(self, index):
        return self.coordinators.get(self.side_of_slice[index])

    def reached_by(self, index):
        side = self.side_of_slice[index]
        return [
            s
            for s in self.slices
            if s.index != index and s.alive and not s.stuck and self.side_of_slice[s.index] == side
        ]

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
