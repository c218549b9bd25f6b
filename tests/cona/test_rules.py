# SPDX-License-Identifier: Apache-2.0
"""Learning-rate rules keep what each of them promises to keep, and refuse contradictions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geojax.cona.rules import beta2_for, rate_factor
from geojax.config.rate import RateRule

BASE = 32
TABLE = ((16, 0.6), (64, 1.5), (256, 3.0))
batches = st.integers(1, 2**14)
noises = st.floats(0, 1e9)


def table(*entries: tuple[int, float]) -> RateRule:
    return RateRule("table", BASE, table=entries)


@given(noises)
@pytest.mark.parametrize("kind", ["linear", "sqrt", "adascale"])
@pytest.mark.parametrize("cap", [False, True])
def test_the_base_batch_keeps_the_configs_rate(kind, cap, noise):
    rule = RateRule(kind, BASE, cap=cap and kind != "adascale")
    assert rate_factor(rule, BASE, noise) == 1


@given(batches, noises)
def test_linear_is_the_square_of_sqrt_capped_or_not(batch, noise):
    for cap in (False, True):
        linear, root = (
            rate_factor(RateRule(k, BASE, cap), batch, noise) for k in ("linear", "sqrt")
        )
        assert linear == pytest.approx(root**2)
    assert rate_factor(RateRule("linear", BASE), batch, noise) == batch / BASE


@pytest.mark.parametrize(
    ("noise", "factor"), [(0, 1), (8, 1), (32, 1), (64, 2), (100, 3.125), (256, 8), (1e4, 8)]
)
def test_a_cap_stops_growth_at_the_noise_scale_and_never_below_the_base(noise, factor):
    assert rate_factor(RateRule("linear", BASE, cap=True), 256, noise) == factor


@given(st.integers(1, BASE), noises)
def test_a_cap_leaves_batches_below_the_base_alone(batch, noise):
    assert rate_factor(RateRule("linear", BASE, cap=True), batch, noise) == batch / BASE


@given(batches, st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_adascale_is_the_published_gain(batch, variance, squared_norm):
    # The variance is of gradients over base batches, so noise = base_batch x variance / norm².
    gain = (variance + squared_norm) / (variance * BASE / batch + squared_norm)
    noise = BASE * variance / squared_norm
    assert rate_factor(RateRule("adascale", BASE), batch, noise) == pytest.approx(gain, rel=1e-12)


@given(batches)
def test_adascale_goes_from_1_without_noise_to_linear_with_nothing_else(batch):
    rule = RateRule("adascale", BASE)
    assert rate_factor(rule, batch, 0) == 1
    assert rate_factor(rule, batch, math.inf) == batch / BASE
    assert rate_factor(rule, batch, 1e15) == pytest.approx(batch / BASE, rel=1e-9)


def test_a_table_is_met_at_its_entries_straight_between_and_held_beyond():
    rule = table(*TABLE)
    for batch, factor in TABLE:
        assert rate_factor(rule, batch, 7.0) == pytest.approx(factor)
    # 32 lies halfway between 16 and 64 on a log scale.
    assert rate_factor(rule, 32, 7.0) == pytest.approx(math.sqrt(0.6 * 1.5))
    assert rate_factor(rule, 1, 7.0) == pytest.approx(0.6)
    assert rate_factor(rule, 4096, 7.0) == pytest.approx(3.0)


@given(batches, noises)
def test_tables_of_the_formulas_give_the_formulas(batch, noise):
    # Linear and sqrt are straight lines in log batch and log factor.
    for kind, power in (("linear", 1), ("sqrt", 0.5)):
        rule = table(*((b, (b / BASE) ** power) for b in (1, 100, 2**14)))
        expected = rate_factor(RateRule(kind, BASE), batch, noise)
        assert rate_factor(rule, batch, noise) == pytest.approx(expected)


@given(batches, st.floats(0.5, 0.9999))
def test_beta2_keeps_its_half_life_in_samples(batch, beta2):
    def half_life_samples(beta2: float, batch: int) -> float:
        return batch * math.log(0.5) / math.log(beta2)

    scaled = beta2_for(beta2, batch, BASE)
    if scaled > 1e-300:  # below, its logarithm is of a rounded number
        assert half_life_samples(scaled, batch) == pytest.approx(half_life_samples(beta2, BASE))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kind": "cubic"}, "'cubic' is none of table, linear"),
        ({"kind": "linear", "base_batch": 0}, "base_batch 0 must be at least 1"),
        ({"kind": "adascale", "cap": True}, "cap .* 'adascale'"),
        ({"kind": "table", "cap": True, "table": TABLE}, "cap .* 'table'"),
        ({"kind": "sqrt", "table": TABLE}, r"'sqrt' reads no table, given \(\(16, 0\.6\)"),
        ({"kind": "table"}, r"table \(\); give"),
        ({"kind": "table", "table": ((0, 1.0),)}, "batch 0 must be at least 1"),
        ({"kind": "table", "table": ((8, 1.0), (8, 2.0))}, "increase, and 8 follows 8"),
        ({"kind": "table", "table": ((8, 1.0), (4, 2.0))}, "increase, and 4 follows 8"),
        ({"kind": "table", "table": ((8, 0.0),)}, r"factor 0\.0 at batch 8"),
        ({"kind": "table", "table": ((8, math.inf),)}, "factor inf at batch 8"),
        ({"kind": "table", "table": ((8, math.nan),)}, "factor nan at batch 8"),
    ],
)
def test_contradictions_are_refused_by_value(arguments, named):
    with pytest.raises(ValueError, match=named):
        RateRule(**{"base_batch": BASE, **arguments})


@pytest.mark.parametrize("kind", ["linear", "sqrt", "adascale"])
@pytest.mark.parametrize(
    ("batch", "noise", "named"),
    [(0, 1.0, "batch 0 "), (8, -2.5, r"noise scale -2\.5 "), (8, math.nan, "noise scale nan ")],
)
def test_steps_that_are_none_are_refused_by_value(kind, batch, noise, named):
    with pytest.raises(ValueError, match=named):
        rate_factor(RateRule(kind, BASE), batch, noise)
