# SPDX-License-Identifier: Apache-2.0
"""Estimates of the noise scale hold a known truth as often as their intervals claim."""

import json
import math

import jax
import numpy as np
import pytest
from scipy.special import stdtrit

from geojax.cona.noise import (
    CALIBRATION_WINDOWS,
    Moments,
    NoiseEstimate,
    NoiseTracker,
    single_step,
)

DIM = 128
"""Directions that carry noise, all alike: few enough to leave a step's S and G2 skewed."""


def sample_steps(rng, noise, batch, shape, parts=8, ratio=1.0):
    """(S, G2) of `shape` steps of `parts` equal parts, one token a sequence, |G| = 1.

    Exact draws of both norms: the sum of the parts, along G and across it, and the scatter of the
    parts around their mean are independent. S / G2 is `noise` over `ratio`.
    """
    variance = noise / ratio / DIM
    along = batch + np.sqrt(batch * variance) * rng.standard_normal(shape)
    total = along**2 + batch * variance * rng.chisquare(DIM - 1, shape)
    scatter = batch / parts * variance * rng.chisquare(DIM * (parts - 1), shape)
    return single_step(total, total / parts + scatter, batch, batch**2 / parts, batch)


def moments(s, g):
    return Moments(s.size, *(float(x.sum()) for x in (s, g, s * s, g * g, s * g)))


def feed(tracker, source, batch, s, g, chunk=25):
    for start in range(0, len(s), chunk):
        part = slice(start, start + chunk)
        tracker.update(source, batch, moments(s[part], g[part]))


def holds(found: NoiseEstimate, truth: float) -> bool:
    return found.low <= truth and (found.high is None or truth <= found.high)


def constant(steps, s, g=1.0, sd=0.01):
    """Moments of steps whose S and G2 scatter by `sd`, apart from each other."""
    return Moments(
        steps, steps * s, steps * g, steps * (s * s + sd**2), steps * (g * g + sd**2), steps * s * g
    )


def test_two_unequal_parts_by_hand():
    # N = 4, sum n^2 = 10: G2 = (20 - 14) / (16 - 10); tr C = (14 - 10/16 20) / (4 (1 - 10/16)).
    s, g = single_step(20.0, 14.0, 4.0, 10.0, 2.0)
    assert g == pytest.approx(1.0)
    assert s == pytest.approx(1.0 * 2 / 4)  # a sequence has two tokens
    traced = jax.jit(single_step)(20, 14, 4, 10, 2)
    np.testing.assert_allclose(traced, (s, g), rtol=1e-6)


def test_no_bias_under_unequal_tokens_and_unequal_directions():
    rng = np.random.default_rng(0)
    mean, deviations = np.linspace(-0.1, 0.2, 12), np.linspace(0.2, 2.0, 12)
    tokens, sequences, steps = np.array([3, 40, 1, 20]), 16, 100_000
    draws = rng.standard_normal((steps, 4, 12)) * deviations
    parts = tokens[:, None] * mean + np.sqrt(tokens)[:, None] * draws
    total = (parts.sum(1) ** 2).sum(-1)
    s, g = single_step(total, (parts**2).sum((1, 2)), 64, (tokens**2).sum(), sequences)
    for values, truth in ((s, (deviations**2).sum() * 16 / 64), (g, (mean**2).sum())):
        error = values.std() / math.sqrt(steps)
        assert abs(values.mean() - truth) < 3 * error
        assert error < 0.05 * truth
    assert (g < 0).mean() > 0.2  # why no ratio of a single step is taken


def pairs(steps, g, sd, correlation):
    """S around 50 and G2 around `g`, of exactly these moments."""
    raw = np.random.default_rng(10).standard_normal((steps, 2))
    raw -= raw.mean(0)
    white = raw @ np.linalg.inv(np.linalg.cholesky(np.cov(raw.T))).T
    second = correlation * white[:, 0] + math.sqrt(1 - correlation**2) * white[:, 1]
    return 50 + 5 * white[:, 0], g + sd * second


@pytest.mark.parametrize("correlation", [-0.8, 0.0, 0.8])
@pytest.mark.parametrize("g", [1.0, 0.1])
def test_the_ends_are_where_t_rejects_just_so(g, correlation):
    steps, tracker = 6, NoiseTracker(100)
    s, g = pairs(steps, g, 0.3, correlation)
    tracker.update("parts", 8, moments(s, g))
    found = tracker.estimate()
    assert (found.high is None) == (g.mean() < 0.5)
    for end in (found.low, found.high):
        if end is not None:
            rest = s - end * g
            t = abs(rest.mean()) / (rest.std(ddof=1) / math.sqrt(steps))
            assert t == pytest.approx(stdtrit(steps - 1, 0.975), rel=1e-9)


