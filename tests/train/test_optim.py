# SPDX-License-Identifier: Apache-2.0
"""Schedules and optimizers equal their closed forms."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from geojax.config import OptimizerConfig, ScheduleConfig
from geojax.train.optim import make_optimizer, make_schedule

PEAK = 3e-3


def rate(config, progress):
    return float(make_schedule(config, PEAK)(progress))


def decayed(config, progress):
    """Rate from the formula; no clamps, so within [0, 1] only."""
    warmup, final = config.warmup_fraction, config.final_fraction
    if progress < warmup:
        return PEAK * progress / warmup
    share = (progress - warmup) / (1 - warmup)
    if config.decay == "cosine":
        return PEAK * (final + (1 - final) * (1 + math.cos(math.pi * share)) / 2)
    return PEAK * (1 - share + final * share)


SCHEDULES = [
    ScheduleConfig(decay, warmup, final)
    for decay, final in (("cosine", 0.1), ("cosine", 0.0), ("linear", 0.25), ("constant", 1.0))
    for warmup in (0.0, 0.05, 0.5)
]


@pytest.mark.parametrize("config", SCHEDULES, ids=str)
@pytest.mark.parametrize("progress", [0.0, 0.01, 0.05, 0.3, 0.5, 0.77, 1.0])
def test_schedule_equals_its_formula(config, progress):
    # float32 keeps 7 digits; a rate near its end of 0 is a difference, so 1e-6 of the peak.
    expected = decayed(config, progress)
    assert rate(config, progress) == pytest.approx(expected, rel=1e-5, abs=1e-6 * PEAK)


@pytest.mark.parametrize("config", SCHEDULES, ids=str)
def test_schedule_stays_at_its_end(config):
    # The last round runs past the last token.
    for progress in (1.001, 1.5, 20.0):
        assert rate(config, progress) == pytest.approx(PEAK * config.final_fraction, abs=1e-9)


@pytest.mark.parametrize("config", SCHEDULES, ids=str)
def test_schedule_peaks_where_the_warmup_ends(config):
    assert rate(config, config.warmup_fraction) == pytest.approx(PEAK, rel=1e-5)
    assert rate(config, 0.0) == (0.0 if config.warmup_fraction else pytest.approx(PEAK, rel=1e-6))


def params():
    """A matrix, a table, and vectors, alone and stacked."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "blocks": {"mlp": {"up": draw(2, 3, 4)}, "mlp_norm": {"scale": draw(2, 3)}},
        "embed": draw(5, 3),
        "norm": {"scale": draw(3)},
    }


def leaves(tree):
    return {
        "matrix": tree["blocks"]["mlp"]["up"],
        "stacked vector": tree["blocks"]["mlp_norm"]["scale"],
        "table": tree["embed"],
        "vector": tree["norm"]["scale"],
    }


def directions(config, gradients):
    """Updates of the steps with these gradients at fixed parameters."""
    optimizer, tree = make_optimizer(config), params()
    state, out = optimizer.init(tree), []
    for gradient in gradients:
        update, state = optimizer.update(gradient, state, tree)
        out.append(leaves(update))
    return out


def gradients(count):
    rng = np.random.default_rng(1)
    base = params()
    return [optax.tree.scale(rng.uniform(-2, 2), base) for _ in range(count)]


DECAY = {"matrix": 0.1, "table": 0.1, "vector": 0.0, "stacked vector": 0.0}


def check(config, formula, steps=2):
    """`formula(g)`: arrays of one leaf's gradients -> its last direction before decay."""
    given = gradients(steps)
    found, own = directions(config, given)[-1], leaves(params())
    for name, direction in found.items():
        history = [np.asarray(leaves(g)[name], np.float64) for g in given]
        decay = config.weight_decay and DECAY[name] * np.asarray(own[name])
        # float32 arithmetic against float64.
        np.testing.assert_allclose(direction, formula(history) + decay, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_its_formula(weight_decay):
    def formula(history):
        m = v = 0.0
        for g in history:
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        t = len(history)
        return m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)

    check(OptimizerConfig(name="adamw", weight_decay=weight_decay), formula, steps=1)
    check(OptimizerConfig(name="adamw", weight_decay=weight_decay), formula, steps=3)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lion_equals_its_formula(weight_decay):
    def formula(history):
        m = 0.0
        for g in history:
            direction, m = np.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g
        return direction

    check(OptimizerConfig(name="lion", weight_decay=weight_decay), formula, steps=1)
    check(OptimizerConfig(name="lion", weight_decay=weight_decay), formula, steps=3)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_equals_its_formula(momentum, nesterov):
    def formula(history):
        trace = 0.0
        for g in history:
            trace = g + momentum * trace
        return g + momentum * trace if nesterov else trace

    config = OptimizerConfig("sgd", momentum=momentum, nesterov=nesterov, weight_decay=0.1)
    check(config, formula, steps=3)


def test_given_decays_replace_the_defaults():
    def formula(history):
        (g,) = history
        return g / (np.abs(g) + 1e-8)  # bias correction makes the first step of Adam a sign

    check(OptimizerConfig(name="adamw", b1=0.5, b2=0.5), formula, steps=1)
    slow, fast = (
        directions(OptimizerConfig(name="adamw", b1=b1), gradients(3))[-1]["matrix"]
        for b1 in (0.9, 0.0)
    )
    assert np.abs(slow - fast).max() > 0.1


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_the_learning_rate_is_left_to_the_caller(name):
    one, two = (
        directions(OptimizerConfig(name=name, learning_rate=r), gradients(2))[-1] for r in (1e-4, 7)
    )
    for leaf, direction in one.items():
        np.testing.assert_array_equal(direction, two[leaf])
