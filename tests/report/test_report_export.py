# SPDX-License-Identifier: Apache-2.0
"""Exports hold every number of a run once, by step and by tokens."""

import struct
from collections import Counter
from importlib.util import find_spec

import pytest
from made_run import write_chained

from geojax.cli import main
from geojax.report import export
from geojax.report.export import scalars, to_tensorboard, to_trackio
from geojax.track.summary import load_run


@pytest.fixture
def run(make_run):
    return load_run(make_run(rounds=3))


def test_scalars_are_the_records_numbers(run):
    found = list(scalars(run))
    losses = [s for s in found if (s.group, s.name) == ("slice_a100", "loss")]
    assert [s.value for s in losses] == [6.0, 3.0, 2.0]
    assert [s.step for s in losses] == [1, 2, 3]  # outer steps
    assert [s.tokens for s in losses] == [r["tokens"] for r in run.rounds]
    assert [s.seconds for s in losses] == [r["seconds"] for r in run.rounds]
    evals = [s for s in found if (s.group, s.name) == ("eval", "perplexity")]
    assert [(s.step, s.value) for s in evals] == [(0, 512.0), (1, 90.0), (2, 40.0), (3, 23.0)]
    assert {s.value for s in found if s.name == "merged"} == {1.0}
    assert not {s.name for s in found} & {"kind", "hash", "left_out", "slice"}
    assert len({s[:3] for s in found}) == len(found)


def test_noise_and_decisions_are_scalars_too(tmp_path):
    run = load_run(write_chained(tmp_path / "chained"))
    found = {(s.group, s.name, s.step): s.value for s in scalars(run)}
    assert found["round", "noise.low", 20] == 8.0  # the second of rounds of ten steps
    gains = [r["decision"]["gain_low"] for r in run.decisions]
    assert [found["decision", "gain_low", 10 * (i + 1)] for i in range(6)] == gains
    assert [step for _, name, step in found if name == "switch_seconds"] == [20]


def test_what_is_not_finite_is_left_out(make_run):
    run = load_run(make_run(perplexities=(512.0, None, 20.0)))
    found = [s.value for s in scalars(run) if (s.group, s.name) == ("eval", "perplexity")]
    assert found == [512.0, 20.0]


def read_events(path):
    """(tag, step, seconds, value) of a file of framed records."""
    from tensorboardX.proto.event_pb2 import Event

    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
        for value in event.summary.value:
            found.append((value.tag, event.step, event.wall_time, value.simple_value))
    return found


@pytest.mark.skipif(find_spec("tensorboardX") is None, reason="needs tensorboardX")
def test_a_second_export_for_tensorboard_takes_the_firsts_place(make_run, tmp_path):
    folder, other = make_run("a"), make_run("b", seed=1)
    out = tmp_path / "board"
    (out / "a").mkdir(parents=True)
    (out / "a" / "notes").write_text("the user's")
    for _ in range(2):
        assert main(["report", str(folder), str(other), "--tensorboard", str(out)]) == 0
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()) == [
        "a/events.out.tfevents.geojax",
        "a/notes",
        "b/events.out.tfevents.geojax",
    ]
    events = read_events(out / "a" / "events.out.tfevents.geojax")
    known = list(scalars(load_run(folder)))
    assert len(events) == 2 * len(known)
    assert max(Counter((tag, step) for tag, step, _, _ in events).values()) == 1
    last = known[-1]
    at = {tag: (step, seconds) for tag, step, seconds, _ in events}
    assert at[f"{last.group}/{last.name}"] == (last.step, last.seconds)
    assert at[f"{last.group}_by_tokens/{last.name}"] == (last.tokens, last.seconds)


@pytest.mark.skipif(find_spec("tensorboardX") is None, reason="needs tensorboardX")
def test_names_that_no_folder_can_have_keep_apart(run, tmp_path):
    to_tensorboard([("../a/b", run), ("_a/b", run)], tmp_path / "board")
    names = sorted(path.name for path in (tmp_path / "board").iterdir())
    assert names == ["_a_b", "_a_b_"]


@pytest.mark.skipif(find_spec("trackio") is None, reason="needs trackio")
def test_a_second_export_for_trackio_takes_the_firsts_place(run, tmp_path, monkeypatch):
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr(utils, "TRACKIO_DIR", tmp_path)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)
    for _ in range(2):
        to_trackio([("a", run)], "project")
    assert SQLiteStorage.get_runs("project") == ["a"]
    logs = SQLiteStorage.get_logs("project", "a")
    perplexities = [log["eval/perplexity"] for log in logs if "eval/perplexity" in log]
    assert perplexities == [512.0, 90.0, 40.0, 23.0]


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_missing_extra_says_how_to_install_it(make_run, monkeypatch, capsys, name, tmp_path):
    monkeypatch.setattr(export, "find_spec", lambda module: None)
    assert main(["report", str(make_run()), f"--{name}", str(tmp_path / "there")]) == 2
    assert f"pip install 'geojax[{name}]'" in capsys.readouterr().err
    assert not (tmp_path / "there").exists()


def test_results_have_no_scalars(tmp_path, capsys):
    path = tmp_path / "guard.json"
    path.write_text('{"watches": [], "revision": "", "every": 1}')
    for args in (["--tensorboard", "t"], ["--json", "j"]):
        assert main(["report", str(path), *args]) == 2
        assert f"{args[0]} is of runs, and none is given" in capsys.readouterr().err
