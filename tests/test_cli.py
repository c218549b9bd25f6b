# SPDX-License-Identifier: Apache-2.0
"""The command line trains and reports, and a mistake costs one line, not a run."""

import errno
import json
import os
import random
import subprocess
import sys

import pytest

from geojax import runs
from geojax.cli import COMMANDS, main
from geojax.config import ConfigError, DataConfig, RunError, SourceConfig, TokenizerConfig
from geojax.configs import PRESETS, load_config
from geojax.data import prepare
from geojax.launch import local, processes

WORDS = ("the", "slice", "round", "step", "east", "west", "model", "token", "loss", "of", "a", "to")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GEOJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(tmp_path):
    """A text file of 40 documents of some 2,000 characters."""
    path, draw = tmp_path / "text.txt", random.Random(0)
    path.write_text("\n\n".join(" ".join(draw.choices(WORDS, k=480)) for _ in range(40)))
    return path


def train_args(text, out, **changes):
    """A run of seconds: two slices, tiny shapes, a few hundred tokens."""
    settings = {
        "model.vocab-size": 300,
        "model.dim": 8,
        "model.layers": 1,
        "model.heads": 2,
        "model.kv-heads": 1,
        "model.mlp-dim": 12,
        "data.tokenizer.vocab-size": 280,
        "data.seq-len": 16,
        "data.valid-fraction": 0.2,
        "data.source.kind": "files",
        "data.source.paths": text,
        "balance.mode": "equal",
        "balance.inner-steps": 2,
        "balance.batch-sizes": 2,
        "train.total-tokens": 300,
        "eval.every-tokens": 128,
        "eval.sequences": 4,
        "eval.batch": 4,
    }
    options = [str(x) for key, value in (settings | changes).items() for x in (f"--{key}", value)]
    return ["train", "quickstart", *options, "--out", str(out)]


def code(args):
    """Exit code of a command, whether it returns or leaves it to the parser of options."""
    try:
        return main([str(arg) for arg in args])
    except SystemExit as leaving:
        return leaving.code


def refused(args, capsys):
    """What a command that must be refused says on standard error."""
    assert code(args) == 2
    return capsys.readouterr().err


def one_line(args, capsys):
    error = refused(args, capsys)
    assert error.startswith("geojax: error: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("args", [["--help"], ["-h"]])
def test_help_lists_every_command(args, capsys):
    assert main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert listed == list(COMMANDS)


def test_no_command_shows_the_help_and_fails(capsys):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["train"], ["data", "prepare"]])
def test_help_of_commands_that_take_a_preset_lists_every_one(command, capsys):
    assert main([*command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert [name for name in listed if name in PRESETS] == list(PRESETS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert code([command, "--help"]) == 0
    assert "usage" in capsys.readouterr().out


def test_help_of_a_preset_lists_fields_of_every_part(capsys):
    assert code(["train", "demo-geomesh", "--help"]) == 0
    shown = capsys.readouterr().out
    for field in ("--train.optimizer.learning-rate", "--slices.3.speed", "--clock.wan", "--out"):
        assert field in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "no command named 'trian'; did you mean 'train'?"),
        (["zzz"], "no command named 'zzz'; use one of"),
        (["train", "quickstrat"], "no preset named 'quickstrat'; did you mean 'quickstart'?"),
        (["train", "mine.py"], "no file 'mine.py'"),
        (["train", "--balance.mode", "equal"], "wants a preset or a file first"),
        (["train", "quickstart", "--seed", "-1"], "seed -1 must lie in 0..4294967295"),
        (["train", "--resume", "nowhere"], "nowhere is not a run folder"),
        (["report", "nowhere"], "nowhere is not a run folder"),
        (["train", "quickstart", "--out", "gs://b/run"], "set checkpoint.folder to 'gs://b/run'"),
        (["train", "--resume", "gs://b/run"], "gs://b/run is no local path"),
        (["report", "gs://b/run"], "gs://b/run is no local path"),
        (["data"], "geojax data knows only `prepare`, not 'nothing'"),
        (
            ["bench", "speed"],
            "not 'speed'",
        ),
    ],
)
def test_a_mistake_ends_in_one_line(args, message, capsys):
    assert message in one_line(args, capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--balanc.mode", "equal"], "--balance.mode"),
        (["--train.optimizer.learning-rat", "1"], "--train.optimizer.learning-rate"),
        (["--balance.mode", "fair"], "invalid choice 'fair'"),
        (["--data.seq-len", "0"], "data.seq_len 0 must be at least 1"),
        (["--data.tokenizer.vocab-size", "513"], "513 exceeds model.vocab_size"),
        (["--data.seq-len", "many"], "many"),
    ],
)
def test_an_unknown_or_impossible_field_is_answered_with_what_is_legal(options, message, capsys):
    said = refused(["train", "quickstart", *options], capsys)
    assert message in " ".join(said.replace("│", " ").split())


