# SPDX-License-Identifier: Apache-2.0
"""Run folders: nothing is lost, nothing half-made is left, and every refusal is one line."""

import fcntl
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from orbax.checkpoint import v1 as ocp
from rich.console import Console

from geojax import runs
from geojax.cli import main
from geojax.config import (
    BalanceConfig,
    CheckpointConfig,
    ConfigError,
    DataConfig,
    EvalConfig,
    RunConfig,
    RunError,
    SliceConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
)
from geojax.models.config import TransformerConfig
from geojax.track.metrics import read_records

pytestmark = pytest.mark.runs
QUIET = Console(file=io.StringIO())


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GEOJAX_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    words = "\n\n".join(
        f"{n} is followed by {n + 1}, and that by {n + 2}. " * 40 for n in range(60)
    )
    path.write_text(words)
    return path


def tiny(text: Path) -> RunConfig:
    model = TransformerConfig(
        vocab_size=300, dim=16, layers=1, heads=2, kv_heads=2, mlp_dim=16, tied=True
    )
    return RunConfig(
        name="tiny",
        model=model,
        data=DataConfig(
            source=SourceConfig(kind="files", paths=(str(text),)),
            tokenizer=TokenizerConfig(vocab_size=300),
            seq_len=16,
            valid_fraction=0.1,
        ),
        train=TrainConfig(total_tokens=512, compute_dtype="float32"),
        slices=(SliceConfig("a"),),
        balance=BalanceConfig(inner_steps=2, batch_sizes=(4,)),
        eval=EvalConfig(sequences=4, batch=4),
        checkpoint=CheckpointConfig(every_rounds=1),
    )


def start(text: Path, folder: Path) -> RunConfig:
    config = tiny(text)
    assert runs.start(config, folder, QUIET)
    return config


def rewrite(folder: Path, config: RunConfig) -> None:
    runs.save_config(config, folder / "config.json")


def test_a_run_goes_on_without_its_text_while_the_cache_holds_its_tokens(text, tmp_path):
    config = start(text, tmp_path / "run")
    text.unlink()
    rewrite(tmp_path / "run", replace(config, train=replace(config.train, total_tokens=1024)))
    assert runs.resume(tmp_path / "run", QUIET)
    rounds = [
        r["round"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "round"
    ]
    assert rounds == list(range(1, 9))


def test_another_text_is_refused_where_the_cache_lost_the_tokens(text, tmp_path, monkeypatch):
    start(text, tmp_path / "run")
    text.write_text(text.read_text() + "\n\nand more")
    monkeypatch.setenv("GEOJAX_CACHE", str(tmp_path / "other-cache"))
    with pytest.raises(ConfigError, match=r"not what the run began with .* put the old ones back"):
        runs.resume(tmp_path / "run", QUIET)


def test_a_change_that_shapes_do_not_show_is_refused(text, tmp_path):
    config = start(text, tmp_path / "run")
    rewrite(tmp_path / "run", replace(config, model=replace(config.model, rope_theta=5e5)))
    with pytest.raises(ConfigError, match=r"model\.rope_theta in config\.json is 500000\.0, but 1"):
        runs.resume(tmp_path / "run", QUIET)


def test_a_finished_run_resumed_records_nothing_twice(text, tmp_path):
    start(text, tmp_path / "run")
    before = read_records(tmp_path / "run" / "metrics.jsonl")
    assert runs.resume(tmp_path / "run", QUIET)
    assert read_records(tmp_path / "run" / "metrics.jsonl") == before


def test_one_process_at_a_time_works_on_a_run(text, tmp_path):
    start(text, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with (tmp_path / "run" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match=r"another process is training in .*run"):
            runs.resume(tmp_path / "run", QUIET)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_full_disk_ends_in_one_line_and_keeps_what_was_saved(text, tmp_path, monkeypatch, capsys):
    save = ocp.training.Checkpointer.save_async

    def full(self, step, *args, **kwargs):
        if step == 2:
            raise ValueError("RESOURCE_EXHAUSTED: no space left on device")
        return save(self, step, *args, **kwargs)

    config = tiny(text)
    (tmp_path / "run").mkdir()
    rewrite(tmp_path / "run", config)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.training.Checkpointer, "save_async", full)
        assert main(["train", "--resume", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "RESOURCE_EXHAUSTED" in error
    assert "make room, then go on" in error
    assert runs.resume(tmp_path / "run", QUIET)
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [r["round"] for r in records if r["kind"] == "round"] == [1, 2, 3, 4]
    assert records[-1]["kind"] == "end"


def test_an_error_of_storage_while_training_deletes_nothing(text, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("geojax.geomesh.trainer.Trainer._end_round", broken)
    with pytest.raises(RunError, match=r"Input/output error.*--resume"):
        runs.start(tiny(text), tmp_path / "run", QUIET)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["name"] == "tiny"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["demo", "--out", "/proc/nowhere/demo"], "/proc/nowhere"),
        (["bench", "geomesh", "--jobs", "0"], "jobs 0 must be at least 1"),
        (["bench", "tune"], "name at least one method to tune"),
        (["bench", "tune", "data-parallel"], "no method 'data-parallel' to tune"),
    ],
)
def test_a_command_that_cannot_begin_says_so_in_one_line(
    command, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
