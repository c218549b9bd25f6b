# SPDX-License-Identifier: Apache-2.0
"""Moments of benchmarks/wan: when a signal comes, what a disturbed run must show, going on."""

import io
import json
import math
import signal
import subprocess
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from made_run import write_run
from rich.console import Console

from benchmarks.wan import failures, moments, session
from benchmarks.wan.__main__ import main
from benchmarks.wan.moments import PHASES, VICTIMS, Disturber, Moment, Sight, draw_moments, is_due
from benchmarks.wan.outcomes import Outcome, noise, problems, read_outcome, row, rows, table
from benchmarks.wan.preset import method
from benchmarks.wan.throttle import slower
from benchmarks.wan.verdict import (
    Final,
    hash_problem,
    merged_shares,
    read_finals,
    sample_problem,
    time_lost,
)
from geojax.config import CheckpointConfig, ConfigError, RunError
from geojax.geomesh.wan.history import History
from geojax.train.checkpoint import Checkpoints

NAMES = ["a", "b", "c", "d"]
QUIET = Console(quiet=True)
MOMENT = Moment(0, "KILL", "first slice", "a", "exchange", 3, 0.5, True, 0)


def test_moments_follow_from_a_seed_and_hit_everything_in_every_phase():
    found = draw_moments(NAMES, "KILL", 18, 30, 3, seed=3)
    assert found == draw_moments(NAMES, "KILL", 20, 30, 3, seed=3)[:18]
    assert found != draw_moments(NAMES, "KILL", 18, 30, 3, seed=4)
    for turn in (found[:9], found[9:]):
        assert {(m.victim, m.phase) for m in turn} == {(v, p) for v in VICTIMS for p in PHASES}
    slices = [m for m in found if m.victim != "coordinator"]
    cells = Counter((m.victim, m.phase, m.returns) for m in slices)
    assert set(cells.values()) == {1}
    assert len(cells) == 12  # each comes back once, and stays away once
    assert all(m.returns and m.name == "coordinator" for m in found if m not in slices)
    assert all((m.name == "a") == (m.victim == "first slice") for m in slices)
    assert all(3 <= m.round <= 10 for m in found)
    assert Counter(m.seed for m in found) == {0: 6, 1: 6, 2: 6}


@pytest.mark.parametrize(
    ("phase", "sight", "due"),
    [
        ("inner steps", Sight(3, 1.0, 0.0, False), True),
        ("inner steps", Sight(3, 0.9, 0.0, False), False),
        ("inner steps", Sight(2, 1.0, 0.0, False), False),
        ("inner steps", Sight(3, 1.0, 0.1, False), False),
        ("inner steps", Sight(3, 1.0, 0.0, True), False),
        ("exchange", Sight(3, 2.0, 0.25, False), True),
        ("exchange", Sight(3, 2.0, 0.2, False), False),
        ("exchange", Sight(3, 2.0, 0.4, True), False),
        ("checkpoint", Sight(4, 0.0, 0.0, True), True),
        ("checkpoint", Sight(4, 0.0, 0.0, False), False),
    ],
)
def test_a_moment_comes_in_its_phase_alone(phase, sight, due):
    assert is_due(replace(MOMENT, phase=phase), sight, usual_seconds=2.0) == due


class Stage:
    """A process that sleeps, in a run whose rounds and bytes a test says."""

    def __init__(self, tmp_path, monkeypatch):
        self.process = subprocess.Popen(["sleep", "60"])
        self.sent = 0
        monkeypatch.setattr(moments.network, "sent_bytes", lambda pid, nodes: self.sent)
        nodes = {name: SimpleNamespace(index=i) for i, name in enumerate(["coordinator", *NAMES])}
        self.children = {n: session.Child(node, [], self.process) for n, node in nodes.items()}
        self.saving = tmp_path / "slices" / "a" / "checkpoints" / "7.orbax-checkpoint-tmp"
        self.lab = SimpleNamespace(folder=tmp_path / "lab")

    def at(self, disturber, seconds, number, sent=0):
        self.sent = sent
        disturber.trouble(session.Situation(self.lab, self.children, [], number, seconds))

    def state(self):
        return Path(f"/proc/{self.process.pid}/stat").read_text().split()[2]

    def until(self, stopped):
        """Signals take a while."""
        deadline = time.monotonic() + 10
        while (self.state() == "T") != stopped:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    found = Stage(tmp_path, monkeypatch)
    yield found
    found.process.kill()
    found.process.wait()


