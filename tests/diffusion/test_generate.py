# SPDX-License-Identifier: Apache-2.0
"""A tiny diffusion run from training to text, through converted weights as well."""

import io
import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from geojax import runs
from geojax.cli import main
from geojax.config import EvalConfig, SourceConfig
from geojax.configs import load_config
from geojax.convert import convert
from geojax.diffusion.load import load


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diffusion")
    config = load_config("dream-tiny")
    config = replace(
        config,
        data=replace(config.data, source=SourceConfig(kind="pydoc"), seq_len=32),
        train=replace(config.train, total_tokens=4_000),
        eval=EvalConfig(sequences=24, batch=8, draws=2),
    )
    runs.start(config, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def converted(run):
    target = run.parent / "weights"
    convert(run, target)
    return target


@pytest.mark.runs
def test_a_run_reports_a_bound_with_its_error(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [r for r in records if r["kind"] == "eval"]
    assert all(r["bound"] and 0 < r["standard_error"] < 1 for r in evaluations)
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]


def test_a_run_and_its_weights_say_the_same(run, converted, capsys):
    model = load(converted)
    assert (model.mask_id, model.end_ids) == (511, (0,))
    assert model.config == load(run).config
    said = []
    for folder in (run, converted):
        args = ["generate", str(folder), "--prompt", "The value", "--tokens", "12", "--steps", "4"]
        assert main(args) == 0
        out, err = capsys.readouterr()
        assert "4 denoising steps" in err
        said.append(out)
    assert said[0] == said[1]
    assert len(said[0]) > 5


@pytest.mark.runs
def test_many_prompts_are_answered_as_json(run, tmp_path, capsys):
    prompts = [{"prompt": "One"}, {"prompt": "Two and", "suffix": " end"}, {"prompt": "Three"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, prompts)))
    args = ["--tokens", "6", "--batch", "2", "--quiet"]
    assert main(["generate", str(run), "--file", str(path), *args]) == 0
    out, err = capsys.readouterr()
    found = [json.loads(line) for line in out.splitlines()]
    assert [r["prompt"] for r in found] == ["One", "Two and", "Three"]
    assert found[1]["tokens"] == 6
    assert not err
    # Alone it is the same answer.
    assert main(["generate", str(run), "--prompt", "One", "--tokens", "6", "--quiet"]) == 0
    assert capsys.readouterr().out.strip() == found[0]["answer"].strip()


def test_a_prompt_may_come_from_standard_input(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("The value"))
    assert main(["generate", str(run), "--tokens", "12", "--steps", "4", "--quiet"]) == 0
    piped = capsys.readouterr().out
    args = ["--prompt", "The value", "--tokens", "12", "--steps", "4", "--quiet"]
    assert main(["generate", str(run), *args]) == 0
    assert capsys.readouterr().out == piped


def test_a_bound_by_more_draws_or_of_the_run_itself_is_the_same(run, converted, capsys, tmp_path):
    found = []
    for folder, draws in ((converted, 1), (converted, 4), (run, 1)):
        path = tmp_path / f"{draws}.json"
        args = ["--sequences", "32", "--batch", "8", "--draws", str(draws), "--json", str(path)]
        source = ["--data.source.kind", "pydoc", "--data.seq-len", "32"]
        assert main(["eval", str(folder), *args, *source]) == 0
        assert "perplexity at most" in capsys.readouterr().out
        found.append(json.loads(path.read_text()))
    one, four, of_run = found
    assert of_run == one
    assert one["sequences"] == four["sequences"] == 32
    # A shifted model predicts no first token.
    assert one["tokens"] == four["tokens"] == 32 * 31
    assert four["standard_error"] < one["standard_error"]
    spread = np.hypot(one["standard_error"], four["standard_error"])
    assert abs(one["nats_per_token"] - four["nats_per_token"]) < 5 * spread


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", "a", "--file", "b.txt"], "two sources of the prompt"),
        (["--file", "nowhere.txt"], "cannot read the prompt nowhere.txt"),
        (["--prompt", "a", "--tokens", "0"], "tokens 0 must be at least 1"),
        (["--prompt", "a", "--policy", "best"], "'best' is none of"),
        (["--prompt", "a", "--chat"], "has no chat_template"),
    ],
)
def test_bad_options_are_refused(run, args, message, capsys):
    assert main(["generate", str(run), *args]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_models_that_fill_no_masks_are_refused(tmp_path, capsys):
    assert main(["generate", str(tmp_path / "none"), "--prompt", "a"]) == 2
    assert "is not a folder" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text('{"prompt": 3}')
    assert main(["generate", str(tmp_path), "--file", str(tmp_path / "a.jsonl")]) == 2
    assert 'needs a text "prompt"' in capsys.readouterr().err
