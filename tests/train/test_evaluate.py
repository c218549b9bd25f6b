# SPDX-License-Identifier: Apache-2.0
"""Held-out loss is the mean over loss-bearing tokens, whatever the batches and devices."""

import math
from functools import cache

import jax
import numpy as np
import pytest

from geojax.config import ConfigError, TrainConfig
from geojax.data import Batch
from geojax.meshes.gradient import SequenceSums
from geojax.meshes.strategy import Strategy
from geojax.models.config import TransformerConfig
from geojax.models.transformer import init_params, make_apply
from geojax.train.evaluate import summarize
from geojax.train.program import Program, Task

MODEL = TransformerConfig(vocab_size=13, dim=8, layers=1, heads=2, kv_heads=1, mlp_dim=12)
LENGTH = 6
TRAIN = TrainConfig(total_tokens=1, compute_dtype="float32")


@pytest.fixture(scope="module")
def params():
    return jax.device_get(init_params(MODEL, 0))


def sequences(rows):
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, MODEL.vocab_size, (2, rows, LENGTH), np.int32)
    weights = (np.arange(LENGTH) < rng.integers(0, LENGTH, (rows, 1))).astype(np.float32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (rows, 1))
    samples = np.arange(rows, dtype=np.uint32)
    return Batch(tokens, targets, weights, np.zeros_like(tokens), positions, samples)


def cut(batch, size):
    rows = len(batch.tokens)
    return [Batch(*(x[i : i + size] for x in batch)) for i in range(0, rows, size)]


def padded(batch, rows):
    """With rows of weight 0 after it, whose tokens are as good as any."""
    extra = rows - len(batch.tokens)
    other = Batch(*(np.repeat(x[:1], extra, 0) for x in batch))
    other.weights[:] = 0
    return Batch(*(np.concatenate(pair) for pair in zip(batch, other, strict=True)))


@cache
def program(devices):
    strategy = Strategy(devices, 1, 1, 1, devices)
    return Program(Task(MODEL, TRAIN, LENGTH), strategy, jax.devices()[:devices])


def evaluate(params, batch, rows, devices=1):
    """Over the sequences of `batch`, `rows` of them at once."""
    steps = program(devices)
    return steps.evaluate(steps.put_params(params), lambda b: cut(batch, b), rows)


def sums(nats, tokens):
    return SequenceSums(np.array([nats], np.float32), np.array([tokens], np.float32))


def test_loss_equals_the_mean_of_the_tokens_in_float64(params):
    batch = sequences(8)
    logits = make_apply(MODEL)(params, batch.tokens, batch.positions, batch.segments)
    exponentials = np.exp(np.asarray(logits, np.float64))
    chosen = np.take_along_axis(exponentials, batch.targets[..., None], -1)[..., 0]
    nats = (-np.log(chosen / exponentials.sum(-1)) * batch.weights).sum()
    tokens = batch.weights.sum()
    for size in (8, 4):  # batches have unequal numbers of tokens: a mean of means would differ
        result = evaluate(params, batch, size)
        assert result.loss == pytest.approx(nats / tokens, rel=1e-6)  # float32 sums of a batch
        assert result.perplexity == math.exp(result.loss)
        assert result.tokens == tokens


def test_padded_rows_have_no_effect(params):
    plain, filled = (
        evaluate(params, b, len(b.tokens)) for b in (sequences(5), padded(sequences(5), 8))
    )
    assert filled.tokens == plain.tokens
    assert filled.loss == pytest.approx(plain.loss, rel=1e-6)


def test_four_devices_equal_one(params):
    batch = padded(sequences(13), 16)
    one, four = (evaluate(params, batch, 8, devices) for devices in (1, 4))
    assert four.tokens == one.tokens
    assert four.loss == pytest.approx(one.loss, rel=1e-6)


def test_batches_are_raised_to_what_the_mesh_divides(params):
    asked = []

    def batches(rows):
        asked.append(rows)
        return cut(padded(sequences(5), 8), rows)

    steps = program(4)
    result = steps.evaluate(steps.put_params(params), batches, 5)
    assert asked == [8]
    assert result.loss == pytest.approx(evaluate(params, sequences(5), 5).loss, rel=1e-6)


def test_the_mean_is_of_tokens_and_not_of_batches():
    result = summarize([sums([6.0], [2.0]), sums([2.0], [6.0])])
    assert (result.loss, result.perplexity, result.tokens) == (1.0, math.e, 8)


def test_the_standard_error_covers_the_true_mean():
    rng = np.random.default_rng(0)
    covered, tries = 0, 400
    for _ in range(tries):
        tokens = rng.integers(20, 40, 50).astype(float)
        nats = tokens * rng.normal(3, 0.5, 50)  # sequences differ, and their lengths too
        result = summarize([sums(nats, tokens)])
        covered += abs(result.loss - 3) < 2 * result.standard_error
    # 95 % by theory; the binomial's deviation is 1.1 %.
    assert 0.9 < covered / tries < 0.99


def test_draws_of_a_sequence_count_as_one():
    rng = np.random.default_rng(0)
    nats, tokens = rng.random(6), np.array([1.0, 2, 3, 4, 5, 0])
    once = summarize([sums(nats, tokens)])
    twice = summarize([sums(nats[:3], tokens[:3]), sums(nats[3:], tokens[3:])] * 2, draws=2)
    assert twice == once
    assert twice.tokens == 15
    # Two unlike draws of each: their mean.
    unlike = summarize([sums(nats * 0.5, tokens), sums(nats * 1.5, tokens)], draws=2)
    assert unlike == pytest.approx(once)


def test_a_loss_beyond_floating_point_has_an_infinite_perplexity():
    result = summarize([sums([4e4], [4])])
    assert (result.loss, result.perplexity) == (1e4, math.inf)


def test_held_out_text_without_a_loss_is_refused():
    with pytest.raises(ConfigError, match=r"no held-out token .* raise data\.valid_fraction"):
        summarize([sums([0.0], [0.0])])
