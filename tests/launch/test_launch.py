# SPDX-License-Identifier: Apache-2.0
"""`geojax launch`: a process a slice, watched, stopped and started again."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from launched import PATIENCE_SECONDS, Launch, hashes
from made_text import write_words
from rich.console import Console

from geojax.cli import main
from geojax.config import RunError
from geojax.configs import load_config
from geojax.launch import local
from geojax.platform import EXIT_CODE
from geojax.runs import save_config
from geojax.track.summary import check_accounting, load_run

ROUNDS, STEPS, BATCH, SEQ_LEN = 30, 10 + 6 + 4, 4, 16
CONFIG = f"""
from geojax.config import *
from geojax.models.config import TransformerConfig

def config():
    slices = zip(("eastus", "westus2", "koreacentral"), (2.5, 1.5, 1.0), strict=True)
    outer = OptimizerConfig(name="sgd", learning_rate=0.7, momentum=0.6, nesterov=True)
    return RunConfig(
        name="launched",
        model=TransformerConfig(257, dim=16, layers=1, heads=2, kv_heads=2, mlp_dim=24),
        data=DataConfig(
            source=SourceConfig(kind="files", paths=("words.txt",)),
            tokenizer=TokenizerConfig(vocab_size=257),
            seq_len={SEQ_LEN},
            valid_fraction=0.2,
        ),
        train=TrainConfig(
            total_tokens={ROUNDS * STEPS * BATCH * SEQ_LEN},
            optimizer=OptimizerConfig(name="lion", learning_rate=1e-3),
            compute_dtype="float32",
        ),
        slices=tuple(SliceConfig(name, region=name, speed=speed) for name, speed in slices),
        balance=BalanceConfig(inner_steps=4, batch_sizes=({BATCH},)),
        exchange=ExchangeConfig(schedule="gather"),
        outer=OuterConfig(outer),
        clock=ClockConfig(
            kind="modelled", wan="geomesh-azure", base_step_seconds=1.0, base_batch={BATCH}
        ),
        eval=EvalConfig(every_tokens=10 * {STEPS * BATCH * SEQ_LEN}, sequences=16, batch=8),
        checkpoint=CheckpointConfig(every_rounds=4),
    )
