# SPDX-License-Identifier: Apache-2.0
"""Who is in a round, whatever fails: decisions, cut networks, and samples merged exactly once."""

import json
import subprocess
import sys
from itertools import combinations

import pytest
from counting_replica import FINGERPRINT, names
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wan_world import RULES, MemoryJournal, World

from geojax.config import ConfigError, GrpcConfig, RunError
from geojax.geomesh.wan.coordinator import Coordinator, Run
from geojax.geomesh.wan.decide import is_alive, limit_seconds
from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.journal import Journal
from geojax.geomesh.wan.samples import Samples

MANY = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def merged(world, side=0):
    return [e["merged"] for e in world.coordinators[side].history.rounds]


def assert_each_sample_once(world):
    for s in world.slices:
        assert s.phase == "done", [(x.phase, x.border, x.alive) for x in world.slices]
        cursor = s.data.samples.cursor
        assert s.counts[:cursor].tolist() == [1] * cursor
        assert not s.counts[cursor:].any()
    assert len({s.digest for s in world.slices}) == 1


@MANY
@given(st.integers(2, 5), st.sampled_from([0, 1, 2]), st.data())
def test_whatever_fails_every_sample_is_merged_once(slices, ahead_seconds, data):
    world = World(slices, rounds=12, ahead_seconds=ahead_seconds)
    what = st.tuples(
        st.sampled_from(["kill", "start", "stick", "free", "cut", "heal", "coordinator"]),
        st.integers(0, slices - 1),
        st.integers(1, 12),
    )
    for event, index, seconds in data.draw(st.lists(what, max_size=25)):
        victim = world.slices[index]
        if event == "kill":
            victim.alive = False
        elif event == "start" and not victim.alive:
            victim.restart()
        elif event == "stick":
            victim.stuck = True
        elif event == "free":
            victim.stuck = False
        elif event == "cut":
            world.side_of_slice[index] = 1
        elif event == "heal":
            world.side_of_slice[index] = 0
        elif event == "coordinator":
            world.restart_coordinator()
        world.pass_seconds(seconds)
        assert all(2 * len(m) > slices for m in merged(world))
    world.side_of_slice = [0] * slices
    for s in world.slices:
        s.stuck = False
        if not s.alive:
            s.restart()
    for _ in range(40):
        world.pass_seconds(10)
        if all(s.phase == "done" for s in world.slices):
            break
    assert_each_sample_once(world)


@pytest.mark.parametrize("cut", [(3,), (0,), (2, 3), (0, 1), (1, 2, 3), (0, 1, 2)])
def test_a_cut_network_never_has_two_runs_that_go_on(cut):
    """The coordinator stays with the others; beyond the cut one is started from its journal."""
    world = World(4, rounds=1000)
    world.pass_seconds(30)
    before = len(merged(world))
    assert before > 3
    for index in cut:
        world.side_of_slice[index] = 1
    world.coordinators[1] = world.make_coordinator(
        MemoryJournal(world.coordinators[0]._journal.entries)
    )
    world.pass_seconds(100)
    rounds = {side: len(merged(world, side)) - before for side in (0, 1)}
    here, beyond = 4 - len(cut), len(cut)
    assert (rounds[0] > 5) == (here > 2)
    assert (rounds[1] > 5) == (beyond > 2)
    assert min(rounds.values()) <= 0 + (here == beyond)
    if here != beyond:
        return
    assert max(rounds.values()) <= 1  # at most what had been reported when the cut came
    world.side_of_slice = [0] * 4
    del world.coordinators[1]
    world.pass_seconds(60)
    assert len(merged(world)) > before + 5


def test_slices_that_followed_another_journal_are_refused():
    world = World(4, rounds=1000)
    world.pass_seconds(20)
    for index in (1, 2, 3):
        world.side_of_slice[index] = 1
    world.coordinators[1] = world.make_coordinator(
        MemoryJournal(world.coordinators[0]._journal.entries)
    )
    world.pass_seconds(60)
    assert len(merged(world, 1)) > len(merged(world))
    world.side_of_slice = [0] * 4
    world.pass_seconds(10)
    assert [s.refused for s in world.slices] == [False, True, True, True]


