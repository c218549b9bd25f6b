# SPDX-License-Identifier: Apache-2.0
"""What counts as a right answer, and `geojax eval` of a model of generated tasks."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from geojax.cli import main
from geojax.data import tasks
from geojax.diffusion.exact import Score, is_of_tasks, requests, right
from geojax.models.config import get_model
from geojax.models.transformer import init_params
from geojax.models.weights import SpecialTokens, save_safetensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of tasks that knows nothing."""
    config = replace(get_model("dlm-tasks"), layers=1, dim=24, heads=1, kv_heads=1, mlp_dim=16)
    params = jax.tree.map(np.asarray, init_params(config, 0))
    target = tmp_path_factory.mktemp("tasks") / "model"
    save_safetensors(params, config, target, special=SpecialTokens(mask=tasks.MASK, eos=tasks.END))
    return target


def test_a_request_has_its_blanks_and_no_padding():
    rows = tasks.make_examples("fill", None, 20, 0, 80)
    for i, ask in enumerate(requests(rows, 4)):
        length = rows.real[i].sum()
        assert len(ask.tokens) == length
        hidden = np.asarray(ask.tokens) == tasks.MASK
        np.testing.assert_array_equal(hidden, rows.maskable[i, :length])
        assert ask.begin == rows.answer_start[i]
        assert hidden[: ask.begin].any()


def test_right_is_what_says_every_symbol_of_the_answer():
    """One who knows the answers, but for one symbol of every third request."""
    rows, asked = tasks.make_examples("max", None, 150, 0, 80), []

    def answer(asks):
        found = []
        for ask in asks:
            i = len(asked)
            asked.append(ask)
            tokens = rows.tokens[i, : len(ask.tokens)].copy()
            if i % 3 == 0:
                tokens[rows.answer_stop[i] - 1] ^= 1
            found.append(tokens)
        return found

    np.testing.assert_array_equal(right(rows, 4, answer), np.arange(150) % 3 > 0)
    assert len(asked) == 150


def test_error_is_that_of_all_requests():
    score = Score("copy", (0.5, 0.7, 0.6), 100)
    assert score.accuracy == pytest.approx(0.6)
    assert score.error == pytest.approx((0.6 * 0.4 / 300) ** 0.5)


def test_eval_scores_a_model_of_tasks(folder, tmp_path, capsys):
    assert main(["eval", str(folder), "--items", "2", "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["tasks"]) == [task.name for task in tasks.TASKS]
    assert all(len(task["by_seed"]) == 3 for task in found["tasks"].values())
    assert found["revision"] in out
    assert "2 requests a task and seed, 40 to 80 tokens long" in out


def test_what_is_not_of_tasks_is_told_apart(tmp_path):
    assert not is_of_tasks(tmp_path)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--draws", "2"], "--draws means nothing for a model of generated tasks"),
        (["--data.seq-len", "40"], "--data means nothing for a model of generated tasks"),
        (["--items", "0"], "items 0 must be at least 1"),
    ],
)
def test_refused(folder, args, message, capsys):
    assert main(["eval", str(folder), *args]) == 2
    assert message in capsys.readouterr().err
