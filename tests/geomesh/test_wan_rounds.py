# SPDX-License-Identifier: Apache-2.0
"""Slices without a model, over real gRPC: rounds go on whatever fails, and no sample is lost."""

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np
import pytest
from counting_replica import FAST, FINGERPRINT, CountingReplica, join, names

from geojax.config import GrpcConfig, RunError
from geojax.geomesh.wan.coordinator import Coordinator, Run, Served
from geojax.geomesh.wan.journal import Journal
from geojax.geomesh.wan.member import Member, Stopped
from geojax.geomesh.wan.rounds import run_rounds
from geojax.geomesh.wan.seat import KEPT_ROUNDS

PATIENT = FAST | {"deadline_floor_seconds": 10.0, "lease_seconds": 10.0}
"""Nobody is left out for being slow; a busy machine may be."""


class World:
    """A coordinator and slices, as threads."""

    def __init__(
        self,
        folder,
        slices: int,
        rounds: int,
        seconds: float = 0.02,
        ahead: float = 0.0,
        settings: Mapping[str, float] = FAST,
    ):
        self.settings = settings
        self.slices, self.rounds, self.seconds, self.ahead = slices, rounds, seconds, ahead
        self.folder, self.said = folder, []
        self.port = 0
        self.begin()
        self.stops = [threading.Event() for _ in range(slices)]
        self.replicas = [
            CountingReplica(i, rounds, seconds, stop, ahead) for i, stop in enumerate(self.stops)
        ]
        self.errors: dict[int, BaseException] = {}
        self.members: dict[int, Member] = {}
        self.threads: dict[int, threading.Thread] = {}

    def begin(self) -> None:
        config = GrpcConfig(**self.settings, port=self.port)
        self.journal = Journal(self.folder / "journal.jsonl")
        run = Run(names(self.slices), FINGERPRINT)
        self.coordinator = Coordinator(run, config, self.journal, say=self.said.append)
        self.ending = threading.Event()
        self.served = Served(self.coordinator, config, self.slices, self.ending)
        self.address = self.served.address
        self.port = int(self.address.rsplit(":", 1)[1])
        self.loop = threading.Thread(target=self.served.run, daemon=True)
        self.loop.start()

    def end(self) -> None:
        self.ending.set()
        self.loop.join()
        self.served.close()
        self.journal.close()

    def start(self, index: int) -> None:
        def live():
            try:
                with join(
                    index,
                    self.slices,
                    self.address,
                    self.stops[index],
                    self.said.append,
                    self.settings,
                ) as member:
                    self.members[index] = member
                    run_rounds(member, self.replicas[index])
            except Stopped:
                pass
            except BaseException as error:
                self.errors[index] = error

        self.threads[index] = threading.Thread(target=live, daemon=True)
        self.threads[index].start()

    def stop(self, index: int) -> None:
        self.stops[index].set()
        self.threads[index].join(20)

    def replace(self, index: int) -> None:
        """A new process in the place of one that ended."""
        self.stops[index] = threading.Event()
        self.replicas[index] = CountingReplica(
            index, self.rounds, self.seconds, self.stops[index], self.ahead
        )
        self.start(index)

    def finish(self) -> None:
        for thread in self.threads.values():
            thread.join(60)
            assert not thread.is_alive(), "\n".join(self.said)
        assert not self.errors, (self.errors, self.said)


@pytest.fixture
def world(tmp_path):
    with ExitStack() as stack:

        def make(*args, **kwargs):
            made = World(tmp_path, *args, **kwargs)
            stack.callback(made.end)
            return made

        yield make


def assert_each_sample_once(replicas):
    for replica in replicas:
        cursor = replica.data.samples.cursor
        assert replica.counts[:cursor].tolist() == [1] * cursor
        assert not replica.counts[cursor:].any()
    assert len({r.digest() for r in replicas}) == 1


def wait_for_round(world, number):
    for replica in [r for r in world.replicas if not r.stop.is_set()]:
        while replica.border < number:
            assert not world.errors, world.errors
            threading.Event().wait(0.005)