@pytest.mark.parametrize("noise", [16, 64, 256, 1024, 4096])
def test_the_interval_holds_the_truth_as_often_as_it_says(noise):
    rng, repetitions, hits = np.random.default_rng(noise), 200, []
    for repetition in range(repetitions):
        batch = (32, 64, 128, 256)[repetition % 4]
        tracker = NoiseTracker(400 * batch)
        feed(tracker, "parts", batch, *sample_steps(rng, noise, batch, 300))
        hits.append(holds(tracker.estimate(), noise))
    assert np.mean(hits) >= 0.9
    assert np.mean(hits) < 1 or noise > 1024  # nor is it too wide


def test_the_interval_holds_the_truth_when_batches_change():
    rng, hits = np.random.default_rng(5), []
    for _ in range(200):
        tracker = NoiseTracker(40_000)
        for batch, steps in ((16, 200), (256, 50), (64, 100)):
            feed(tracker, "parts", batch, *sample_steps(rng, 300, batch, steps))
        hits.append(holds(tracker.estimate(), 300))
    assert 0.9 <= np.mean(hits) < 1


def test_two_sources_of_the_whole_gradient_share_one_average():
    rng, hits, widths = np.random.default_rng(6), [], []
    for _ in range(200):
        tracker = NoiseTracker(20_000)
        feed(tracker, "parts", 64, *sample_steps(rng, 128, 64, 100))
        alone = tracker.estimate()
        feed(tracker, "probe", 64, *sample_steps(rng, 128, 64, 100, parts=2))
        both = tracker.estimate()
        hits.append(holds(both, 128))
        widths.append(math.log(both.high / both.low) / math.log(alone.high / alone.low))
    assert np.mean(hits) >= 0.9
    assert np.mean(widths) < 0.9


def test_far_above_the_batch_a_bound_is_given_and_holds():
    rng, found = np.random.default_rng(1), []
    for _ in range(300):
        tracker = NoiseTracker(10_000)
        feed(tracker, "parts", 16, *sample_steps(rng, 4096, 16, 12))
        found.append(tracker.estimate())
    assert np.mean([estimate.high is None for estimate in found]) > 0.9
    assert np.mean([0 <= estimate.low <= 4096 for estimate in found]) >= 0.9
    assert np.median([estimate.low for estimate in found]) > 40  # and it says something
    assert str(found[0]).startswith("at least ")


