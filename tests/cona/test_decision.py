# SPDX-License-Identifier: Apache-2.0
"""Whether to switch: only with confidence, only where it pays, and always for the same reasons."""

import json
from dataclasses import replace

import pytest

from geojax.cona.decision import Decision, Known, Situation, decide, record, replay
from geojax.cona.score import Option, crossing
from geojax.config import ConaConfig
from geojax.config.rate import RateRule

CONFIG = ConaConfig(global_batches=(8, 64), margin=0.01, dwell_rounds=2, trial_share=0.01)
SMALL = Known("small", 8, 1.0, 0.0, True, True, True)
LARGE = Known("large", 64, 4.0, 0.0, True, True, True)  # twice the samples a second
CROSSING = crossing(Option("small", 8, 1.0), Option("large", 64, 4.0))


def situation(noise, present=SMALL, options=(SMALL, LARGE), **changes):
    now = Situation(
        round=30,
        samples=1000,
        total_samples=100_000,
        elapsed_seconds=100.0,
        present=present.name,
        previous=None,
        rounds_here=10,
        on_trial=False,
        noise=noise if noise is None or isinstance(noise, tuple) else (noise, noise, noise),
        switch_seconds=5.0,
        trial_seconds=0.0,
        options=options,
    )
    return replace(now, **changes)


def act(now, config=CONFIG, rule=None):
    return decide(now, config, rule)


@pytest.mark.parametrize(
    ("noise", "present", "kind"),
    [
        (None, SMALL, "keep"),
        (0.5 * CROSSING, SMALL, "keep"),
        (2 * CROSSING, SMALL, "switch"),
        (2 * CROSSING, LARGE, "keep"),
        (0.5 * CROSSING, LARGE, "switch"),  # down the ladder as well
        ((2 * CROSSING, 0.9 * CROSSING, 4 * CROSSING), SMALL, "keep"),  # not sure enough
        ((2 * CROSSING, 1.5 * CROSSING, 4 * CROSSING), SMALL, "switch"),
        ((None, 2 * CROSSING, None), SMALL, "switch"),  # at least that
        ((None, 0.5 * CROSSING, None), SMALL, "keep"),
        ((None, 0.5 * CROSSING, None), LARGE, "keep"),  # it may be far more
    ],
)
def test_it_switches_where_the_whole_interval_says_so(noise, present, kind):
    decision = act(situation(noise, present))
    assert decision.kind == kind
    assert decision.to == (
        present.name if kind == "keep" else {"small": "large"}.get(present.name, "small")
    )


def test_the_gain_is_the_ratio_of_scores():
    n = 100.0
    decision = act(situation(n))
    assert decision.gain == pytest.approx((64 / 4 / (64 + n)) / (8 / 1 / (8 + n)))
    assert decision.gain_low == decision.gain


def test_doubt_about_times_counts_against_a_change():
    n = 1.2 * CROSSING
    assert act(situation(n)).kind == "switch"
    doubtful = LARGE._replace(sd=0.2)
    decision = act(situation(n, options=(SMALL, doubtful)))
    assert decision.kind == "keep"
    assert decision.gain_low < 1 < decision.gain


def test_a_change_must_pay_before_the_run_ends():
    n = 4 * CROSSING
    late = situation(n, samples=100_000 - 80)  # ten steps are left
    assert act(late).kind == "keep"
    assert act(replace(late, switch_seconds=0.1)).kind == "switch"


def test_a_stay_lasts_for_some_rounds():
    now = situation(4 * CROSSING, rounds_here=1)
    assert act(now).kind == "keep"
    assert act(replace(now, rounds_here=2)).kind == "switch"


def test_what_is_not_compiled_is_prepared():
    now = situation(4 * CROSSING, options=(SMALL, LARGE._replace(ready=False)))
    assert act(now).kind == "prepare"
    assert act(now).to == "large"


def test_a_strategy_that_was_never_timed_gets_a_trial_and_goes_where_it_fails():
    n = 2 * CROSSING
    guess = LARGE._replace(sd=0.3, timed=False, family_timed=False)
    now = situation(n, options=(SMALL, guess))
    assert act(now).kind == "trial"
    spent = replace(now, trial_seconds=0.01 * (100 + 99_000 / 8))
    assert act(spent).kind == "keep"
    assert "trials that failed have spent 125 s of 125" in act(spent).reason
    slow = LARGE._replace(seconds=9.0)
    after = situation(n, slow, (SMALL, slow), previous="small", on_trial=True, rounds_here=1)
    assert act(after) == Decision(
        "fallback", "small", act(after).reason, act(after).gain, act(after).gain_low
    )
    assert act(replace(after, options=(SMALL, LARGE))).kind == "keep"  # it delivered
    waits = replace(after, options=(SMALL, slow._replace(timed=False)), rounds_here=5)
    assert act(waits).kind == "keep"  # it may be slow for what is compiled beside it


def test_a_strategy_of_a_timed_family_is_tried_where_it_would_pay_as_predicted():
    guess = LARGE._replace(sd=0.3, timed=False)
    assert act(situation(1.5 * CROSSING, options=(SMALL, guess))).kind == "trial"
    assert act(situation(0.9 * CROSSING, options=(SMALL, guess))).kind == "keep"


def test_looking_around_at_first_does_not_forbid_what_pays_later():
    """A run that spent all its trials early would else stay where it was to its end."""
    budget = 0.01 * (100 + 99_000 / 8)
    guess = LARGE._replace(sd=0.3, timed=False)
    strange = guess._replace(name="strange", family_timed=False)
    now = situation(2 * CROSSING, options=(SMALL, guess, strange), trial_seconds=budget)
    assert (act(now).kind, act(now).to) == ("trial", "large")
    twice = replace(now, trial_seconds=2 * budget - 10)  # a trial is two switches of 5 s
    assert (act(twice).kind, act(twice).to) == ("trial", "large")
    over = replace(now, trial_seconds=2 * budget)
    assert act(over).kind == "keep"
    assert "of 250" in act(over).reason


def test_hope_is_bounded():
    hopeless = Known("hopeless", 64, 400.0, 0.4, False, False, True)
    assert act(situation(2 * CROSSING, options=(SMALL, hopeless))).kind == "keep"


def test_going_back_is_called_that():
    assert act(situation(0.3 * CROSSING, LARGE, previous="small")).kind == "fallback"


def test_a_rate_rule_that_falls_short_at_large_batches_keeps_them_away():
    n = 2 * CROSSING
    assert act(situation(n), rule=RateRule("adascale", 8)).kind == "switch"
    far = Known("far", 4096, 4.0, 0.0, True, True, True)
    options = (SMALL, far)
    assert act(situation(n, options=options)).kind == "switch"
    assert act(situation(n, options=options), rule=RateRule("linear", 8)).kind == "keep"


def test_alone_it_stays():
    assert act(situation(CROSSING, options=(SMALL,))).kind == "keep"


def test_a_replay_of_the_records_gives_the_same_decisions():
    situations = [situation(n, p) for n in (None, 10.0, (None, 40.0, None)) for p in (SMALL, LARGE)]
    records = [json.loads(json.dumps(record(s, act(s)))) for s in situations]
    assert all(recorded == again for recorded, again in replay(records, CONFIG, None))
    records[-1]["inputs"]["noise"] = [1.0, 1.0, 1.0]
    recorded, again = replay(records, CONFIG, None)[-1]
    assert recorded != again
