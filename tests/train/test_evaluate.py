# SPDX-License-Identifier: Apache-2.0
"""Held-out loss is the mean over loss-bearing tokens, whatever the batches and devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from geojax.data import Batch
from geojax.meshes.axes import data_mesh
from geojax.models.config import TransformerConfig
from geojax.models.transformer import init_params, make_apply
from geojax.train.evaluate import make_evaluate
from geojax.train.step import make_loss

MODEL = TransformerConfig(vocab_size=13, dim=8, layers=1, heads=2, kv_heads=1, mlp_dim=12)
LENGTH = 6
APPLY = make_apply(MODEL)


@pytest.fixture(scope="module")
def params():
    return jax.device_get(init_params(MODEL, 0))


def sequences(rows):
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, MODEL.vocab_size, (2, rows, LENGTH), np.int32)
    weights = (np.arange(LENGTH) < rng.integers(0, LENGTH, (rows, 1))).astype(np.float32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (rows, 1))
    return Batch(tokens, targets, weights, np.zeros_like(tokens), positions)


def cut(batch, size):
    rows = len(batch.tokens)
    return [Batch(*(x[i : i + size] for x in batch)) for i in range(0, rows, size)]


def padded(batch, rows):
    """With rows of weight 0 after it, whose tokens are as good as any."""
    extra = rows - len(batch.tokens)
    other = Batch(*(np.repeat(x[:1], extra, 0) for x in batch))
    other.weights[:] = 0
    return Batch(*(np.concatenate(pair) for pair in zip(batch, other, strict=True)))


def evaluate(params, batches, devices=1):
    mesh = data_mesh(jax.devices()[:devices])
    return make_evaluate(make_loss(APPLY, "float32"), mesh)(params, batches)


def test_loss_equals_the_mean_of_the_tokens_in_float64(params):
    batch = sequences(8)
    logits = APPLY(params, batch.tokens, batch.positions, batch.segments)
    exponentials = np.exp(np.asarray(logits, np.float64))
    chosen = np.take_along_axis(exponentials, batch.targets[..., None], -1)[..., 0]
    nats = (-np.log(chosen / exponentials.sum(-1)) * batch.weights).sum()
    tokens = batch.weights.sum()
    for size in (8, 4):  # batches have unequal numbers of tokens: a mean of means would differ
        result = evaluate(params, cut(batch, size))
        assert result.loss == pytest.approx(nats / tokens, rel=1e-6)  # float32 sums of a batch
        assert result.perplexity == math.exp(result.loss)
        assert result.tokens == tokens


def test_padded_rows_have_no_effect(params):
    plain, filled = (evaluate(params, [b]) for b in (sequences(5), padded(sequences(5), 8)))
    assert filled.tokens == plain.tokens
    assert filled.loss == pytest.approx(plain.loss, rel=1e-6)


def test_four_devices_equal_one(params):
    batches = cut(padded(sequences(13), 16), 8)
    one, four = (evaluate(params, batches, devices) for devices in (1, 4))
    assert four.tokens == one.tokens
    assert four.loss == pytest.approx(one.loss, rel=1e-6)


def test_a_loss_beyond_floating_point_has_an_infinite_perplexity():
    def loss(params, batch):
        return params * jnp.sum(batch.weights), jnp.sum(batch.weights)

    result = make_evaluate(loss, data_mesh(jax.devices()[:1]))(np.float32(1e4), [sequences(2)])
    assert (result.loss, result.perplexity) == (1e4, math.inf)