def test_a_signal_comes_while_a_message_is_under_way(stage):
    disturber = Disturber(replace(MOMENT, returns=False), NAMES, 1000, 40.0, QUIET)
    stage.at(disturber, 10.0, 1, sent=5000)
    stage.at(disturber, 11.0, 1, sent=5500)  # round 2, and the moment is not before round 3
    stage.at(disturber, 12.0, 2, sent=6000)
    stage.at(disturber, 13.0, 2, sent=6019)  # pings
    assert disturber.sent is None
    stage.at(disturber, 14.0, 2, sent=6400)
    assert stage.process.wait(5) == -signal.SIGKILL
    assert (disturber.sent.round, disturber.sent.at_seconds) == (3, 14.0)
    assert stage.children["a"].away
    stage.at(disturber, 14.1, 2)
    assert disturber.confirmed


def test_what_was_stopped_goes_on_after_a_while_and_a_phase_that_was_missed_is_not_confirmed(stage):
    moment = replace(MOMENT, signal="STOP", phase="checkpoint")
    disturber = Disturber(moment, NAMES, 1000, 40.0, QUIET)
    stage.at(disturber, 10.0, 3)
    stage.saving.mkdir(parents=True)
    stage.at(disturber, 10.1, 3)
    stage.until(stopped=True)
    stage.saving.rmdir()
    stage.at(disturber, 10.2, 3)
    assert not disturber.confirmed
    stage.at(disturber, 49.0, 4)
    assert stage.state() == "T"
    stage.at(disturber, 50.2, 4)
    stage.until(stopped=False)
    assert not stage.children["a"].away


def test_a_run_in_which_no_round_ends_is_given_up(stage):
    disturber = Disturber(MOMENT, NAMES, 1000, 40.0, QUIET)
    stage.at(disturber, 500.0, 1)
    stage.at(disturber, 1099.0, 1)
    with pytest.raises(RunError, match="no round has ended for 600 s"):
        stage.at(disturber, 1101.0, 1)


def test_a_process_that_stays_away_is_not_started_again(stage):
    child = session.Child(None, [], stage.process, away=True)
    stage.process.kill()
    stage.process.wait()
    session._look_after(stage.lab, child, QUIET, 0.0)
    assert child.process is stage.process


def test_a_throttled_slice_keeps_its_factor_when_it_is_started_again(stage):
    limits = []
    stage.lab.limit = lambda node, factor: limits.append(factor)
    slow = slower("a", 8, 0.5, QUIET)
    for number in (7, 8, 9):
        slow(session.Situation(stage.lab, stage.children, [], number, 0.0))
    assert limits == [0.5]
    assert stage.children["a"].factor == 0.5


def test_final_parameters_must_be_equal_and_there():
    right = {n: Final(9, "x") for n in NAMES}
    assert hash_problem(right, 9, NAMES) == ""
    assert hash_problem(right | {"d": Final(4, "y")}, 9, NAMES[:3]) == ""  # it stayed away
    assert "c differ" in hash_problem(right | {"c": Final(9, "y")}, 9, NAMES)
    assert "d differ" in hash_problem(right | {"d": Final(9, "y")}, 9, NAMES[:3])
    assert "b was in round 9 and has saved round 8" in hash_problem(
        right | {"b": Final(8, "x")}, 9, NAMES
    )
    del right["d"]
    assert "d was in round 9 and has saved nothing" in hash_problem(right, 9, NAMES)


CONFIG = method("geomesh", 12 * 80 * 96, (0, 3))
FIRST, LAST = (s.name for s in CONFIG.slices)


def history(*merged):
    """Rounds of two slices that merged these; each one is in every round."""
    facts = {str(i): {"profile": {}, "exchange_seconds": 0.0} for i in range(2)}
    found = History()
    found.add({"kind": "start", "members": [0, 1], "facts": facts})
    for number, row_ in enumerate(merged, 1):
        facts = {str(i): {"steps": 10, "noise": {}} for i in row_}
        found.add(
            {"kind": "round", "round": number, "merged": row_, "members": [0, 1], "facts": facts}
            | {"versions": {}}
        )
    return found


class Planned:
    """A plan of 80 and 40 samples a round, in place of one by measured speeds."""

    def __init__(self, *_):
        work = [SimpleNamespace(sequences=n) for n in (80, 40)]
        self.plan = SimpleNamespace(work=work)

    def observe(self, *_):
        pass


@pytest.fixture
def rounds(monkeypatch):
    for name in ("read_profiles", "first_plan", "Speeds"):
        monkeypatch.setattr(f"geojax.geomesh.agreed.{name}", lambda *_: None)
    monkeypatch.setattr("geojax.geomesh.agreed.Planner", Planned)
    return lambda *merged: merged_shares(CONFIG, history(*merged))


def taken(shares):
    """What slices say that took what they were given."""
    return [
        {
            "kind": "slice",
            "round": number,
            "slice": name,
            "merged": True,
            "took": [[p.start, p.stop] for p in share],
        }
        for number, row_ in enumerate(shares, 1)
        for name, share in row_.items()
    ]