def test_a_round_that_lost_too_many_opens_again_with_those_who_came_back():
    world = World(3, rounds=30)
    world.pass_seconds(20)
    world.slices[0].alive = False
    world.pass_seconds(20)
    world.slices[1].alive = False
    world.pass_seconds(20)
    stood = len(merged(world))
    world.slices[0].restart()
    world.pass_seconds(60)
    assert len(merged(world)) > stood
    world.slices[1].restart()
    world.pass_seconds(150)
    assert_each_sample_once(world)


def test_where_the_newest_state_is_lost_the_run_goes_back_and_merges_every_sample_once():
    world = World(3, rounds=20)
    world.pass_seconds(30)
    while len(merged(world)) <= max(s.saved[1] for s in world.slices):
        world.pass_seconds(1)
    for s in world.slices:
        s.restart()
    world.pass_seconds(200)
    assert any(e["kind"] == "rollback" for e in world.coordinators[0]._journal.entries)
    assert_each_sample_once(world)


def test_a_slice_whose_parameters_differ_takes_those_of_the_majority():
    world = World(3, rounds=20)
    world.pass_seconds(20)
    world.slices[1].counts[5] += 1
    world.pass_seconds(100)
    assert any(1 not in m for m in merged(world))
    assert_each_sample_once(world)


def test_where_no_majority_shows_whose_parameters_are_wrong_the_run_stops():
    world = World(2, rounds=20)
    world.pass_seconds(20)
    world.slices[1].counts[5] += 1
    with pytest.raises(AssertionError, match="no majority shows"):
        world.pass_seconds(40)


def test_a_slice_is_late_by_the_times_of_the_others():
    steady, spread = [10.0] * 20, [5.0, 10.0, 15.0, 20.0] * 5
    rules = GrpcConfig(deadline_floor_seconds=0)
    assert 10 < limit_seconds(steady, rules) < 25
    assert limit_seconds(spread, rules) > 40
    assert limit_seconds(steady, GrpcConfig(deadline_floor_seconds=60)) == 70
    assert limit_seconds([], rules) == float("inf")
    assert limit_seconds([t / 100 for t in spread], RULES) < 5


def slow_link(seconds=8, rounds=1000):
    """Of the last of four slices: longer than any deadline for inner steps."""
    world = World(4, rounds=rounds)
    world.transfer_seconds[3] = seconds
    world.pass_seconds(60)
    return world


def test_a_slice_whose_messages_take_long_is_not_late_by_that():
    world = slow_link()
    assert len(merged(world)) > 3
    assert merged(world) == [[0, 1, 2, 3]] * len(merged(world))


def test_a_message_that_never_comes_is_awaited_no_longer_than_slow_ones_take():
    world = slow_link()
    world.transfer_seconds[3] = 10**9
    went_on = len(merged(world))
    world.pass_seconds(30)
    assert [0, 1, 2] in merged(world)[went_on:]
    world.pass_seconds(200)
    assert len(merged(world)) - went_on > 8  # slice 3 is awaited again in every second round


@pytest.mark.parametrize("slow", [(3,), (0, 1, 2, 3)])
def test_links_that_become_slower_leave_nobody_out_for_ever(slow):
    """Those of one slice, or all: then a round ends as soon as a quorum holds enough."""
    world = slow_link()
    for index in slow:
        world.transfer_seconds[index] = 24.0 + index
    world.pass_seconds(300)
    assert merged(world)[-5:] == [[0, 1, 2, 3]] * 5


def test_of_two_messages_of_one_slice_one_is_merged_by_all():
    """Others hold that of the process before, and the new one's does not reach most of them."""
    world = World(4, rounds=12)
    world.work_seconds[:3] = [8] * 3
    world.pass_seconds(30)
    for phase in ("working", "waiting"):
        while world.slices[3].phase != phase:
            world.pass_seconds(1)
    number = len(merged(world))
    world.slices[3].restart()
    world.stalled = {(3, 1), (3, 2)}
    while world.slices[3].phase != "waiting":
        world.pass_seconds(1)
    assert len(merged(world)) == number
    world.pass_seconds(50)
    assert merged(world)[number] == [0, 1, 2]
    assert len({s.merged for s in world.slices}) == 1
    world.stalled = set()
    world.pass_seconds(150)
    assert_each_sample_once(world)


