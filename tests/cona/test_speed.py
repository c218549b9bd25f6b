# SPDX-License-Identifier: Apache-2.0
"""Timed steps correct predictions, most of all those of strategies like the timed one."""

import json
import math

import numpy as np
import pytest

from geojax.cona.speed import COMMON_SD, OWN_SHARE, SpeedBelief

ERROR = 0.4
PREDICTED = {"a1": 1.0, "a2": 2.0, "b1": 1.5, "b2": 3.0, "c1": 0.5}
FAMILIES = {name: name[0] for name in PREDICTED}


def belief(**timed):
    found = SpeedBelief(PREDICTED, FAMILIES, ERROR)
    for name, seconds in timed.items():
        for _ in range(20):
            found.observe(name, seconds)
    return found


def test_untimed_predictions_keep_their_ratios_and_their_doubt():
    found = belief().of(list(PREDICTED), "a1")
    np.testing.assert_allclose(found.seconds, list(PREDICTED.values()))
    own = OWN_SHARE * ERROR
    assert found.sd[0] == 0
    assert found.sd[1] == pytest.approx(math.sqrt(2) * own)  # of the same family
    assert found.sd[2] == pytest.approx(math.hypot(math.sqrt(2) * ERROR, math.sqrt(2) * own))
    assert not any(found.timed + found.family_timed)


def test_a_slow_machine_is_slow_for_all():
    found = belief(a1=7.0).of(list(PREDICTED), "a1")
    for name, seconds in zip(PREDICTED, found.seconds, strict=True):
        assert seconds / PREDICTED[name] == pytest.approx(7, rel=0.1)
    assert found.timed == [True, False, False, False, False]
    assert found.family_timed == [True, True, False, False, False]


def test_a_timed_strategy_is_known_and_its_family_nearly():
    # Family b takes three times what was predicted, family a what was.
    found = belief(a1=1.0, b1=4.5).of(["a2", "b1", "b2", "c1"], "a1")
    assert found.seconds[0] == pytest.approx(2.0, rel=0.05)
    assert found.seconds[1] == pytest.approx(4.5, rel=0.02)
    assert found.seconds[2] == pytest.approx(9.0, rel=0.1)
    assert found.sd[1] < 0.05 < found.sd[0] < found.sd[3]


def test_families_that_agree_lower_the_doubt_about_others_and_those_that_do_not_raise_it():
    alone, agreeing, apart = (
        belief(**timed).of(["c1"], "a1").sd[0]
        for timed in ({"a1": 1.0}, {"a1": 1.0, "b1": 1.5}, {"a1": 1.0, "b1": 6.0})
    )
    assert agreeing < alone < apart


def test_a_machine_that_changes_is_followed():
    found = belief(a1=1.0)
    for _ in range(200):
        found.observe("a1", 2.0)
    assert found.of(["a1"], "a1").seconds[0] == pytest.approx(2.0, rel=0.01)


def test_times_that_scatter_say_less():
    steady, shaky = belief(), belief()
    for i in range(40):
        steady.observe("a1", 1.0)
        shaky.observe("a1", 1.5 if i % 2 else 1 / 1.5)
    for found in (steady, shaky):
        for _ in range(3):
            found.observe("b1", 1.5)
    doubt = [found.of(["b1"], "a1").sd[0] for found in (steady, shaky)]
    assert doubt[1] > 3 * doubt[0]


def test_it_is_the_posterior_of_that_prior():
    """Against conditioning the joint normal distribution directly, by its precision."""
    found, names = belief(a1=1.2, b2=2.5), list(PREDICTED)
    between, own = found._deviations()
    prior = np.array(
        [
            [
                COMMON_SD**2 + between**2 * (FAMILIES[a] == FAMILIES[b]) + own**2 * (a == b)
                for b in names
            ]
            for a in names
        ]
    )
    precision = np.linalg.inv(prior)
    score = np.zeros(len(names))
    state = found.state()
    for name, (residual, rounds) in state["timed"].items():
        i, weight = names.index(name), rounds / state["scatter"][0]
        precision[i, i] += weight
        score[i] += weight * residual
    covariance = np.linalg.inv(precision)
    got = found.of(names, "c1")
    expected = np.exp(covariance @ score) * list(PREDICTED.values())
    np.testing.assert_allclose(got.seconds, expected, rtol=1e-6)
    apart = np.diag(covariance) + covariance[-1, -1] - 2 * covariance[:, -1]
    np.testing.assert_allclose(got.sd**2, apart, atol=1e-8)


def test_its_state_goes_through_json():
    found, again = belief(a1=1.1, b1=1.7), belief()
    again.restore(json.loads(json.dumps(found.state())))
    np.testing.assert_array_equal(again.of(["b2"], "a1").seconds, found.of(["b2"], "a1").seconds)
