# SPDX-License-Identifier: Apache-2.0
"""Loss and gradient are those of one device, whatever the strategy."""

from dataclasses import replace
from functools import partial
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import (
    LENGTH,
    MODELS,
    ONE,
    QUICK,
    ROWS,
    filled,
    jitted,
    learnt,
    loss_and_gradient,
    norms,
    placed,
    random_batch,
    random_params,
)

from geojax.meshes.rules import vocab_axes
from geojax.meshes.strategy import Strategy, parse_strategy, problems
from geojax.models.transformer import make_apply

LAYOUTS = [(dp, tp, 8 // dp // tp) for dp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if dp * tp <= 8]
# Adding floats in another order costs 1e-13 of sums this large; a share lost or counted twice
# costs 1e-2.
TOLERANCE = 1e-9


@pytest.fixture(autouse=True, scope="module")
def _x64():
    with jax.enable_x64(True):
        yield


def matrix():
    """(name, strategy) for every model, layout of 8 devices, number of micro-batches from the
    stages to 8 and number of chunks; what remains of a strategy is drawn for each."""
    rng, found = np.random.default_rng(0), []
    for (name, model), (dp, tp, pp) in product(MODELS.items(), LAYOUTS):
        for count, interleave in product(range(pp, 9), (1, 2, 4)):
            micro = 1 if dp == 8 else int(rng.integers(1, 3))
            remat = str(rng.choice(["none", "matmuls", "full"]))
            sharding = str(rng.choice(["none", "optimizer", "all"])) if dp > 1 else "none"
            s = Strategy(dp, tp, pp, micro, dp * micro * count, interleave, remat, sharding)
            if not problems(s, model):
                found.append((name, s))
    return found


def traits(case):
    """What a case tries: its layout, and pairs of choices."""
    name, s = case
    count = {s.pp: "fewest", 8: "most"}.get(s.micro_batches, "between")
    choices = (name, s.tp > 1, s.pp > 1, s.interleave > 1, s.remat, s.sharding)
    return {*combinations(enumerate(choices), 2), (s.dp, s.tp, s.pp), (s.pp, s.interleave), count}


def cover(cases):
    """The fewest cases that greed finds to try every pair that any case tries."""
    wanted, chosen = set().union(*map(traits, cases)), []
    while wanted:
        best = max(cases, key=lambda case: len(traits(case) & wanted))
        chosen.append(best)
        wanted -= traits(best)
    return chosen


MATRIX = matrix()
# Compiling one takes seconds; tied and untied, shared and separate key heads are among these.
COVER = cover([case for case in MATRIX if case[0] in ("gpt", "bert", "llama", "dream")])
SHORT = COVER[:5]  # those that try most, which come first


def marked(case):
    name, s = case
    marks = () if case in SHORT else pytest.mark.full
    return pytest.param(name, s, id=f"{name}-{s}", marks=marks)


def assert_equals_one_device(model, strategy):
    batch = random_batch(model, strategy.micro_batches, strategy.dp * strategy.micro_batch)
    sums, grads = loss_and_gradient(model, strategy, batch)
    expected_sums, expected = loss_and_gradient(model, ONE, filled(batch))
    assert sums[1] == expected_sums[1] == batch.weights.sum()
    assert abs(sums[0] - expected_sums[0]) < TOLERANCE
    assert min(learnt(norms(expected))) > 1e-2
    assert_close(grads, expected)


def assert_close(grads, expected):
    worst = norms(grads, expected)
    assert max(worst.values()) < TOLERANCE, worst


def assert_sum_of_micro_batches(model, strategy, batch, length, sums, grads):
    """A mean over micro-batches, or a mean of their means, would not add up so."""
    counts = batch.weights.sum((1, 2))
    assert len(set(counts)) > 2
    assert 0 in counts
    parts = []
    for i in range(strategy.micro_batches):
        weights = np.zeros_like(batch.weights)
        weights[i] = batch.weights[i]
        part = batch._replace(weights=weights)
        parts.append(loss_and_gradient(model, strategy, part, length=length))
        assert (max(norms(parts[-1][1]).values()) > 0) == (counts[i] > 0)
    assert np.sum([s for s, _ in parts], 0) == pytest.approx(sums, abs=TOLERANCE)
    assert_close(jax.tree.map(lambda *leaves: sum(leaves), *(g for _, g in parts)), grads)


@pytest.mark.parametrize(("name", "strategy"), [marked(case) for case in MATRIX])
def test_every_strategy_equals_one_device(name, strategy):
    assert_equals_one_device(MODELS[name], strategy)


def test_cases_try_every_pair_of_choices():
    assert len(COVER) <= 40
    assert {(s.dp, s.tp, s.pp) for _, s in MATRIX} == set(LAYOUTS)
    assert {(s.pp, s.micro_batches) for _, s in MATRIX} == {
        (pp, m) for pp in (1, 2, 4, 8) for m in range(pp, 9)
    }


def plain_loss(model, params, batch):
    """Cross-entropy as one writes it down, summed over all loss-bearing tokens; one device."""
    flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch)
    logits = make_apply(model)(params, flat.tokens, flat.positions, flat.segments, "float64")
    scores = jax.nn.log_softmax(logits)
    return -jnp.sum(flat.weights * jnp.take_along_axis(scores, flat.targets[..., None], -1)[..., 0])


# Six layers, so that stages can be three and share no vocabulary of 256 rows; 15 tokens do not
# divide by tp, so each device has the whole residual stream.
ODD = {
    "gpt-untied": ("dp1-tp2-pp3-mb2-gb8", 15, ("tp",)),
    "bert": ("dp2-tp4-pp1-mb1-gb8-fsdp", 15, ("tp",)),
    "llama": ("dp2-tp1-pp3x2-mb2-gb12-zero-matmuls", LENGTH, ()),
}


@pytest.mark.parametrize("name", ODD)
def test_uneven_strategies_equal_a_loss_written_down_plainly(name):
    text, length, axes = ODD[name]
    strategy = parse_strategy(text)
    model = replace(MODELS[name], layers=6, dropout=0.0, attention_dropout=0.0)
    assert problems(strategy, model) == []
    assert vocab_axes(model, strategy) == axes
    assert (length % strategy.tp == 0) == (length == LENGTH)

    params = random_params(model)
    batch = random_batch(model, strategy.micro_batches, strategy.dp * strategy.micro_batch, length)
    plain = jax.jit(jax.value_and_grad(partial(plain_loss, model)), compiler_options=QUICK)
    nats, expected = plain(params, batch)
    sums, grads = loss_and_gradient(model, strategy, batch, length=length)
    assert sums == (pytest.approx(float(nats), abs=TOLERANCE), batch.weights.sum())
    assert min(learnt(norms(expected))) > 1e-2
    assert_close(grads, expected)

    # The loss of an evaluation, which drops nothing, is the same function.
    on, _, loss = jitted(model, strategy, length)
    found = tuple(float(x.sum()) for x in loss(*placed(on, params, batch)))
    assert found == pytest.approx(sums, abs=TOLERANCE)
    assert_sum_of_micro_batches(model, strategy, batch, length, sums, grads)


def test_what_is_dropped_follows_from_the_key_and_the_sample():
    model = MODELS["gpt"]
    batch = random_batch(model, 8, 8)
    (nats, _), _ = loss_and_gradient(model, ONE, batch)
    (other, _), _ = loss_and_gradient(model, ONE, batch, seed=1)
    assert abs(other - nats) > 1
    # In another order, in other micro-batches, sequences drop what they dropped before.
    order = np.random.default_rng(0).permutation(ROWS)
    mixed = jax.tree.map(lambda x: x.reshape(ROWS, *x.shape[2:])[order].reshape(x.shape), batch)
    assert loss_and_gradient(model, ONE, mixed)[0][0] == pytest.approx(nats, abs=TOLERANCE)
    renumbered = batch._replace(samples=batch.samples[::-1])
    assert abs(loss_and_gradient(model, ONE, renumbered)[0][0] - nats) > 1
    on, _, loss = jitted(model, ONE)
    assert abs(float(loss(*placed(on, random_params(model), batch)).nats.sum()) - nats) > 1