def test_a_slice_that_is_started_twice_is_refused_and_one_that_is_started_again_is_not():
    now, said = [0.0], []
    run = Run(names(2), FINGERPRINT)
    coordinator = Coordinator(run, RULES, MemoryJournal(), say=said.append, clock=lambda: now[0])

    def tell(incarnation, phase="working"):
        now[0] += 0.5
        return coordinator.tell(
            {
                "name": "s0",
                "fingerprint": FINGERPRINT,
                "incarnation": incarnation,
                "address": f"host-{incarnation}:1",
                "phase": phase,
            }
        )

    def is_slice(incarnation):
        return "waits" not in tell(incarnation)

    for _ in range(3):
        assert is_slice("a")
        assert not is_slice("b")
    assert is_slice("a")
    with pytest.raises(ValueError, match=r"host-a:1 already.* at host-b:1, is a second"):
        tell("b")
    assert is_slice("a")
    killed = now[0]
    while not is_slice("c"):
        pass
    assert now[0] - killed <= RULES.lease_seconds + 1
    with pytest.raises(ValueError, match=r"taken the place .* host-c:1"):
        tell("a")
    tell("c", "stopping")
    assert is_slice("d")


def test_a_slice_that_dies_with_the_coordinator_is_not_awaited_for_long():
    world = World(4, rounds=1000)
    world.pass_seconds(20)
    went_on = len(merged(world))
    world.slices[0].alive = False
    world.restart_coordinator()
    world.pass_seconds(18)
    assert merged(world)[went_on:][:1] == [[1, 2, 3]]


def test_what_passes_while_the_coordinator_is_stopped_is_held_against_nobody():
    world = World(4, rounds=1000)
    for _ in range(4):
        world.pass_seconds(7)
        world.stop_coordinator(30)
    world.pass_seconds(10)
    assert merged(world) == [[0, 1, 2, 3]] * len(merged(world))


def test_a_slice_that_is_stuck_where_others_evaluate_is_not_awaited_for_long():
    world = World(4, rounds=1000)
    world.busy_seconds = [1, 1, 2, 4]
    world.pass_seconds(100)
    assert merged(world) == [[0, 1, 2, 3]] * len(merged(world))
    world.busy_seconds[1] = 10**9
    while world.slices[1].busy_until < 10**9:
        world.pass_seconds(1)
    went_on = len(merged(world))
    world.pass_seconds(14)
    assert merged(world)[went_on:][:1] == [[0, 2, 3]]


def test_where_all_are_stuck_nothing_is_written():
    world = World(3, rounds=1000)
    world.pass_seconds(20)
    for s in world.slices:
        s.stuck = True
    before = len(world.coordinators[0]._journal.entries)
    world.pass_seconds(60)
    assert len(world.coordinators[0]._journal.entries) <= before + 1
    for s in world.slices:
        s.stuck = False
    world.pass_seconds(20)
    assert len(world.coordinators[0]._journal.entries) > before + 3


def test_the_newest_state_is_awaited_from_when_a_quorum_looks_for_it():
    world = World(4, rounds=1000)
    world.pass_seconds(60)
    for s in world.slices:
        s.alive = False
    newest = world.slices[3]
    newest.saved = newest.epoch, newest.border, newest.counts.copy(), newest.merged
    assert newest.border == len(merged(world))
    world.pass_seconds(10)
    for s in world.slices[:3]:
        s.restart()
    world.pass_seconds(15)
    newest.restart()
    world.pass_seconds(20)
    kinds = {e["kind"] for e in world.coordinators[0]._journal.entries}
    assert kinds == {"start", "round"}
    assert merged(world)[-1] == [0, 1, 2, 3]


def test_a_slice_that_sends_garbage_is_left_out_and_not_awaited():
    world = World(4, rounds=1000)
    world.garbled = {3}
    world.pass_seconds(40)
    assert len(merged(world)) > 6
    assert all(m == [0, 1, 2] for m in merged(world))
    assert not any(e["late"] for e in world.coordinators[0].history.rounds)


def test_a_slow_first_exchange_is_awaited_and_so_is_one_of_a_coordinator_that_began_in_it():
    world = World(4, rounds=1000)
    world.transfer_seconds = [15.0] * 4
    world.pass_seconds(10)
    world.restart_coordinator()
    world.pass_seconds(60)
    assert merged(world) == [[0, 1, 2, 3]] * len(merged(world))
    assert len(merged(world)) >= 3