def go_with_one_away(run, victim, before_it_is_back=lambda: None):
    """Until it is started again, when nobody has the messages any more that it lacks."""
    for i in range(run.slices):
        run.start(i)
    wait_for_round(run, 3)
    run.stop(victim)
    wait_for_round(run, 4 + KEPT_ROUNDS)
    before_it_is_back()
    run.replace(victim)


@pytest.mark.parametrize("ahead", [0.0, 0.5, 1.0])
def test_an_undisturbed_run_merges_all_slices_in_every_round(world, ahead):
    run = world(3, 10, ahead=ahead, settings=PATIENT)
    for i in range(3):
        run.start(i)
    run.finish()
    assert [e["merged"] for e in run.coordinator.history.rounds] == [[0, 1, 2]] * 10
    assert_each_sample_once(run.replicas)
    assert [r.feedback for r in run.replicas] == [10] * 3
    assert [r.gone_on for r in run.replicas] == [9 * (ahead > 0)] * 3  # but after the last round


def test_messages_that_come_while_a_slice_begins_to_wait_count(world):
    run = world(2, 3, settings=PATIENT)
    for replica in run.replicas:  # a slice hashes a large state when it says where it is

        def slowly(digest=replica.digest):
            threading.Event().wait(0.1)
            return digest()

        replica.digest = slowly
    for i in range(2):
        run.start(i)
    run.finish()
    assert [e["merged"] for e in run.coordinator.history.rounds] == [[0, 1]] * 3


@pytest.mark.parametrize(
    ("victim", "ahead"),
    [
        (0, 0.0),
        pytest.param(2, 0.0, marks=pytest.mark.full),
        pytest.param(1, 0.5, marks=pytest.mark.full),
    ],
)
def test_a_slice_that_dies_is_left_out_and_comes_back_with_the_state_of_a_peer(
    world, victim, ahead
):
    run = world(3, 80, seconds=0.05, ahead=ahead)
    go_with_one_away(run, victim)
    run.finish()
    merged = [victim in e["merged"] for e in run.coordinator.history.rounds]
    assert not all(merged)
    assert any(merged[-20:])
    assert run.replicas[victim].adopted >= 1
    assert_each_sample_once(run.replicas)


def test_a_state_that_takes_many_rounds_is_made_newer_by_messages(world, monkeypatch):
    give = Member._give_state

    def slowly(member, header):
        reply, parts = give(member, header)
        threading.Event().wait(0.5)  # and meanwhile others go on
        return reply, parts

    monkeypatch.setattr(Member, "_give_state", slowly)
    run = world(3, 70, seconds=0.05)
    go_with_one_away(run, 1)
    run.finish()
    assert run.replicas[1].adopted >= 1
    assert any(1 in e["merged"] for e in run.coordinator.history.rounds[-20:])
    assert_each_sample_once(run.replicas)


@pytest.mark.runs
def test_a_peer_that_hangs_keeps_nobody_from_coming_back(world, monkeypatch):
    described = Member._described

    def hangs(member):
        if member.index == 0:
            threading.Event().wait(1.5)
        return described(member)

    run = world(4, 120, seconds=0.05)
    go_with_one_away(run, 3, lambda: monkeypatch.setattr(Member, "_described", hangs))
    run.finish()
    assert any(3 in e["merged"] for e in run.coordinator.history.rounds[-20:])
    assert_each_sample_once(run.replicas)


def test_a_fault_on_the_line_ends_the_slice_and_says_why(world):
    run = world(2, 1000, seconds=0.05)
    for i in range(2):
        run.start(i)
    wait_for_round(run, 2)

    def broken(*args, **kwargs):
        raise AssertionError("a fault in what came")

    run.members[1]._link._read = broken
    run.threads[1].join(60)
    assert "the line to it broke, AssertionError: a fault in what came" in str(run.errors[1])
    run.stop(0)