def test_every_sample_must_be_merged_once(rounds):
    shares = rounds([0, 1], [0], [0, 1], [0, 1])
    assert shares[1] == {FIRST: (range(120, 200),)}
    assert shares[2][FIRST] == (range(200, 280),)  # what the other one had is handed out first
    assert sample_problem(shares, taken(shares)) == ""
    lost = rounds([0, 1], [0])
    assert sample_problem([lost[0], {LAST: (range(200, 240),)}], taken(lost)) == (
        "no round merged samples 120 to 199"
    )
    again = [*lost, {LAST: (range(190, 230),)}]
    assert sample_problem(again, taken(lost)) == "round 3 merged samples again, from 190 on"


def test_slices_must_have_taken_what_the_journal_gave_them(rounds):
    shares = rounds([0, 1], [0, 1])
    told = taken(shares)
    told[2]["took"] = [[0, 80]]
    assert f"round 2: slice {FIRST} took (range(0, 80),)" in sample_problem(shares, told)
    told[2]["merged"] = False
    assert sample_problem(shares, told) == ""
    assert sample_problem(shares, []) == "no slice says which samples it took"


def test_time_lost_is_over_the_rounds_that_nothing_disturbed():
    lengths = [30, 2, 2, 2, 7, 3, 2, 2, 2, 12, 2, 2]  # the first holds the start
    closed = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    assert time_lost(closed, 5) == pytest.approx(5 + 1)
    assert time_lost(closed, 12) == pytest.approx(0)


def outcome(moment=MOMENT, **changes):
    right = Outcome(moment, 4, True, "", "", "", True, 3.0, 5.0)
    return replace(right, **changes)


def test_a_table_compares_with_what_a_run_ended_with():
    losses = {
        ("", 0): 2.9,
        ("", 1): 3.1,
        ("a", 0): 3.5,
        ("a", 1): 3.5,
        ("b", 1): 4.0,
        ("b", 0): 4.2,
    }
    away = replace(MOMENT, returns=False)
    stop = replace(MOMENT, signal="STOP", phase="checkpoint")
    outcomes = [
        outcome(lost_seconds=1.0),
        outcome(replace(MOMENT, seed=1), final_loss=3.3, lost_seconds=9.0),
        outcome(away, returned=False, final_loss=3.4),
        outcome(returned=False, final_loss=9.9),  # was to come back: no comparison
        outcome(away, problem="it hangs", final_loss=None, lost_seconds=None, in_phase=False),
        outcome(stop, hash_problem="b differ", sample_problem="lost"),
    ]
    found = rows(outcomes, losses)
    kill = found["KILL, first slice, exchange"]
    assert kill == found["KILL, all"] == row(outcomes[:5], losses)
    counts = ("moments", "in_phase", "completed", "hashes_equal", "samples_right", "returned")
    assert [kill[c] for c in counts] == [5, 4, 4, 4, 4, 2]
    assert kill["loss_over_all"]["mean"] == pytest.approx((0.1 + 0.2) / 2)
    assert kill["loss_over_fewer"] == {
        "mean": pytest.approx(-0.1),
        "deviation": pytest.approx(float("nan"), nan_ok=True),
        "runs": 1,
    }
    assert (kill["lost_seconds_median"], kill["lost_seconds_worst"]) == (5.0, 9.0)
    assert [found["STOP, all"][c] for c in counts] == [1, 1, 1, 0, 0, 1]
    assert noise(losses) == {"all": pytest.approx(0.02**0.5), "fewer": pytest.approx(0.1)}
    assert noise({("", 0): 3.0}) == {"all": None, "fewer": None}
    shown = Console(width=140, file=io.StringIO())
    shown.print(table(found))
    text = shown.file.getvalue()
    assert "+0.150±0.071" in text
    assert "STOP, first slice, checkpoint" in text
    said = problems(outcomes)
    assert [line.rpartition(": ")[2] for line in said] == [
        "a was not back in the last round",
        "it hangs",
        "the signal came in round 4, but not seen to be in its phase",
        "b differ",
        "lost",
    ]


def pretend(monkeypatch, ended_by=()):
    """No namespaces: runs that are over at once; those in folders of these names are cut short."""
    told = []

    def run(config, place, setting, console, trouble=None):
        told.append((place.name, len(config.slices), config.seed))
        place.mkdir(parents=True)
        if place.name in ended_by:
            raise KeyboardInterrupt
        if place.name == "kill-01":
            raise RunError("it hangs")

    monkeypatch.setattr(failures, "require_tools", lambda: None)
    monkeypatch.setattr(failures, "run", run)
    monkeypatch.setattr(failures, "finished", lambda config, place: place.exists())
    monkeypatch.setattr(failures, "load_run", lambda place: SimpleNamespace(evals=[{"loss": 3.0}]))
    monkeypatch.setattr(
        failures,
        "judge",
        lambda config, moment, place, disturber, problem: outcome(moment, problem=problem),
    )
    return told