@pytest.mark.parametrize("state_seconds", [4, 6, 8, 12])
def test_a_slice_whose_state_takes_rounds_to_come_is_back(state_seconds):
    """In time, however long a round is: by the messages of the rounds in which it came."""
    world = World(4, rounds=1000)
    world.state_seconds = state_seconds
    world.pass_seconds(20)
    world.slices[3].alive = False
    world.pass_seconds(100)
    world.slices[3].saved = 0, 0, world.slices[3].saved[2] * 0, ""
    world.slices[3].restart()
    world.pass_seconds(40)
    assert merged(world)[-1] == [0, 1, 2, 3]


@pytest.mark.parametrize("index", range(4))
def test_who_comes_back_into_a_long_round_undoes_nobodys_work(index):
    world = World(4, rounds=1000)
    world.work_seconds, world.facts = [60] * 4, {"expected_seconds": 60}
    world.pass_seconds(200)
    world.slices[index].alive = False
    world.pass_seconds(140)  # a round is over without it, and another one is open
    before = len(merged(world))
    world.slices[index].restart()
    world.pass_seconds(200)
    assert not any(e["kind"] == "rollback" for e in world.coordinators[0]._journal.entries)
    assert len(merged(world)) >= before + 2
    assert merged(world)[-1] == [0, 1, 2, 3]


def test_a_slice_that_lives_and_never_ends_is_not_waited_for_for_ever():
    world = World(4, rounds=6)
    world.pass_seconds(5)
    world.slices[2].stuck = True
    for _ in range(20):
        world.pass_seconds(10)
        if world.coordinators[0].ended:
            break
    assert world.coordinators[0].ended
    assert [s.phase for s in world.slices if s.index != 2] == ["done"] * 3


def test_who_was_done_and_vanished_ends_no_run_that_went_back():
    """The others lost the last round before they applied it, and train it again."""
    world = World(4, rounds=8)
    while not all(s.border == 7 and s.phase == "waiting" and s.began for s in world.slices):
        world.pass_seconds(1)
    for s in world.slices[1:]:
        s.stuck = True
    while world.slices[0].phase != "done":
        world.pass_seconds(1)
    for s in world.slices:
        s.alive = False
    for s in world.slices[1:]:
        s.restart()
    world.pass_seconds(100)
    kinds = [e["kind"] for e in world.coordinators[0]._journal.entries]
    assert "rollback" in kinds
    assert kinds[-1] == "end"
    assert world.coordinators[0].history.round == 8
    assert [s.phase for s in world.slices[1:]] == ["done"] * 3


def test_a_run_that_has_ended_is_over_for_a_coordinator_that_is_started_again():
    world = World(4, rounds=6)
    world.pass_seconds(60)
    assert world.coordinators[0].ended
    for s in world.slices:
        s.alive = False
    world.restart_coordinator()
    assert world.coordinators[0].ended
    world.pass_seconds(1)
    entries = world.coordinators[0]._journal.entries
    assert [e["kind"] for e in entries if e["kind"] != "round"] == ["start", "end"]


def test_an_old_copy_of_the_journal_is_refused_by_slices_that_start_again():
    world = World(4, rounds=1000)
    world.pass_seconds(60)
    entries = world.coordinators[0]._journal.entries
    world.coordinators[0] = world.make_coordinator(MemoryJournal(entries[:4]))
    for s in world.slices:
        s.restart()
    assert min(s.border for s in world.slices) > 3
    world.pass_seconds(5)
    assert all(s.refused for s in world.slices)


def test_a_slice_that_reaches_no_peer_holds_up_the_others_no_longer_than_a_slow_one():
    world = World(4, rounds=1000)
    world.pass_seconds(30)
    world.stalled, world.deaf = {(i, 3) for i in range(3)}, {3}  # what it sends goes out
    before = len(merged(world))
    world.pass_seconds(int(RULES.join_seconds))
    assert len(merged(world)) > before + 1


def test_a_round_that_was_open_when_the_coordinator_began_is_not_open_for_ever():
    world = World(4, rounds=1000)
    world.pass_seconds(2)
    world.slices[2].stuck = True
    world.restart_coordinator()
    world.pass_seconds(100)
    assert len(merged(world)) > 5