@pytest.mark.parametrize("ahead", [0.0, 1.0])
def test_the_coordinator_may_die_and_come_back(world, ahead):
    run = world(3, 20, seconds=0.05, ahead=ahead, settings=PATIENT)
    for i in range(3):
        run.start(i)
    wait_for_round(run, 3)
    run.end()
    rounds = run.coordinator.history.round
    stale = threading.Event().wait(0.5)
    assert not stale
    assert max(r.border for r in run.replicas) <= rounds  # nobody goes on alone
    run.begin()
    run.finish()
    assert [e["merged"] for e in run.coordinator.history.rounds] == [[0, 1, 2]] * 20
    assert_each_sample_once(run.replicas)


@pytest.mark.parametrize("ahead", [0.0, pytest.param(1.0, marks=pytest.mark.full)])
def test_a_stuck_slice_is_left_out_by_a_deadline_and_comes_back(world, ahead):
    run = world(3, 70, seconds=0.05, ahead=ahead)
    release = threading.Event()
    run.replicas[1].before_message = lambda number: number == 4 and release.wait(30)
    for i in range(3):
        run.start(i)
    wait_for = run.replicas[0]
    while wait_for.border < 6:
        threading.Event().wait(0.005)
    release.set()
    run.finish()
    history = run.coordinator.history
    assert 1 not in history.rounds[3]["merged"]
    assert 1 in history.rounds[-1]["merged"]
    assert_each_sample_once(run.replicas)
    replica = run.replicas[1]
    assert replica.feedback == sum(1 in e["merged"] for e in history.rounds)


def test_a_slice_that_is_started_again_within_a_round_is_sent_the_messages_again(world):
    run = world(3, 1)
    with ExitStack() as stack:

        def member(index):
            return stack.enter_context(standing(run, index))

        members = [member(i) for i in range(3)]
        for i in (0, 1):
            send(members[i])

        def has_all():
            deadline = time.monotonic() + 60
            while set(members[2]._mail.versions(0, 1)) != {"0", "1"}:
                assert time.monotonic() < deadline, run.said
                time.sleep(0.01)

        has_all()
        members[2].close()
        members[2] = member(2)
        has_all()


def standing(run, index):
    """A slice's side, before the first round."""
    member = join(index, run.slices, run.address, threading.Event())
    member.tell(phase="standby", epoch=0, border=0, digest="")
    return member


def send(member):
    """Its message of the first round."""
    member.wait(lambda history: history.start is not None)
    replica = CountingReplica(member.index, 1, 0.0, threading.Event())
    member.send(0, 1, replica.message()[0])


def test_a_message_that_a_slice_refuses_is_not_sent_to_it_again(world):
    run, came = world(2, 1), []
    with standing(run, 0) as sender, standing(run, 1) as receiver:

        def check(number, index, message):
            came.append(index)
            raise RunError("it is none")

        receiver._check = check
        send(sender)
        while run.coordinator._statuses[1].refused != (0,):
            time.sleep(0.01)
        time.sleep(1)
    assert came == [0]


def test_garbage_and_other_configs_are_refused_and_the_run_goes_on(world):
    run, called = world(3, 10), threading.Event()
    for i in range(3):
        run.replicas[i].before_message = lambda number: number == 3 and called.wait(60)
        run.start(i)
    wait_for_round(run, 1)
    from geojax.geomesh.wan.rpc import CallError, Client

    client = Client(GrpcConfig(**FAST))
    follow = {"name": "s0", "fingerprint": FINGERPRINT, "after": 0, "chain": ""}
    peer = client.call(run.address, "follow", follow)["peers"]["0"][0]
    header = {"epoch": 0, "round": 9, "slice": 1}
    with pytest.raises(CallError, match=r"is not one|damaged|cut"):
        client.push(peer, "message", header, np.arange(200, dtype=np.uint8))
    with pytest.raises(CallError, match="at most"):
        client.push(peer, "message", header, np.zeros(10_000_000, np.uint8))
    with pytest.raises(CallError, match="another config"):
        client.call(run.address, "tell", {"name": "s0", "fingerprint": "x"})
    with pytest.raises(CallError, match="no slice"):
        client.call(run.address, "tell", {"name": "s9", "fingerprint": FINGERPRINT})
    client.close()
    called.set()
    run.finish()
    assert_each_sample_once(run.replicas)
