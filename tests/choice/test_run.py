# SPDX-License-Identifier: Apache-2.0
"""Items, answers and what is recorded of them, with a model that is a dictionary."""

import json
import math

import numpy as np
import pytest

from geojax.choice import run
from geojax.choice.command import table
from geojax.choice.items import digest, make_item, pick, usable
from geojax.choice.likelihood import Likelihood
from geojax.choice.run import Answer, ask, describe, summary
from geojax.config import ConfigError

SETTINGS = {"model": "abc", "dtype": "float32"}


def items(count, start=0):
    return [
        make_item(f"What is {i} and {i}?", [str(2 * i), "unknown", "zwölf"], 0)
        for i in range(start, start + count)
    ]


def encode(texts):
    """Pairs of texts stand for pairs of ids."""
    return list(texts)


class Counted:
    """Likelier the longer the context, and the shorter the choice; counts what it is asked."""

    def __init__(self, stop=math.inf):
        self.asked, self.stop = [], stop

    def __call__(self, pairs):
        if len(self.asked) + len(pairs) > self.stop:
            raise KeyboardInterrupt
        self.asked += pairs
        return [Likelihood(-len(b) / len(a), False, 2 * ("7" in a)) for a, b in pairs]


def test_a_choice_is_the_likeliest_and_a_tie_counts_as_its_share():
    item = make_item("Q", ["a", "bb", "cccc"], 1)
    for logs, correct, norm in (
        ((-3.0, -2.0, -8.0), 1, 1),
        ((-1.0, -2.0, -8.0), 0, 1 / 2),  # -1, -1 and -2 a byte
        ((-2.0, -2.0, -8.0), 1 / 2, 1),
        ((-2.0, -2.0, -2.0), 1 / 3, 0),
        ((-1.0, -9.0, -1.0), 0, 0),
    ):
        answer = Answer(item, logs, 0)
        assert answer.correct == pytest.approx(correct)
        assert answer.correct_norm == pytest.approx(norm)


def test_bytes_are_of_utf8_and_without_the_space_before():
    item = make_item(" How many?\n", [" zwölf ", "two"], 0)
    assert item.choice_bytes == (6, 3)
    assert item.continuations == (" zwölf", " two")
    assert item.context == "How many?"


def test_figures_are_those_of_the_formulas():
    two, four = (make_item("Q", [c * 2 for c in "abcd"[:n]], 0) for n in (2, 4))
    answers = [
        Answer(two, (-1.0, -2.0), 0),
        Answer(two, (-2.0, -1.0), 3),
        Answer(four, (-1.0, -2.0, -2.0, -2.0), 0),
        Answer(four, (-1.0, -1.0, -2.0, -2.0), 0),
    ]
    found = summary(answers)
    right = np.array([1, 0, 1, 0.5])
    assert found["acc"] == found["acc_norm"] == right.mean()
    assert found["acc_stderr"] == pytest.approx(right.std(ddof=1) / 2)
    assert found["chance"] == (0.5 + 0.5 + 0.25 + 0.25) / 4
    assert found["majority"] == 1  # "aa" is always right
    assert (found["items"], found["cut_items"]) == (4, 1)
    assert math.isnan(summary(answers[:1])["acc_stderr"])


def test_a_model_that_knows_nothing_is_at_chance():
    answers = [Answer(item, (-1.0,) * 3, 0) for item in items(5)]
    assert summary(answers)["acc"] == pytest.approx(summary(answers)["chance"])


def test_which_items_are_asked_is_fixed_by_their_text():
    many = items(50)
    some = pick(many, 10)
    assert pick(many[::-1] + many, 10) == some
    assert {item.id for item in some} < {item.id for item in many}
    assert pick(many, 20)[:10] == some
    assert digest(some) == digest(pick(many[::-1], 10)) != digest(pick(many, 11))
    # Machines and years agree: these are SHA-256's.
    assert some[0].context == "What is 9 and 9?"
    assert digest(some) == "9740a612aa83de3f"
    assert describe(some, 50) == {"source_items": 50, "items_hash": digest(some)}


def test_an_item_with_two_right_answers_or_without_a_choice_is_none():
    doubtful = [make_item("Q", ["a", "b"], gold) for gold in (0, 1)]
    assert pick([*doubtful, *items(2)], 9) == pick(items(2), 9)
    assert usable(make_item("Q", ["a", "b"], 0))
    for context, choices in (("Q", ["a", "a "]), ("Q", ["a", ""]), (" ", ["a", "b"]), ("Q", ["a"])):
        assert not usable(make_item(context, choices, 0))


def test_a_run_that_was_stopped_goes_on_and_ends_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "BLOCK", 4)
    tasks = {"sums": items(10), "more": items(5, 100)}
    whole = ask(tasks, encode, Counted(), SETTINGS, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        ask(tasks, encode, Counted(stop=29), SETTINGS, tmp_path / "out")
    path = tmp_path / "out" / "items.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 4  # two blocks of 12 pairs were asked
    # Killed in the middle of a block's record, and of a line.
    path.write_bytes(b"".join(lines[:7]) + lines[7][:20])
    rest, said = Counted(), []
    again = ask(tasks, encode, rest, SETTINGS, tmp_path / "out", said.append)
    assert again == whole
    assert len(rest.asked) == 3 * (4 + 2 + 4 + 1)
    assert said[-1] == "more: 5 of 5 items"
    nothing = Counted()
    assert ask(tasks, encode, nothing, SETTINGS, tmp_path / "out") == whole
    assert not nothing.asked
    assert ask(tasks, encode, Counted(), SETTINGS) == whole
    assert any(answer.cut for answer in whole["sums"])


def test_answers_of_another_model_are_not_taken(tmp_path):
    ask({"sums": items(2)}, encode, Counted(), SETTINGS, tmp_path)
    with pytest.raises(ConfigError, match="answers of model 'abc', and this is 'other'"):
        ask({"sums": items(2)}, encode, Counted(), SETTINGS | {"model": "other"}, tmp_path)


def test_a_record_says_all_that_the_figures_need(tmp_path):
    ask({"sums": items(1)}, encode, Counted(), SETTINGS, tmp_path)
    start, record = map(json.loads, (tmp_path / "items.jsonl").read_text().splitlines())
    assert start == {"kind": "start", **SETTINGS}
    assert record["choice_bytes"] == [1, 7, 6]
    assert record["gold"] == 0
    assert len(record["log_likelihoods"]) == 3


def test_the_table_says_each_error_beside_its_figure():
    figures = summary([Answer(item, (-1.0, -2.0, -3.0), 0) for item in items(3)])
    head, line = table({"sums": {**figures, **describe(items(3), 9)}})
    assert head.split() == ["task", "acc", "acc_norm", "chance", "majority", "items", "cut"]
    assert " ".join(line.split()) == "sums 1.000 +- 0.000 0.000 +- 0.000 0.333 0.333 3 0"
