# SPDX-License-Identifier: Apache-2.0
"""Scores follow from what decisions recorded, and agree with what was decided."""

from dataclasses import replace

import pytest
from made_run import write_chained

from geojax.track.chain import score_table, scores, stays
from geojax.track.plots import plot_chain
from geojax.track.summary import load_run


@pytest.fixture
def run(tmp_path):
    return load_run(write_chained(tmp_path / "chained"))


def test_scores_are_the_closed_form_over_the_present_strategy(run):
    found = {(s.tokens, s.batch): s for s in scores(run)}
    assert len(found) == 2 * len(run.rounds)
    for record in run.rounds:
        noise, present = record["noise"], 8 if record["strategy"].endswith("gb8") else 32
        worth = {8: 8 / 1.0, 32: 32 / 1.5}  # samples a second
        for batch in (8, 32):
            ratios = [
                worth[batch] / (batch + n) / (worth[present] / (present + n))
                for n in (noise["value"], noise["low"], noise["high"])
            ]
            score = found[record["tokens"], batch]
            assert score.score == pytest.approx(ratios[0])
            assert (score.low, score.high) == pytest.approx((min(ratios), max(ratios)))


def test_a_switch_is_to_what_scored_more(run):
    (switch,) = run.switches
    decision = next(r["decision"] for r in run.decisions if r["round"] == switch["round"])
    score = next(
        s for s in scores(run) if (s.tokens, s.strategy) == (switch["tokens"], switch["to"])
    )
    assert score.score == pytest.approx(decision["gain"])
    assert score.score > 1
    assert [stay.batch for stay in stays(run)] == [8, 32]


def test_an_interval_without_an_end_still_has_scores(run):
    record = dict(run.decisions[-1])
    record["inputs"] = record["inputs"] | {"noise": [None, 5.0, None]}
    open_ended = scores(replace(run, decisions=(record,)))
    assert [s.batch for s in open_ended] == [8, 32]
    at_low = {8: (8 / 1.0) / 13, 32: (32 / 1.5) / 37}
    assert open_ended[0].score == pytest.approx(at_low[8] / at_low[32])


def test_nothing_is_scored_before_the_noise_is_known(run):
    records = [r | {"inputs": r["inputs"] | {"noise": None}} for r in run.decisions]
    assert scores(replace(run, decisions=tuple(records))) == []
    assert score_table(replace(run, decisions=())) is None


def test_the_picture_has_a_panel_of_scores_where_there_are_any(run, tmp_path):
    plot_chain(run, tmp_path / "scores.svg")
    plot_chain(replace(run, decisions=()), tmp_path / "plain.svg")
    heights = [
        float((tmp_path / f"{n}.svg").read_text().split('height="')[1].split("pt")[0])
        for n in ("scores", "plain")
    ]
    assert heights[0] > 1.4 * heights[1]