def test_the_same_sequences_in_other_batches_give_about_the_same():
    rng = np.random.default_rng(2)
    mean = np.zeros(64)
    mean[0] = 1.0
    sequences = mean + rng.standard_normal((32_768, 64))  # noise scale 64
    values = []
    for batch in (32, 64, 256):
        parts = sequences.reshape(-1, 8, batch // 8, 64).sum(2)
        squares = (parts.sum(1) ** 2).sum(-1), (parts**2).sum((1, 2))
        tracker = NoiseTracker(20_000)
        feed(tracker, "parts", batch, *single_step(*squares, batch, batch**2 / 8, batch), chunk=4)
        assert holds(tracker.estimate(), 64)
        values.append(tracker.estimate().value)
    np.testing.assert_allclose(values, 64, rtol=0.1)


@pytest.mark.parametrize(("batch", "steps"), [(4, 32), (32, 4)])
def test_weights_fall_by_samples_and_not_by_steps(batch, steps):
    tracker = NoiseTracker(200)
    tracker.update("parts", 8, constant(16, 10.0))
    tracker.update("parts", batch, constant(steps, 20.0))
    old = math.exp(-128 / 200)
    assert tracker.estimate().value == pytest.approx((old * 10 + 20) / (old + 1))


def test_the_estimate_follows_a_change_within_four_windows():
    rng, tracker = np.random.default_rng(3), NoiseTracker(64 * 200)
    feed(tracker, "parts", 64, *sample_steps(rng, 32, 64, 600))
    assert tracker.estimate().value == pytest.approx(32, rel=0.15)
    feed(tracker, "parts", 64, *sample_steps(rng, 256, 64, 800))
    assert tracker.estimate().value == pytest.approx(256, rel=0.25)


@pytest.mark.parametrize("ratio", [1.4, 0.5])
@pytest.mark.parametrize("whole", ["parts", "probe"])
def test_norms_keep_the_proportion_when_the_whole_gradient_is_no_longer_seen(ratio, whole):
    rng, batch = np.random.default_rng(4), 64
    tracker = NoiseTracker(batch * 400)

    def see(noise, steps, every):
        for chunk in range(steps // 20):
            norms = sample_steps(rng, noise, batch, 20, parts=batch, ratio=ratio)
            feed(tracker, "norms", batch, *norms)
            if every and chunk % every == 0:
                parts, count = (8, 20) if whole == "parts" else (2, 4)
                feed(tracker, whole, batch, *sample_steps(rng, noise, batch, count, parts=parts))

    see(64, 3000, every=1)
    see(200, 1600, every=0)
    found = tracker.estimate()
    assert found.source == "norms, calibrated"
    assert found.value == pytest.approx(200, rel=0.2)
    assert holds(found, 200)
    see(200, 30_000, every=0)  # much later only the prior is left
    later = tracker.estimate()
    assert later.high / later.low > 3 > 1.5 * found.high / found.low
    assert later.value == pytest.approx(200 / ratio, rel=0.1)


def test_calibrated_intervals_hold_the_truth():
    rng, hits, calibrated = np.random.default_rng(7), [], 0
    for _ in range(200):
        tracker = NoiseTracker(64 * 200)
        for chunk in range(24):
            feed(tracker, "norms", 64, *sample_steps(rng, 100, 64, 25, parts=64, ratio=1.3))
            if chunk < 12:
                feed(tracker, "parts", 64, *sample_steps(rng, 100, 64, 25))
        found = tracker.estimate()
        hits.append(holds(found, 100))
        calibrated += found.source == "norms, calibrated"
    assert np.mean(hits) >= 0.9
    assert calibrated > 150


def test_norms_alone_have_the_interval_of_the_prior():
    tracker = NoiseTracker(1000)
    tracker.update("norms", 8, constant(100, 50.0))
    found = tracker.estimate()
    assert found.source == "norms, uncalibrated"
    assert found.value == pytest.approx(50, rel=1e-3)
    assert found.high / found.value == pytest.approx(1.4**1.96, rel=1e-2)
    assert found.value / found.low == pytest.approx(1.4**1.96, rel=1e-2)


@pytest.mark.parametrize("g", [0.1, -0.1])
def test_norms_alone_with_an_open_interval_have_a_lower_bound(g):
    whole, norms = NoiseTracker(1000), NoiseTracker(1000)
    for tracker, source in ((whole, "parts"), (norms, "norms")):
        tracker.update(source, 8, moments(*pairs(6, g, 0.3, 0.0)))
    found, bound = norms.estimate(), whole.estimate().low
    assert found.high is None
    assert 0.9 * bound * 1.4**-1.96 < found.low < bound


def test_a_proportion_from_little_data_lies_between_the_prior_and_them():
    values = []
    for sd, correlation in ((0.01, 0.0), (0.5, 0.9), (0.5, 0.0), (0.5, -0.9), (1.0, 0.0)):
        tracker = NoiseTracker(1000)
        for source, ratio in (("norms", 1), ("parts", 2)):
            s, g = pairs(20, 1.0, sd, correlation)
            tracker.update(source, 8, moments(ratio * s, g))
        for _ in range(2 * CALIBRATION_WINDOWS):  # as long as the pair is remembered, twice
            tracker.update("norms", 8, constant(125, 50.0))
        values.append(tracker.estimate().value)
        assert tracker.estimate().source == "norms, calibrated"
    assert values == sorted(values, reverse=True)
    assert 100 > values[0] > 90 > values[1]
    assert values[-1] > 52


def test_the_narrower_interval_is_taken():
    exact = constant(6, 50.0)
    for g in (0.02, 1.0):  # open and closed
        rough = moments(*pairs(6, g, 0.1, 0.0))
        for norms, whole, expected in ((rough, exact, "whole"), (exact, rough, "norms")):
            tracker = NoiseTracker(1000)
            tracker.update("norms", 8, norms)
            tracker.update("parts", 8, whole)
            assert tracker.estimate().source.startswith(expected)


def test_of_two_open_intervals_the_higher_bound_is_taken():
    wide, tight = pairs(6, 0.0, 1.0, 0.0), pairs(6, 0.0, 0.1, 0.0)
    for norms, whole, expected in ((wide, tight, "whole"), (tight, wide, "norms")):
        tracker = NoiseTracker(1000)
        tracker.update("norms", 8, moments(*norms))
        tracker.update("parts", 8, moments(*whole))
        assert tracker.estimate().source.startswith(expected)


def test_norms_before_the_whole_gradient_is_seen_do_not_enter_the_proportion_for_long():
    # Norms alone at 10 for 20 windows, then both kinds at 40: the proportion is 1.
    tracker = NoiseTracker(100)
    tracker.update("norms", 10, constant(200, 10.0))
    for _ in range(10):
        tracker.update("norms", 10, constant(10, 40.0))
        tracker.update("parts", 10, constant(10, 40.0))
    tracker.update("norms", 10, constant(100, 40.0))
    found = tracker.estimate()
    assert found.source == "norms, calibrated"
    assert found.value == pytest.approx(40, rel=0.1)


def test_a_whole_gradient_seen_long_ago_gives_way():
    tracker = NoiseTracker(100)
    tracker.update("parts", 10, constant(10, 40.0))
    assert tracker.estimate().source == "whole gradient"
    for _ in range(30):
        tracker.update("norms", 10, constant(10, 80.0, sd=0.3))
    assert tracker.estimate().source.startswith("norms")


def test_a_state_through_json_goes_on_bit_for_bit():
    rng, one = np.random.default_rng(8), NoiseTracker(3000.0)
    chunks = [
        (source, batch, moments(*sample_steps(rng, 50, batch, 7)))
        for batch in (16, 32, 64)
        for source in ("norms", "parts", "norms", "norms", "probe")
    ]
    for chunk in chunks[:8]:
        one.update(*chunk)
    two = NoiseTracker.from_state(json.loads(json.dumps(one.state())))
    for chunk in chunks[8:]:
        one.update(*chunk)
        two.update(*chunk)
    assert one.state() == two.state()
    assert one.estimate() == two.estimate()


def test_a_state_does_not_change_with_its_tracker():
    tracker = NoiseTracker(100)
    tracker.update("parts", 8, constant(4, 3.0))
    state, text = tracker.state(), json.dumps(tracker.state())
    NoiseTracker.from_state(state).update("norms", 8, constant(4, 3.0))
    tracker.update("norms", 8, constant(4, 3.0))
    assert json.dumps(state) == text


@pytest.mark.parametrize("field", Moments._fields)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_sums_that_are_not_finite_change_nothing(field, value):
    tracker = NoiseTracker(100)
    tracker.update("parts", 8, constant(4, 3.0))
    before = tracker.state()
    tracker.update("parts", 8, constant(4, 3.0)._replace(**{field: value}))
    tracker.update("norms", 8, Moments(0, 0, 0, 0, 0, 0))
    assert tracker.state() == before


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_the_scale_of_gradients_does_not_matter(factor):
    found = []
    for scale in (1.0, factor**2):
        rng, tracker = np.random.default_rng(9), NoiseTracker(10_000)
        for source in ("norms", "parts"):
            s, g = sample_steps(rng, 50, 32, 200)
            feed(tracker, source, 32, s * scale, g * scale)
        tracker.update("norms", 32, moments(*(scale * x for x in sample_steps(rng, 50, 32, 9))))
        found.append(tracker.estimate())
    for name in ("value", "low", "high", "steps"):
        assert getattr(found[0], name) == pytest.approx(getattr(found[1], name), rel=1e-9)


@pytest.mark.parametrize("sd", [0.0, 0.01, 1.0, 100.0])
@pytest.mark.parametrize("g", [-5.0, -1e-3, 0.0, 1e-3, 1.0])
@pytest.mark.parametrize("s", [-1.0, 0.0, 1e-3, 30.0])
@pytest.mark.parametrize("source", ["parts", "norms"])
def test_every_interval_is_in_order_and_not_below_0(source, s, g, sd):
    tracker = NoiseTracker(1000)
    tracker.update(source, 8, constant(20, s, g, sd))
    found = tracker.estimate()
    assert 0 <= found.low < math.inf
    assert (found.value is None) == (g <= 0)
    if g <= 0 or 1000 * sd <= g:
        assert (found.high is None) == (g <= 0)
    if found.high is not None:
        assert found.low <= found.value * (1 + 1e-9)
        assert found.value <= found.high * (1 + 1e-9)


def test_nothing_is_said_of_fewer_than_two_steps():
    tracker = NoiseTracker(100)
    assert tracker.estimate() is None
    tracker.update("parts", 8, constant(1, 3.0))
    assert tracker.estimate() is None
    tracker.update("parts", 8, constant(1, 3.0))
    assert tracker.estimate() is None  # the older step weighs less: 1.999 steps
    tracker.update("parts", 8, constant(1, 3.0))
    assert tracker.estimate() is not None


def test_an_estimate_reads_as_a_sentence():
    assert str(NoiseEstimate(128.2, 96.0, 181.4, "whole gradient", 9)) == "128 (96-181) sequences"
    assert str(NoiseEstimate(5.25, 4.0, 12.0, "whole gradient", 9)) == "5.2 (4.0-12) sequences"
    assert str(NoiseEstimate(None, 40.4, None, "whole gradient", 9)) == "at least 40 sequences"


@pytest.mark.parametrize("window", [0.0, -1.0, math.inf, math.nan])
def test_a_window_that_is_no_number_of_samples_is_refused(window):
    with pytest.raises(ValueError, match="use a finite one above 0"):
        NoiseTracker(window)