def test_a_folder_that_holds_something_is_refused_and_kept(text, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    error = one_line(train_args(text, folder), capsys)
    assert "run exists already; continue" in error
    assert "--resume" in error
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "text.txt does not exist; check the path"),
        (b"", "text.txt holds no text; fill it or leave it out"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "text.txt is not UTF-8 text (byte 0)"),
        (b"one document", "holds one document, which cannot be split for validation"),
    ],
    ids=["missing", "empty", "binary", "one document"],
)
def test_text_that_cannot_be_used_leaves_nothing(content, message, existed, tmp_path, capsys):
    path, out = tmp_path / "text.txt", tmp_path / "run"
    if content is not None:
        path.write_bytes(content)
    if existed:
        out.mkdir()
    assert message in one_line(train_args(path, out), capsys)
    assert out.exists() == existed
    assert not existed or not any(out.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.seq-len": 10_000}, "fewer than one sequence of data.seq_len 10000"),
        ({"balance.batch-sizes": 64}, "fewer than one batch of 64"),
    ],
    ids=["sequence", "batch"],
)
def test_text_too_short_for_the_settings_leaves_nothing(changes, message, tmp_path, capsys):
    short = tmp_path / "short.jsonl"
    short.write_text("".join(f'{{"text": "document {i * "of words "}"}}\n' for i in range(30)))
    assert message in one_line(train_args(short, tmp_path / "run", **changes), capsys)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_larger_than_the_model_is_refused(text, tmp_path, capsys):
    source = SourceConfig("files", paths=(str(text),))
    data = DataConfig(source, TokenizerConfig(vocab_size=270), valid_fraction=0.2)
    saved = prepare(data, 270).folder / "tokenizer.json"
    changes = {
        "model.vocab-size": 269,
        "data.tokenizer.kind": "file",
        "data.tokenizer.path": saved,
    }
    error = one_line(train_args(text, tmp_path / "run", **changes), capsys)
    assert "the tokenizer has ids up to 269, beyond model.vocab_size 269; set" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.runs
def test_a_run_is_trained_resumed_and_reported(text, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(train_args(text, run)) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kinds = [record["kind"] for record in records]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    # 2 slices take 2 steps of 2 sequences of 16 tokens a round: 128 tokens, 300 after 3 rounds.
    assert kinds.count("round") == 3
    assert kinds.count("slice") == 6
    assert kinds.count("eval") == 4
    assert records[-1]["tokens"] == 384
    assert any((run / "checkpoints").iterdir())
    shown = capsys.readouterr().out
    assert "quickstart" in shown

    assert main(["train", "--resume", str(run)]) == 0  # there is nothing left to do
    again = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r for r in again if r["kind"] == "round"] == [
        r for r in records if r["kind"] == "round"
    ]

    out, figures = tmp_path / "pictures", tmp_path / "report.json"
    assert main(["report", str(run), "--out", str(out), "--json", str(figures)]) == 0
    assert {path.name for path in out.iterdir()} == {"perplexity.png", "gantt.png", "idle.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.iterdir())
    content = json.loads(figures.read_text())
    assert content["clock"] == "measured"
    (result,) = content["results"]
    last = [r for r in records if r["kind"] == "eval"][-1]
    assert result["final_perplexity"] == pytest.approx(last["perplexity"])
    assert "straggler" in capsys.readouterr().out


def test_data_prepare_makes_the_corpus_that_training_uses(text, tmp_path, capsys):
    args = train_args(text, tmp_path / "run")[2:-2]
    assert main(["data", "prepare", "quickstart", *args]) == 0
    shown = capsys.readouterr().out
    assert "280 entries" in shown
    (corpus,) = (tmp_path / "cache" / "corpora").iterdir()
    assert str(corpus) in shown
    assert main(["data", "prepare", "quickstart", *args]) == 0
    assert "tokenising" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "args", [["--help"], ["train", "--help"], ["train", "quickstart", "--help"]]
)
def test_help_does_not_wait_for_jax(args):
    script = (
        "import sys\n"
        "from geojax.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    pass\n"
        "slow = {'jax', 'flax', 'orbax', 'matplotlib', 'grain'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage" in done.stdout


@pytest.mark.parametrize(("finished", "code"), [(True, 0), (False, os.EX_TEMPFAIL)])
def test_exit_codes_tell_a_run_that_was_stopped_from_one_that_is_over(
    finished, code, tmp_path, monkeypatch
):
    """Of everything that trains, so that a scheduler starts it again."""
    config = load_config("quickstart")
    runs.begin_folder(config, tmp_path / "run")
    folder, at = str(tmp_path / "run"), ("--slice", "a100", "--coordinator", "host:1")
    for module, name in (
        (runs, "start"),
        (runs, "resume"),
        (processes, "take_part"),
        (processes, "coordinate"),
        (local, "launch_local"),
        (local, "relaunch"),
    ):
        monkeypatch.setattr(module, name, lambda *_: finished)
    for args in (
        ["train", "quickstart"],
        ["train", "--resume", folder],
        ["train", "quickstart", *at],
        ["train", "--resume", folder, *at],
        ["coordinator", "quickstart", "--out", folder],
        ["coordinator", "--resume", folder],
        ["launch", "--local", "2", "quickstart"],
        ["launch", "--resume", folder],
    ):
        assert main(args) == code, args


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("batch 3 is odd; use 4"), 2, "geojax: error: batch 3 is odd; use 4\n"),
        (RunError("saved at round 7"), 1, "geojax: the run stopped: saved at round 7\n"),
        (OSError(errno.ENOSPC, "No space left", "x"), 1, "geojax: error: [Errno 28] No space left"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_a_command_is_told_in_a_line_and_an_exit_code(
    error, code, said, monkeypatch, capsys
):
    def fail(args):
        raise error

    monkeypatch.setitem(COMMANDS, "demo", fail)
    assert main(["demo"]) == code
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert err.count("\n") == bool(said)
