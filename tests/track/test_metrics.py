# SPDX-License-Identifier: Apache-2.0
"""Records survive whatever ends a run, and a resumed run records each round once."""

import json
import random

import numpy as np
import pytest

from geojax.config import ConfigError
from geojax.track.metrics import MetricsWriter, read_records


def _write_rounds(metrics, rounds):
    for number in rounds:
        metrics.write("slice", round=number, slice="a")
        metrics.write("round", round=number)
        metrics.write("eval", round=number)


def _rounds(path):
    return [r["round"] for r in read_records(path) if r["kind"] == "round"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_record_can_be_read_as_soon_as_it_is_written(path):
    with MetricsWriter(path) as metrics:
        metrics.write("round", round=1, loss=2.5)
        assert read_records(path) == [{"kind": "round", "round": 1, "loss": 2.5}]


def test_lines_are_strict_json_with_plain_numbers(path):
    with MetricsWriter(path) as metrics:
        metrics.write(
            "slice",
            tokens=np.int64(3),
            merged=np.bool_(True),
            loss=np.float32(0.5),
            grad_norm=np.float64("nan"),
            plan=[{"seconds": float("inf")}],
        )

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "kind": "slice",
        "tokens": 3,
        "merged": True,
        "loss": 0.5,
        "grad_norm": None,
        "plan": [{"seconds": None}],
    }


@pytest.mark.parametrize("killed_at", [2, 3, 5])
def test_after_a_rewind_each_round_is_recorded_once(path, killed_at):
    with MetricsWriter(path) as metrics:
        metrics.write("start", method="geomesh")
        metrics.write("eval", round=0)
        _write_rounds(metrics, range(1, killed_at + 1))
    with MetricsWriter(path) as metrics:
        metrics.rewind(2)
        assert _rounds(path) == [1, 2]
        _write_rounds(metrics, range(3, 6))
    once = [("start", None), ("eval", 0)]
    once += [(kind, n) for n in range(1, 6) for kind in ("slice", "round", "eval")]
    assert [(r["kind"], r.get("round")) for r in read_records(path)] == once


def test_a_rewind_keeps_only_the_first_start(path):
    with MetricsWriter(path) as metrics:
        metrics.write("start", seed=0)
        metrics.write("start", seed=1)
        metrics.rewind(0)
    assert read_records(path) == [{"kind": "start", "seed": 0}]


def test_a_rewind_forgets_changes_of_slices_that_no_checkpoint_knows_of(path):
    """Whatever was resumed with which slices, at one round or another, saved or killed before."""
    for seed in range(100):
        draw = random.Random(seed)
        path.unlink(missing_ok=True)
        round, slices, saved = 0, ["a"], []
        with MetricsWriter(path) as metrics:
            for _ in range(8):
                metrics.rewind(round, slices)
                assert _changes(path) == saved
                others = draw.choice([["a"], ["b"], ["a", "b"]])
                if others != slices:
                    metrics.write("slices", **{"round": round, "from": slices, "to": others})
                _write_rounds(metrics, range(round + 1, round + 3))
                if draw.random() < 0.5:
                    if others != slices:
                        saved = [*saved, (round, slices, others)]
                    round, slices = round + draw.choice([0, 0, 1, 2]), others


def _changes(path):
    return [(r["round"], r["from"], r["to"]) for r in read_records(path) if r["kind"] == "slices"]


def test_a_line_torn_anywhere_costs_that_line_only(path):
    with MetricsWriter(path) as metrics:
        _write_rounds(metrics, [1])
        metrics.write("round", round=2)
    whole = path.read_bytes()
    last = whole.rindex(b"{")
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        survivors = 2 if cut == len(whole) - 1 else 1  # all but its newline: nothing is lost
        assert _rounds(path) == list(range(1, survivors + 1))
        with MetricsWriter(path) as metrics:
            metrics.write("round", round=3)
        assert _rounds(path) == [*range(1, survivors + 1), 3]


@pytest.mark.parametrize("bad", ['{"kind": "rou', "[1]", '{"round": 2}', ""])
def test_any_other_bad_line_is_named(path, bad):
    path.write_text(f'{{"kind": "start"}}\n{bad}\n{{"kind": "end"}}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2 is not"):
        read_records(path)
