# SPDX-License-Identifier: Apache-2.0
"""A summary follows from the records in closed form, and false accounts are found."""

import json
import math
from dataclasses import fields

import pytest

from geojax.config import ConfigError
from geojax.track.summary import (
    UNITS,
    Summary,
    check_accounting,
    common_target,
    crossing,
    labels,
    load_run,
    summarise,
)


def _edit(folder, kind, number, **changes):
    """Change fields of the first record of `kind` and round `number`."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    next(r for r in records if (r["kind"], r.get("round")) == (kind, number)).update(changes)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def test_figures_equal_their_closed_forms(make_run):
    # 100 steps each at speeds 2.57..1 of one second; 60 s of WAN and 2 s of outer step a round.
    summary = summarise(load_run(make_run("diloco", balanced=False)), None)
    assert summary.hours == pytest.approx(6 * 162 / 3600)
    assert summary.straggler_idle == pytest.approx((100 - 100 / 2.57) / 162)
    assert summary.wan_idle == pytest.approx(60 / 162)
    assert summary.bytes_per_round == 18_900_000
    assert summary.wire_bytes_per_round == 3 * 18_900_000
    assert summary.payload_ratio == pytest.approx(600 / 18.9)
    assert summary.tokens == 6 * 4 * 100 * 8 * 1024
    assert (summary.method, summary.seed, summary.clock) == ("diloco", 0, "modelled")
    assert summary.hours_to_target is None
    assert summary.tokens_to_target is None


def test_a_crossing_is_linear_in_log_perplexity(make_run):
    run = load_run(make_run(perplexities=(400.0, 100.0, 25.0)))
    seconds, tokens = crossing(run, 50.0)  # the geometric mean of 100 and 25: half way
    assert seconds == pytest.approx((run.evals[1]["seconds"] + run.evals[2]["seconds"]) / 2)
    assert tokens == pytest.approx((run.evals[1]["tokens"] + run.evals[2]["tokens"]) / 2)


def test_only_the_first_crossing_counts(make_run):
    run = load_run(make_run(perplexities=(400.0, 30.0, 90.0, 20.0)))
    assert crossing(run, 30.0) == (run.evals[1]["seconds"], run.evals[1]["tokens"])


def test_a_target_below_all_evaluations_is_not_reached(make_run):
    assert crossing(load_run(make_run()), 22.9) is None


def test_after_an_evaluation_that_was_not_finite_there_is_nothing_to_interpolate(make_run):
    run = load_run(make_run(perplexities=(400.0, None, 20.0)))
    assert crossing(run, 50.0) == (run.evals[2]["seconds"], run.evals[2]["tokens"])


def test_the_common_target_is_reached_by_all_that_converged(make_run):
    runs = [
        load_run(make_run("a", perplexities=(400.0, 20.0))),
        load_run(make_run("b", perplexities=(400.0, 30.0))),
        load_run(make_run("diverged", perplexities=(400.0, None))),
    ]
    assert common_target(runs) == pytest.approx(1.02 * 30)
    assert [crossing(run, common_target(runs)) is None for run in runs] == [False, False, True]
    assert summarise(runs[2], 50.0).final_perplexity == math.inf
    with pytest.raises(ConfigError, match="give the target"):
        common_target(runs[2:])


def test_true_accounts_pass(make_run):
    check_accounting(load_run(make_run()))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("slice", {"wan_seconds": 60.001}, "round 3: the parts of slice h100 sum to"),
        ("round", {"seconds": 480.0}, "its clock says 480"),
        ("round", {"round": 2}, "round 2 is recorded where round 3 should be"),
        ("round", {"round_seconds": 100.0}, "round 3: the parts of slice h100 sum to"),
    ],
)
def test_false_accounts_are_found(make_run, kind, changes, message):
    folder = make_run()
    _edit(folder, kind, 3, **changes)
    with pytest.raises(ConfigError, match=message):
        check_accounting(load_run(folder))


def test_a_round_that_was_cut_off_does_not_count(make_run):
    folder = make_run(rounds=3)
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if '"round", "round": 3' in line)
    path.write_text("".join(lines[:cut]))
    run = load_run(folder)
    check_accounting(run)
    assert {record["round"] for record in run.slices} == {1, 2}
    assert run.end is None


@pytest.mark.parametrize("missing", ["start", "round", "eval"])
def test_a_run_without_results_is_refused(make_run, missing):
    path = make_run() / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if f'"kind": "{missing}"' not in line))
    with pytest.raises(ConfigError, match="has no"):
        load_run(path.parent)


def test_what_is_no_run_folder_is_refused(make_run, tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        load_run(tmp_path)
    folder = make_run()
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl"):
        load_run(folder)


def test_labels_are_as_short_as_they_can_be(make_run):
    a, b = load_run(make_run("geomesh")), load_run(make_run("diloco"))
    seeded = load_run(make_run("again", method="geomesh", seed=1))
    copy = load_run(make_run("copy", method="geomesh"))
    assert labels([a, b]) == ["geomesh", "diloco"]
    assert labels([a, seeded]) == ["geomesh seed 0", "geomesh seed 1"]
    assert labels([a, copy]) == ["geomesh", "copy"]
    with pytest.raises(ConfigError, match="twice"):
        labels([a, a])


def test_every_number_of_a_summary_has_a_unit():
    assert {f.name for f in fields(Summary)} - set(UNITS) == {"method", "seed", "clock"}


@pytest.mark.parametrize(
    ("kind", "key"), [("start", "seed"), ("round", "tokens"), ("slice", "slice"), ("eval", "loss")]
)
def test_a_record_that_lost_a_key_is_named(kind, key, make_run):
    path = make_run() / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    del next(r for r in records if r["kind"] == kind)[key]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    with pytest.raises(ConfigError, match=rf":\d+ is .*kind {kind}, and its '{key}' is missing"):
        load_run(path.parent)


@pytest.mark.parametrize("kind", ["round", "slice", "eval"])
def test_a_record_without_its_numbers_is_named(make_run, kind):
    folder = make_run()
    field = "compute_seconds" if kind == "slice" else "seconds"
    _edit(folder, kind, 2, **{field: None})
    with pytest.raises(ConfigError, match=rf":\d+ is .*kind {kind}, and its '{field}' is None"):
        load_run(folder)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace(f'"{field}"', '"other"'))
    with pytest.raises(ConfigError, match=r"its '.*seconds' is missing"):
        load_run(folder)