def test_who_was_dead_before_the_coordinator_slept_is_dead_after():
    world = World(4, rounds=1000)
    world.pass_seconds(30)
    world.slices[3].alive = False
    world.pass_seconds(20)
    world.stop_coordinator(30)
    world.pass_seconds(1)
    assert not is_alive(world.coordinators[0]._statuses[3], world.coordinators[0]._now(), RULES)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_samples_are_merged_held_or_returned(data):
    samples, done = Samples(), set()
    for _ in range(data.draw(st.integers(1, 12))):
        wanted = data.draw(st.dictionaries(st.integers(0, 4), st.integers(1, 9), min_size=1))
        shares, after = samples.allot(wanted)
        ids = {i: [n for part in share for n in part] for i, share in shares.items()}
        assert {i: len(n) for i, n in ids.items()} == wanted
        out = data.draw(st.sets(st.sampled_from(sorted(wanted))))
        samples = after.put_back(shares[i] for i in out)
        new = [n for i in wanted if i not in out for n in ids[i]]
        assert not done & set(new)
        done |= set(new)
        returned = {n for part in samples.returned for n in part}
        assert done | returned == set(range(samples.cursor))
        assert not done & returned
        assert samples.given == len(done)


def test_returned_samples_go_out_first():
    shares, after = Samples().allot({0: 3, 1: 5})
    back = after.put_back([shares[1]])
    assert back == Samples(8, (range(3, 8),))
    assert back.allot({0: 4, 2: 3}) == (
        {0: (range(3, 7),), 2: (range(7, 10),)},
        Samples(10),
    )


def test_a_journal_survives_a_torn_line_and_tells_a_damaged_one(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for number in range(3):
        journal.append({"kind": "x", "number": number})
    with pytest.raises(RunError, match="another coordinator holds"):
        Journal(path)
    chains = list(journal.chains)
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "x", "num')
    again = Journal(path)
    assert (again.chains, len(again.entries)) == (chains, 3)
    again.append({"kind": "x", "number": 3})
    again.close()
    lines = path.read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {"number": 7})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match="jsonl:2 is damaged"):
        Journal(path)


def test_a_journal_is_as_it_was_where_the_disk_is_full_for_a_moment(tmp_path):
    path = tmp_path / "journal.jsonl"
    program = f"""
import resource, signal
from pathlib import Path
from geojax.geomesh.wan.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path({str(path)!r})
journal = Journal(path)
journal.append({{"number": 0}})
full, most = path.stat().st_size + 40, resource.RLIM_INFINITY
for limit, number in ((full, 1), (full, 2), (most, 3)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    try:
        journal.append({{"number": number, "pad": 100 * "x"}})
    except OSError:
        assert number < 3
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    journal = Journal(path)
    assert [entry["number"] for entry in journal.entries] == [0, 3]
    journal.close()


def closed(number, slices):
    versions = {str(i): "v" for i in slices}
    entry = {"kind": "round", "round": number, "merged": slices, "members": slices}
    return entry | {"versions": versions}


def test_a_journal_of_an_older_version_is_named():
    history = History()
    history.add({"kind": "start", "members": [0, 1], "facts": {}})
    older = {"kind": "round", "round": 1, "merged": [0, 1], "members": [0, 1]}
    with pytest.raises(ConfigError, match="round 1 of the journal names no versions"):
        history.add(older)


def test_states_of_undone_rounds_are_of_no_history():
    history = History()
    history.add({"kind": "start", "members": [0, 1, 2], "facts": {}})
    for number in range(1, 6):
        history.add(closed(number, [0, 1]))
    history.add({"kind": "rollback", "round": 3, "members": [0, 1, 2]})
    assert [history.holds(0, b) for b in (3, 4)] == [True, False]
    history.add(closed(4, [0, 2]))
    assert [history.holds(e, 4) for e in (0, 1)] == [False, True]
    assert (history.last_merged(2), history.last_merged(1)) == (4, 3)
    assert [history.members_of(n) for n in (1, 2, 4)] == [(0, 1, 2), (0, 1), (0, 1, 2)]


def test_two_majorities_always_meet():
    rules = GrpcConfig()
    for slices in range(1, 8):
        least = next(n for n in range(1, slices + 1) if n > rules.quorum * slices)
        sets = list(combinations(range(slices), least))
        assert all(set(a) & set(b) for a in sets for b in sets)
