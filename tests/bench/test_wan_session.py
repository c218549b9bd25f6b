# SPDX-License-Identifier: Apache-2.0
"""Sessions of benchmarks/wan without namespaces: processes that end are looked after, the same
command goes on, and reports are of what is in run folders. Some with them."""

import io
import json
import os
import shutil
import signal
import subprocess
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from made_run import write_run
from rich.console import Console

from benchmarks.wan import session
from benchmarks.wan.__main__ import main
from benchmarks.wan.calibrate import Calibration
from benchmarks.wan.network import Counters
from benchmarks.wan.preset import LAB_WAN, method
from benchmarks.wan.session import Setting, finished, run
from geojax.config import ConfigError, RunError
from geojax.config.files import read_config

ROOT = os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "sysctl")))


def needs_root(test):
    """And one after another: each cleans up after all that have died."""
    skip = pytest.mark.skipif(not ROOT, reason="namespaces need root, ip and tc")
    return pytest.mark.xdist_group("namespaces")(skip(test))


CONFIG = method("geomesh", 100_000, (0, 3))
FIRST, LAST = (s.name for s in CONFIG.slices)
QUIET = Console(file=io.StringIO())

COORDINATOR = """
sleep 0.3
for n in 1 2 3; do
  echo '{"kind": "round", "round": '$n'}' >> journal.jsonl
  sleep 0.2
done
echo '{"kind": "slice", "round": 3, "peer_bytes": 9}' >> metrics.jsonl
echo '{"kind": "end", "round": 3}' >> metrics.jsonl
"""
DIES_ONCE = "[ -e died ] || { touch died; exit 3; }; exec sleep 0.3"


class Lab:
    """Processes without namespaces."""

    def __init__(self, world, folder, scripts):
        self.world, self.folder, self.scripts = world, folder, scripts
        self.limits, self.started, self.processes = [], [], []

    def start(self, node, command, log, environment):
        self.started.append(node.name)
        command = ["sh", "-c", self.scripts[node.name]]
        self.processes.append(subprocess.Popen(command, cwd=self.folder.parent))
        return self.processes[-1]

    def listens(self, node):
        return True

    def limit(self, node, factor=1.0):
        self.limits.append((node.name, factor))

    def unlimit(self, node):
        pass

    def counters(self):
        nodes = range(len(self.world.nodes))
        return {i: Counters(dict.fromkeys(nodes, 0), 0, 0, 0, 0) for i in nodes}

    def proxy_counts(self):
        return {}