def test_the_command_goes_on_where_it_was_ended(tmp_path, monkeypatch, capsys):
    command = ["failures", "--moments", "3", "--seeds", "2", "--out", str(tmp_path / "out")]
    told = pretend(monkeypatch, ended_by=["stop-01"])
    assert main(command) == 130
    done = [name for name, _, _ in told]
    assert done[-5:] == ["kill-00", "kill-01", "kill-02", "stop-00", "stop-01"]
    undisturbed = [(name, slices) for name, slices, _ in told if name.startswith("undisturbed")]
    assert {slices for name, slices in undisturbed if "without" in name} <= {3}
    assert {slices for name, slices in undisturbed if "all" in name} == {4}
    told = pretend(monkeypatch)
    assert main(command) == 0
    assert [name for name, _, _ in told] == ["stop-01", "stop-02"]
    said = capsys.readouterr().out
    assert "kill-01" in said
    assert "it hangs" in said
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["summary"]["KILL, all"]["completed"] == 2
    assert len(report["results"]) == 6
    told = pretend(monkeypatch)
    assert main([*command[:2], "4", *command[3:]]) == 0  # more of them
    assert [name for name, _, _ in told if "undisturbed" not in name] == ["kill-03", "stop-03"]
    assert main([*command, "--rounds", "12"]) == 2
    assert "plan.json is of other settings" in capsys.readouterr().out


def test_a_result_of_another_moment_is_refused(tmp_path):
    assert read_outcome(tmp_path, MOMENT) is None
    path = tmp_path / "kill-00" / "result.json"
    path.parent.mkdir()
    path.write_text(json.dumps(asdict(outcome())))
    assert read_outcome(tmp_path, MOMENT) == outcome()
    with pytest.raises(ConfigError, match="of another moment"):
        read_outcome(tmp_path, replace(MOMENT, round=4))
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no result"):
        read_outcome(tmp_path, MOMENT)


def test_final_hashes_are_of_what_slices_share_in_their_last_checkpoint(tmp_path):
    for name, value, own in (("a", 1.0, 5.0), ("b", 1.0, 6.0), ("c", 2.0, 5.0)):
        shared = {"params": {"w": np.full(3, value)}, "outer_opt_state": [np.zeros(3)]}
        with Checkpoints(tmp_path / "slices" / name / "checkpoints", CheckpointConfig()) as to:
            for border in (3, 4):
                to.save(shared | {"slices": {name: np.full(2, own)}}, {"border": border})
    found = read_finals(tmp_path, NAMES)
    assert {name: final.round for name, final in found.items()} == {"a": 4, "b": 4, "c": 4}
    assert found["a"] == found["b"] != found["c"]


def test_a_run_is_judged_by_its_files(tmp_path, monkeypatch):
    place = write_run(tmp_path / "run", clock="measured")
    (place / "lab.json").write_text('{"closed_seconds": [9, 10, 11, 15, 17, 18]}')
    ended = {"kind": "round", "round": 1, "merged": [0, 1], "members": [0, 1], "facts": {}}
    ended |= {"versions": {}}
    entries = [{"kind": "start", "members": [0, 1], "facts": {}}, ended]
    (place / "journal.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries) + "{torn")
    moment = replace(MOMENT, name=FIRST)
    sight = Sight(4, 1.0, 0.5, False)
    disturber = SimpleNamespace(sent=moments.Sent(4, 12.0, sight), confirmed=True)
    finals = {FIRST: Final(1, "x"), LAST: Final(1, "x")}
    monkeypatch.setattr(failures, "read_finals", lambda place, names: finals)
    monkeypatch.setattr(failures, "merged_shares", lambda *_: [])
    monkeypatch.setattr(failures, "sample_problem", lambda shares, records: "lost")
    assert failures.judge(CONFIG, moment, place, disturber, "") == Outcome(
        moment, 4, True, "", "", "lost", True, pytest.approx(math.log(23.0)), 3.0 + 1.0
    )
    finals[LAST] = Final(1, "y")
    assert "differ" in failures.judge(CONFIG, moment, place, disturber, "").hash_problem
    hung = failures.judge(CONFIG, moment, place, disturber, "it hangs")
    assert (hung.problem, hung.final_loss, hung.lost_seconds) == ("it hangs", None, None)
    lines = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
    (place / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert failures.judge(CONFIG, moment, place, disturber, "").problem == (
        "the run's records have no end"
    )
    (place / "metrics.jsonl").write_text("".join(lines[:3]))
    assert "records are wrong" in failures.judge(CONFIG, moment, place, disturber, "").problem
