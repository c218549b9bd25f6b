# SPDX-License-Identifier: Apache-2.0
"""A slice of several processes, threads here, is one slice to the others; without a model."""

import threading
from contextlib import ExitStack

import pytest
from counting_replica import FAST, FINGERPRINT, CountingReplica, join, names
from test_relay import Cluster

from geojax.config import GrpcConfig, RunError
from geojax.geomesh.led import Led
from geojax.geomesh.wan.coordinator import Coordinator, Run, Served
from geojax.geomesh.wan.journal import Journal
from geojax.geomesh.wan.rounds import run_rounds
from geojax.geomesh.wan.seat import Stopped

PATIENCE_SECONDS = 60
SLICES = 3


class World:
    """A coordinator, and slices of so many processes each."""

    def __init__(self, folder, *processes):
        self.results, self.replicas, self.threads, self.clusters = {}, {}, [], []
        self.stop = threading.Event()
        self.stops = {}
        self.processes = processes
        # A slow machine is not to leave a slice out.
        config = GrpcConfig(**FAST | {"deadline_floor_seconds": 30.0, "lease_seconds": 30.0})
        self.journal = Journal(folder / "journal.jsonl")
        coordinator = Coordinator(Run(names(SLICES), FINGERPRINT), config, self.journal)
        self.served = Served(coordinator, config, SLICES, self.stop)

    def __enter__(self):
        self._thread("coordinator", self.served.run)
        return self

    def __exit__(self, *_):
        for stop in (self.stop, *self.stops.values()):
            stop.set()
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)
        for cluster in self.clusters:
            cluster.__exit__()
        self.served.close()
        self.journal.close()

    def start(self, rounds, change=lambda key, replica: None):
        """All slices; `change` may change a process's replica before it begins."""
        for index, count in enumerate(self.processes):
            cluster = Cluster(count)
            self.clusters.append(cluster)
            for number, relay in enumerate(cluster.relays):
                key = index, number
                self.stops[key] = cluster.stops[number]
                replica = CountingReplica(
                    index, rounds, 0.02, threading.Event(), ahead=0.5, stamp=index
                )
                change(key, replica)
                self.replicas[key] = replica
                self._thread(key, self._take_part, index, relay, cluster.stops[number], replica)

    def finish(self):
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive(), (thread.name, self.results)
        return self.results

    def _take_part(self, index, relay, stop, replica):
        with ExitStack() as stack:
            stack.enter_context(relay)
            member = None
            if relay.is_first:
                member = stack.enter_context(join(index, SLICES, self.served.address, stop))
            seat = Led(index, relay, member)
            work = replica.work

            def agreed(members):
                if seat.stopping:
                    raise Stopped
                work(members)

            replica.work = agreed
            run_rounds(seat, replica)
        return replica.digest()

    def _thread(self, key, function, *args):
        def run():
            try:
                self.results[key] = function(*args)
            except BaseException as error:
                self.results[key] = error

        thread = threading.Thread(target=run, name=str(key), daemon=True)
        self.threads.append(thread)
        thread.start()


def test_processes_of_a_slice_follow_it_to_the_end(tmp_path):
    with World(tmp_path, 3, 1, 2) as world:
        world.start(12)
        results = world.finish()
    assert results.pop("coordinator") is True
    assert len(set(results.values())) == 1, results
    assert {r.border for r in world.replicas.values()} == {12}
    entries = world.journal.entries
    assert all(len(e["merged"]) == SLICES for e in entries if e["kind"] == "round")
    counts = {tuple(r.counts.tolist()) for r in world.replicas.values()}
    assert len(counts) == 1
    assert set(counts.pop()) == {0, 1}
    for (index, _), replica in world.replicas.items():
        first = world.replicas[index, 0]
        assert (replica.gone_on, replica.feedback) == (first.gone_on, first.feedback)


def test_a_signal_to_one_process_stops_all_of_its_slice_at_one_place(tmp_path):
    with World(tmp_path, 3, 1, 1) as world:

        def change(key, replica):
            if key == (0, 2):
                begin = replica.message

                def message():
                    if replica.border == 4:
                        world.stops[key].set()
                    return begin()

                replica.message = message

        world.start(10_000, change)
        slice_ = [t for t in world.threads if t.name.startswith("(0")]
        for thread in slice_:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
        assert all(isinstance(world.results[0, i], Stopped) for i in range(3)), world.results
        stopped = [world.replicas[0, i] for i in range(3)]
        assert len({(r.border, r.digest(), r.feedback, r.done) for r in stopped}) == 1
        assert stopped[0].border >= 4
        assert (1, 0) not in world.results  # the others go on


def test_a_process_whose_parameters_differ_ends_the_slice_before_they_are_sent(tmp_path):
    with World(tmp_path, 2, 1, 1) as world:

        def change(key, replica):
            if key == (0, 1):
                apply = replica.apply

                def damaged(number, row, history):
                    apply(number, row, history)
                    if number == 3:
                        replica.counts[7] += 1

                replica.apply = damaged

        world.start(10_000, change)
        for thread in world.threads:
            if thread.name == str((0, 1)):
                thread.join(PATIENCE_SECONDS)
        error = world.results[0, 1]
        assert isinstance(error, RunError)
        assert "after round 3 this process holds other shared parameters" in str(error)


def test_processes_that_ask_for_different_things_are_told_apart():
    class Asked:
        stopping = False

        def entries(self, after):
            return []

    def speak(relay):
        return Led(0, relay, Asked()).stopping

    def hear(relay):
        with pytest.raises(RunError, match="asks for 'snapshot' and the first process"):
            Led(0, relay, None).snapshot()

    with Cluster(2) as cluster:
        cluster.run(speak, hear)