@pytest.fixture
def lab(monkeypatch):
    """What scripts a lab's processes run, by name; the labs that were opened."""
    scripts, opened = {"coordinator": COORDINATOR, FIRST: "sleep 0.5", LAST: "sleep 0.5"}, []

    @contextmanager
    def open_lab(world, folder, seed, cores):
        folder.mkdir(exist_ok=True)
        opened.append(Lab(world, folder, scripts))
        try:
            yield opened[-1]
        finally:
            for process in opened[-1].processes:
                process.kill()
                process.wait()

    monkeypatch.setattr(session, "open_lab", open_lab)
    monkeypatch.setattr(session, "_prepare_text", lambda *_: None)
    monkeypatch.setattr(session, "_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(session, "_LISTEN_POLL_SECONDS", 0.02)
    return SimpleNamespace(scripts=scripts, opened=opened)


def test_a_run_that_is_over_is_known_and_another_one_is_refused(lab, tmp_path):
    folder = tmp_path / "run"
    assert not finished(CONFIG, folder)
    run(CONFIG, folder, Setting(LAB_WAN, cores={FIRST: 0.5}), QUIET)
    assert read_config(folder / "config.json") == CONFIG
    assert finished(CONFIG, folder)
    found = json.loads((folder / "lab.json").read_text())
    assert len(found["closed_seconds"]) == 3
    assert found["closed_seconds"] == sorted(found["closed_seconds"])
    assert found["traffic"]["reported_bytes"] == 9
    assert set(lab.opened[0].limits) == {(FIRST, 1.0), (LAST, 1.0)}  # once it listens
    other = method("diloco", 100_000, (0, 3))
    for act in (finished, lambda *args: run(*args, Setting(LAB_WAN), QUIET)):
        with pytest.raises(ConfigError, match="holds another run"):
            act(other, folder)


def test_a_process_that_dies_is_started_again_until_it_is_hopeless(lab, tmp_path):
    lab.scripts[LAST] = DIES_ONCE
    run(CONFIG, tmp_path / "one", Setting(LAB_WAN), QUIET)
    assert lab.opened[0].started == ["coordinator", FIRST, LAST, LAST]
    lab.scripts[LAST] = "exit 2"  # a mistake that it would make again
    with pytest.raises(RunError, match=f"{LAST} ended with code 2 after 0 new starts"):
        run(CONFIG, tmp_path / "two", Setting(LAB_WAN), QUIET)
    lab.scripts["coordinator"] = "exit 1"
    lab.opened.clear()
    Lab.listens = lambda self, node: False
    try:
        with pytest.raises(RunError, match="the coordinator does not listen"):
            run(CONFIG, tmp_path / "three", Setting(LAB_WAN), QUIET)
    finally:
        Lab.listens = lambda self, node: True


def test_what_was_stopped_for_good_is_ended_with_the_run(lab, tmp_path):
    lab.scripts[LAST] = "exec sleep 60"
    gone = []

    def trouble(situation):
        child = situation.children[LAST]
        if not gone and situation.round >= 1:
            child.away = True
            child.process.send_signal(signal.SIGSTOP)
            gone.append(child.process)

    run(CONFIG, tmp_path / "run", Setting(LAB_WAN), QUIET, trouble)
    assert gone[0].wait(5) == -signal.SIGKILL
    assert lab.opened[0].started.count(LAST) == 1


def pretend(monkeypatch, module):
    """Runs that are over at once, with the records of a made-up one; their folders' names."""
    told = []

    def pretended(config, place, setting, console, trouble=None):
        told.append(place.name)
        write_run(place, config.name, seed=config.seed, clock="measured")
        return SimpleNamespace(lines=list)

    monkeypatch.setattr(f"benchmarks.wan.{module}.require_tools", lambda: None)
    monkeypatch.setattr(f"benchmarks.wan.{module}.run", pretended)
    monkeypatch.setattr(f"benchmarks.wan.{module}.finished", lambda config, place: place.exists())
    return told


def test_a_comparison_goes_on_and_reports_every_method(tmp_path, monkeypatch, capsys):
    told, asked = pretend(monkeypatch, "compare"), []

    def calibrated(aim, folder, console):
        asked.append(aim)
        return Calibration(aim, {}, 1e-3, 2.0, 0.1, 0.0, 30.0)

    monkeypatch.setattr("benchmarks.wan.compare.calibrated", calibrated)
    command = ["compare", "--seeds", "2", "--each-step", "--out", str(tmp_path / "out")]
    assert main([*command, "--methods", "diloco", "sgd"]) == 2
    assert not asked  # methods are looked at first
    assert main(command) == 0
    assert len(told) == len(set(told)) == 2 * 6
    shutil.rmtree(tmp_path / "out" / "geomesh-overlap-seed1")
    told.clear()
    assert main(command) == 0
    assert told == ["geomesh-overlap-seed1"]
    text = capsys.readouterr().out
    assert "geomesh-overlap" in text
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(found["summary"]) == {
        "diloco",
        "balancing-only",
        "signs-only",
        "geomesh",
        "geomesh-overlap",
        "data-parallel",
    }
    assert found["summary"]["geomesh-overlap"]["time_saved"] == {"mean": 0.0, "deviation": 0.0}


def test_throttling_goes_on_and_reports_both_runs(tmp_path, monkeypatch, capsys):
    told = pretend(monkeypatch, "throttle")
    command = ["throttle", "--at-round", "3", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert told == ["replan", "no-replan"]
    shutil.rmtree(tmp_path / "out" / "replan")
    assert main(command) == 0
    assert told[2:] == ["replan"]
    assert "round   6: replan " in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [len(idle) for idle in found["straggler_idle"].values()] == [6, 6]


@needs_root
@pytest.mark.full
def test_kills_in_namespaces_leave_a_run_right(tmp_path):
    """The first slice is killed in a checkpoint, and the coordinator in inner steps."""
    for seed in ("5", "0"):
        options = ["--moments", "1", "--signals", "KILL", "--seeds", "1", "--seed", seed]
        options += ["--rounds", "12", "--slices", "3", "--out", str(tmp_path / seed)]
        assert main(["failures", *options]) == 0
        report = json.loads((tmp_path / seed / "report.json").read_text())
        found = report["summary"]["KILL, all"]
        for count in ("in_phase", "completed", "hashes_equal", "samples_right"):
            assert found[count] == 1, report["problems"]


@needs_root
@pytest.mark.full
def test_a_stopped_slice_that_stays_away_does_not_end_a_run(tmp_path):
    options = ["--moments", "1", "--signals", "STOP", "--seeds", "1", "--seed", "0"]
    options += ["--rounds", "12", "--slices", "3", "--out", str(tmp_path / "out")]
    assert main(["failures", *options]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (result,) = report["results"]
    assert not result["moment"]["returns"]
    found = report["summary"]["STOP, all"]
    for count in ("in_phase", "completed", "hashes_equal", "samples_right"):
        assert found[count] == 1, report["problems"]
    assert abs(found["loss_over_fewer"]["mean"]) < 0.3


@needs_root
@pytest.mark.full
def test_a_throttled_slice_in_namespaces(tmp_path):
    options = ["--rounds", "9", "--slices", "2", "--at-round", "3", "--out", str(tmp_path)]
    assert main(["throttle", *options]) == 0
    idle = json.loads((tmp_path / "report.json").read_text())["straggler_idle"]["no-replan"]
    assert max(idle[4:]) > 2 * min(idle[1:3])


@needs_root
@pytest.mark.full
def test_a_quick_comparison_in_namespaces(tmp_path):
    options = ["--quick", "--methods", "diloco", "int8", "geomesh-overlap"]
    assert main(["compare", *options, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "report.json").read_text())["summary"]
    assert set(found) == {"diloco", "int8", "geomesh-overlap"}
