# SPDX-License-Identifier: Apache-2.0
"""Scores, crossings and chains agree with closed forms and with looking at every noise scale."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.cona.rules import rate_factor
from geojax.cona.score import (
    WALK_POINTS,
    Option,
    best,
    crossing,
    envelope,
    fastest,
    power_law,
    predict_chain,
    progress,
    score,
    worth,
)
from geojax.config.rate import RateRule

BASE = 32
# Five batches on one cluster: small ones mostly wait for communication. The times are invented.
CHAIN = [
    Option("tp8", 16, 0.20),
    Option("tp8-accumulate", 16, 0.22),
    Option("tp4-dp2", 64, 0.30),
    Option("dp8", 256, 0.65),
    Option("pp2-dp4", 256, 0.70),
    Option("pp4-dp2", 1024, 1.90),
    Option("dp8-accumulate", 1024, 2.40),
    Option("pp8", 4096, 6.50),
]
RATES = [
    None,
    RateRule("linear", BASE),
    RateRule("linear", BASE, cap=True),
    RateRule("sqrt", BASE),
    RateRule("adascale", BASE),
    RateRule("table", BASE, table=((16, 0.7), (128, 2.0))),
    RateRule("table", BASE, table=((4, 1.0), (16, 0.7))),
]
batches = st.integers(1, 2**14)
noises = st.floats(0, 1e6)
# Few batches and times, so that equal ones and lines through one point turn up, and whole ones, so
# that what is equal is equal in floating point.
option = st.builds(
    Option,
    st.text("abc", min_size=1, max_size=2),
    st.integers(1, 24),
    st.integers(1, 12).map(float),
)
options = st.lists(option, min_size=1, max_size=12)


def optimum(o: Option, noise: float) -> float:
    return score(o.seconds, o.batch, noise)


@given(batches, noises)
def test_no_learning_rate_is_worth_more_than_the_optimum(batch, noise):
    at_best = 1 / (1 + noise / batch)
    assert worth(batch, noise) == pytest.approx(at_best, rel=1e-12)
    assert progress(at_best, batch, noise) == pytest.approx(at_best, rel=1e-12)
    for factor in (0.5, 0.9, 1.1, 1.5):
        assert progress(factor * at_best, batch, noise) < at_best


@given(batches, noises)
def test_adascale_and_tables_are_at_the_optimum_of_every_batch(batch, noise):
    rule = RateRule("adascale", BASE)
    rate = rate_factor(rule, batch, noise) / (1 + noise / BASE)
    assert progress(rate, batch, noise) == pytest.approx(worth(batch, noise), rel=1e-12)
    for tuned in (rule, RateRule("table", BASE, table=((16, 0.7), (128, 2.0)))):
        assert worth(batch, noise, tuned) == worth(batch, noise)


@given(noise=noises)
def test_where_a_table_falls_a_step_is_worth_what_its_rate_is(noise):
    falling = RateRule("table", BASE, table=((8, 1.0), (32, 2.0), (128, 1.0)))
    for batch, share in ((4, 1.0), (8, 1.0), (20, 1.0), (32, 1.0), (64, 0.5**0.5), (999, 0.5)):
        expected = share * (2 - share) * worth(batch, noise)
        assert worth(batch, noise, falling) == pytest.approx(expected, rel=1e-9)


@given(st.floats(1, 1e4))
@pytest.mark.parametrize("kind", ["linear", "sqrt"])
def test_simple_rules_reach_the_optimum_at_the_base_batch(kind, noise):
    rule = RateRule(kind, BASE)
    assert worth(BASE, noise, rule) == pytest.approx(worth(BASE, noise), rel=1e-12)
    # Sqrt meets the optimum a second time, at batch = noise² / base_batch.
    for batch in (1, BASE // 2, 2 * BASE, 16 * BASE):
        if kind == "linear" or batch * BASE != pytest.approx(noise**2, rel=0.1):
            assert worth(batch, noise, rule) < worth(batch, noise)


@given(batches, noises)
@pytest.mark.parametrize("rule", RATES)
def test_worth_lies_between_0_and_the_optimum(rule, batch, noise):
    assert 0 <= worth(batch, noise, rule) <= worth(batch, noise) * (1 + 1e-12) <= 1 + 1e-12


@given(st.integers(0, 4096))
def test_linear_without_a_cap_does_nothing_from_twice_the_base_on(noise):
    # Where B + n = 2 (B0 + n): a step twice as long as the best one ends where it began.
    limit, rule = 2 * (BASE + noise) - noise, RateRule("linear", BASE)
    assert worth(limit - 1, noise, rule) > 0
    assert worth(limit, noise, rule) == pytest.approx(0, abs=1e-12)
    assert worth(limit + 1, noise, rule) == worth(10 * limit, noise, rule) == 0
    assert worth(10 * limit, noise, RateRule("linear", BASE, cap=True)) > 0


@given(option, noises)
def test_score_is_samples_a_second_over_batch_and_noise(o, noise):
    assert optimum(o, noise) == pytest.approx(o.batch / o.seconds / (o.batch + noise))
    assert worth(o.batch, math.inf) == 0


@given(option, option)
def test_a_crossing_is_where_the_lead_changes_hands(a, b):
    noise = crossing(a, b)
    assert noise == crossing(b, a)
    sides = (0.0, 1e12) if noise is None else (noise / 2, noise * 2)
    before, after = (optimum(a, n) - optimum(b, n) for n in sides)
    if noise is None:
        # Equal samples a second meet without end only: what is left of the lead is rounding, or
        # the difference of batches over noise.
        assert before * after >= -1e-10 * optimum(a, 1e12) * abs(before)
    else:
        assert optimum(a, noise) == pytest.approx(optimum(b, noise), rel=1e-9)
        assert before * after < 0


@settings(deadline=None, max_examples=200)
@given(options)
def test_the_envelope_is_what_looking_everywhere_finds(choices):
    hull = envelope(choices)
    begins = [noise for noise, _ in hull]
    assert begins[0] == 0
    for kept, by in ((begins, "noise"), ([o.batch for _, o in hull], "batch")):
        assert all(a < b for a, b in pairwise(kept)), by
    for noise in [*np.geomspace(1e-3, 1e5, 200).tolist(), 0.0, *begins]:
        on_hull = [o for begin, o in hull if begin <= noise][-1]
        highest = max(optimum(o, noise) for o in choices)
        assert optimum(on_hull, noise) == pytest.approx(highest, rel=1e-12)
    # None is there for nothing: each is strictly ahead of the others inside its own stretch.
    for (begin, o), end in zip(hull, [*begins[1:], 2 * begins[-1] + 1], strict=True):
        others = [optimum(p, (begin + end) / 2) for _, p in hull if p != o]
        assert all(optimum(o, (begin + end) / 2) > other for other in others)


def test_duplicates_and_dominated_options_vanish():
    slow = Option("slow", 16, 0.5)
    twin = Option("a-twin", 16, 0.2)
    no_gain = Option("no-gain", 32, 0.4)  # as many samples a second as twin, in larger steps
    hull = envelope([slow, Option("b-twin", 16, 0.2), twin, twin, no_gain])
    assert hull == [(0.0, twin)]
    assert fastest([slow, no_gain, twin]) == [twin, no_gain]
    # All three take 3 s a noise-free step at noise 10: the middle one is never ahead alone.
    lines = [Option("a", 5, 1.0), Option("b", 10, 1.5), Option("c", 20, 2.0)]
    assert envelope(lines) == [(0.0, lines[0]), (10.0, lines[2])]
    # 8 x 0.3 and 24 x 0.1 differ in the last bit, which is no crossing at 1e17.
    assert crossing(Option("a", 8, 0.1), Option("b", 24, 0.3)) is None
    larger = Option("larger", 17, 0.2)
    assert envelope([twin, larger]) == [(0.0, larger)]


def test_five_batches_are_each_best_in_turn():
    hull = envelope(CHAIN)
    assert [o.name for _, o in hull] == ["tp8", "tp4-dp2", "dp8", "pp4-dp2", "pp8"]
    assert hull[1][0] == pytest.approx(16 * 64 * (0.30 - 0.20) / (64 * 0.20 - 16 * 0.30))  # 12.8
    for (_, a), (noise, b) in pairwise(hull):
        assert noise == crossing(a, b)


@given(options, noises)
@pytest.mark.parametrize("rule", RATES)
def test_best_beats_every_option_and_ties_go_to_the_smaller_batch(rule, choices, noise):
    first = best(choices, noise, rule)
    scores = {o: score(o.seconds, o.batch, noise, rule) for o in choices}
    assert scores[first] == max(scores.values())
    ties = [o for o in choices if scores[o] == scores[first]]
    assert first.batch == min(o.batch for o in ties)
    assert best(choices[::-1], noise, rule) == first


@given(options)
@pytest.mark.parametrize("rule", [None, RateRule("linear", BASE)])
def test_endless_noise_wants_the_most_samples_a_second(rule, choices):
    first = best(choices, math.inf, rule)
    most = max(o.batch / o.seconds for o in choices)
    assert first.batch / first.seconds == pytest.approx(most)


def test_a_rule_that_overshoots_keeps_batches_small():
    # With little noise a linear rule from 32 diverges at batches that would pay at the optimum.
    choices, noise = [Option("small", 32, 1.0), Option("large", 512, 1.1)], 100.0
    assert best(choices, noise).name == "large"
    assert best(choices, noise, RateRule("linear", BASE)).name == "small"


@settings(deadline=None, max_examples=20)
@given(st.floats(0.3, 0.9), st.integers(10**5, 10**8))
def test_a_chain_without_cost_switches_at_the_crossings(exponent, total):
    def noise_at(samples: float) -> float:
        return 2 * samples**exponent

    legs = predict_chain(CHAIN, noise_at, total)
    # The last point of the walk before the end decides last.
    ratio = total ** (1 / (WALK_POINTS - 1))
    reached = [(n, o) for n, o in envelope(CHAIN) if n < noise_at(total // ratio)]
    assert [leg.option for leg in legs] == [o for _, o in reached]
    for leg, (noise, _) in zip(legs[1:], reached[1:], strict=True):
        exact = (noise / 2) ** (1 / exponent)
        assert exact <= leg.begin_sample + 1e-6 <= exact * ratio + 1


@settings(deadline=None, max_examples=20)
@given(options, st.floats(0, 20), st.sampled_from(RATES), st.integers(1, 10**5))
def test_legs_tile_the_run(choices, switch_seconds, rule, total):
    def noise_at(samples: float) -> float:
        return 20 * abs(math.sin(samples / 1000))

    legs = predict_chain(choices, noise_at, total, rule, switch_seconds)
    assert (legs[0].begin_sample, legs[-1].end_sample) == (0, total)
    for a, b in pairwise(legs):
        assert a.end_sample == b.begin_sample
        assert a.option != b.option
    for leg in legs:
        samples = leg.end_sample - leg.begin_sample
        assert samples > 0
        assert leg.seconds == pytest.approx(samples * leg.option.seconds / leg.option.batch)
        assert leg.noise_begin == noise_at(leg.begin_sample)
        assert leg.noise_end == noise_at(leg.end_sample)


def test_a_switch_that_costs_comes_later_or_not_at_all():
    def noise_at(samples: float) -> float:
        return 2 * samples**0.5

    total = 1_000_000
    costs = (0.0, 1.0, 30.0, 1000.0, 1e6)
    chains = [predict_chain(CHAIN, noise_at, total, switch_seconds=cost) for cost in costs]
    lengths = [len(chain) for chain in chains]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-2] > lengths[-1] == 1
    firsts = [chain[1].begin_sample for chain in chains[:-1]]
    assert firsts == sorted(firsts)
    assert firsts[0] < firsts[-1]


def test_a_switch_pays_where_it_saves_its_cost_over_the_rest():
    # Constant noise 64: after a start at noise 0 the large batch makes the progress of the small
    # one in s_small / s_large of the time, and no later point saves more than sample 1.
    small, large = Option("small", 16, 1.0), Option("large", 64, 2.0)
    total = 16_000

    def legs(switch_seconds: float):
        return predict_chain(
            [small, large], lambda s: 64.0 * (s > 0), total, switch_seconds=switch_seconds
        )

    saved = (total - 1) / 16 * 1.0 * (1 - optimum(small, 64) / optimum(large, 64))
    assert [leg.option for leg in legs(saved - 0.01)] == [small, large]
    assert [leg.option for leg in legs(saved + 0.01)] == [small]


@given(st.floats(0, 2), st.floats(0.01, 100))
def test_a_power_law_is_recovered(exponent, scale):
    samples = [100, 1_000, 5_000, 80_000]
    law = power_law(samples, [scale * s**exponent for s in samples])
    for seen in (1, 777, 10**7):
        assert law(seen) == pytest.approx(scale * seen**exponent, rel=1e-6)


def test_a_power_law_averages_errors_in_the_logarithm():
    samples = np.geomspace(100, 1e6, 400)
    errors = np.exp(np.random.default_rng(0).normal(0, 0.3, 400))
    law = power_law(samples.tolist(), (0.5 * samples**0.4 * errors).tolist())
    # The slope's standard error is 0.3 / (20 x 2.66) = 0.006; four of them.
    assert math.log(law(1e5) / law(1e3), 100) == pytest.approx(0.4, abs=0.024)
    assert law(1e4) == pytest.approx(0.5 * 1e4**0.4, rel=0.06)  # 4 x 0.3 / 20


def test_falling_noise_is_taken_for_constant():
    law = power_law([10, 100, 1000], [8.0, 4.0, 2.0])
    assert law(0) == law(10) == law(10**6) == pytest.approx(4.0)
    assert power_law([10, 100], [1.0, 2.0])(0) == 0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: Option("tp8", 0, 1.0), "tp8 has batch 0 and"),
        (lambda: Option("tp8", 8, 0.0), r"and 0\.0 seconds"),
        (lambda: Option("tp8", 8, math.inf), "and inf seconds"),
        (lambda: Option("tp8", 8, math.nan), "and nan seconds"),
        (lambda: worth(0, 1.0), "batch 0 "),
        (lambda: worth(8, -1.5), r"noise scale -1\.5 "),
        (lambda: best(CHAIN, math.nan), "noise scale nan "),
        (lambda: best([], 1.0), "0 options"),
        (lambda: predict_chain(CHAIN, lambda s: s, 0), "total_samples 0 "),
        (lambda: predict_chain(CHAIN, lambda s: s, 9, None, -1.0), r"switch_seconds -1\.0 "),
        (lambda: predict_chain(CHAIN, lambda s: s, 9, None, math.nan), "switch_seconds nan "),
        (lambda: power_law([1, 2], [1.0]), "2 samples and 1 noise"),
        (lambda: power_law([], []), r"0 different samples in \[\]"),
        (lambda: power_law([5], [1.0]), r"1 different samples in \[5\]"),
        (lambda: power_law([5, 5], [1.0, 2.0]), r"1 different samples in \[5, 5\]"),
        (lambda: power_law([0, 5], [1.0, 2.0]), "samples 0 must"),
        (lambda: power_law([1, 5], [1.0, math.inf]), "noise scale inf must"),
    ],
)
def test_faults_are_refused_by_value(call, named):
    with pytest.raises(ValueError, match=named):
        call()