"""


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["launch"], "--local N PRESET_OR_FILE"),
        (["launch", "--local", "three", "demo-geomesh"], "say how many slices"),
        (["launch", "--local", "3", "demo-geomesh"], "the run has 4 slices"),
        (["launch", "--local", "3", "demo-int8"], "the run has 4 slices"),
        (["launch", "--resume", "nowhere"], "not a run folder"),
        (["train", "demo-geomesh", "--slice", "h100"], "go together"),
        (
            ["train", "demo-geomesh", "--slice", "x", "--coordinator", "127.0.0.1:1"],
            "no slice 'x'",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(
    args, says, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_slice_that_cannot_keep_checkpoints_says_where(tmp_path, capsys):
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        (tmp_path / "file").write_text("")
        args = ["--slice", "h100", "--coordinator", "127.0.0.1:1", "--out", str(place)]
        assert main(["train", "demo-geomesh", *args]) == 2
        said = capsys.readouterr().err
        assert f"slice h100 in {place}" in said
        assert "choose another folder with --out" in said


def test_a_coordinator_names_a_record_that_it_cannot_go_on_from(tmp_path, capsys):
    save_config(load_config("demo-geomesh"), tmp_path / "config.json")
    start = '{"kind": "start", "method": "m", "clock": "modelled", "seed": 0}'
    lines = [start, '{"kind": "round", "round": 1, "tokens": 2, "round_seconds": 3}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["coordinator", "--resume", str(tmp_path)]) == 2
    assert "metrics.jsonl:2 is a record of kind round, and its 'seconds'" in capsys.readouterr().err


def test_a_child_that_dies_is_started_again_so_often_and_no_more(monkeypatch):
    monkeypatch.setattr(local, "_FIRST_PAUSE_SECONDS", 0.01)

    class Said:
        lines: list[str] = []  # noqa: RUF012 - of one test

        def print(self, text, **_):
            self.lines.append(str(text))

    child = local._Child(
        local.COORDINATOR, [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    )
    console = Said()
    local._start(child, console, 1)
    with pytest.raises(RunError, match="by SIGKILL after 2 new starts"):
        local._watch({child.name: child}, 2, lambda left: True, threading.Event(), console, 1)
    assert sum("starts as process" in line for line in console.lines) == 3


def test_who_hangs_is_started_again_and_who_was_stopped_is_not(monkeypatch, capsys):
    """And a slice that dies too often does not end the run while the others are a quorum."""
    monkeypatch.setattr(local, "_FIRST_PAUSE_SECONDS", 0.05)
    ends = {"a": f"exit {EXIT_CODE}", "b/0": "kill -9 $$", "b/1": "sleep 60", "c": "exit 75"}
    ends |= {"d": "sleep 60", "e": "sleep 60", local.COORDINATOR: "sleep 60"}
    children = {n: local._Child(n, ["sh", "-c", command]) for n, command in ends.items()}
    console, stop = Console(width=200), threading.Event()
    for child in children.values():
        local._start(child, console, 3)
    try:
        with pytest.raises(RunError, match=r"(a|b/0) ended .* after 2 new starts; its last"):
            local._watch(children, 2, lambda left: left >= 3, stop, console, 3)
    finally:
        local._end(children)
    assert {n: c.restarts for n, c in children.items() if c.restarts} == {"a": 2, "b/0": 2}
    said = capsys.readouterr().out
    assert (
        said.count("; the others go on without it") == 1
    )  # with one stopped, three of five are left
    assert children["c"].code == 75


def test_a_run_that_has_not_begun_needs_all_slices(tmp_path):
    config = load_config("demo-geomesh")
    assert len(config.slices) == 4
    assert not local._enough(config, tmp_path, 3)
    (tmp_path / "journal.jsonl").write_text("{}\n")
    assert local._enough(config, tmp_path, 3)
    assert not local._enough(config, tmp_path, 2)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    write_words(folder, 500)
    (folder / "settings.py").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def whole(place) -> list[str]:
    """Hashes of the run in one process."""
    Launch(place / "one", "train", "settings.py", "--out", "one").finish()
    return hashes(place / "one")


def launch(place: Path, name: str, *more: str) -> Launch:
    args = ("--grpc.lease-seconds", "8", "--grpc.join-seconds", "60", *more)
    return Launch(place / name, "launch", "--local", "3", "settings.py", "--out", name, *args)


def assert_right(folder: Path, total_tokens: int = ROUNDS * STEPS * BATCH * SEQ_LEN) -> None:
    """The run ended, its accounts hold, and its slices saved equal parameters."""
    run = load_run(folder)
    check_accounting(run)
    assert run.end
    assert run.rounds[-1]["tokens"] >= total_tokens
    assert len(hashes(folder)) == len(run.rounds)


@pytest.mark.full
def test_a_launched_run_has_the_bits_of_one_process_though_it_is_stopped_once(place, whole):
    # Long deadlines: in the same rounds, slices must be the same.
    first = launch(place, "stopped", "--grpc.deadline-floor-seconds", "120")
    first.until_round(8)
    first.process.send_signal(signal.SIGTERM)
    first.finish(os.EX_TEMPFAIL)
    assert "stopped and saved" in first.said()
    assert 0 < len(hashes(place / "stopped")) < ROUNDS
    again = Launch(place / "stopped", "launch", "--resume", "stopped")
    again.finish()
    assert hashes(place / "stopped") == whole, again.said()
    assert_right(place / "stopped")


@pytest.mark.full
def test_signals_to_slices_and_coordinator_do_not_end_a_launched_run(place):
    run = launch(place, "hit", "--grpc.deadline-floor-seconds", "5")
    run.until_round(4)
    os.kill(run.pid("eastus"), signal.SIGKILL)
    run.until_round(7)
    os.kill(run.pid("coordinator"), signal.SIGKILL)
    run.until_round(10)
    run.finish()
    assert "took the shared state" in run.said()
    assert_right(place / "hit")
    entries = [json.loads(x) for x in (place / "hit" / "journal.jsonl").read_text().splitlines()]
    assert any(0 not in e["merged"] for e in entries if e["kind"] == "round")


@pytest.mark.full
def test_children_end_with_a_launcher_that_is_killed(place):
    run = launch(place, "orphans")
    run.until_round(2)
    pids = [run.pid(name) for name in ("coordinator", "eastus", "westus2", "koreacentral")]
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    again = Launch(place / "orphans", "launch", "--resume", "orphans")
    again.finish()
    assert_right(place / "orphans")
