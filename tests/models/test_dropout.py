# SPDX-License-Identifier: Apache-2.0
"""Elements are dropped at their rate, apart from each other, and alike however they are parted."""

import math
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import random_params

from geojax.models.attention import attend
from geojax.models.config import TransformerConfig
from geojax.models.dropout import (
    ATTENTION,
    EMBEDDING,
    MLP,
    PROBABILITIES,
    SITES,
    Dropout,
    drop_probs,
    drop_rows,
)
from geojax.models.transformer import Inputs, Transformer

SAMPLES = np.array([3, 4, 2**32 - 1], np.uint32)
SHAPE = (len(SAMPLES), 32, 64)  # of rows
PROBS = (len(SAMPLES), 4, 32, 32)


def dropout(step=0, samples=SAMPLES, layer=1):
    return Dropout(jax.random.fold_in(jax.random.key(0), step), jnp.asarray(samples), layer)


def rows_kept(rate=0.3, site=MLP, **where):
    return np.asarray(drop_rows(jnp.ones(SHAPE), rate, dropout(**where), site, 0)) > 0


def assert_rate(hits, rate):
    """Within 5 standard deviations of a binomial: wrong once in two million."""
    spread = math.sqrt(rate * (1 - rate) / hits.size)
    assert abs(hits.mean() - rate) < 5 * spread, f"{hits.mean()}, not {rate}"


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_elements_are_dropped_at_the_rate_and_the_rest_is_scaled(rate):
    rng = np.random.default_rng(0)
    for shape, drop in (
        (SHAPE, lambda x: drop_rows(x, rate, dropout(), ATTENTION, 0)),
        (PROBS, lambda x: drop_probs(x, rate, dropout(), 0)),
    ):
        x = rng.uniform(1, 2, shape).astype(np.float32)
        y = np.asarray(drop(x))
        assert_rate(y == 0, rate)
        np.testing.assert_allclose(y[y != 0], (x / (1 - rate))[y != 0], rtol=1e-6)


@pytest.mark.parametrize("axes", [(0, 1), (0, 2), (1, 2)])
def test_no_row_column_or_sequence_is_favoured(axes):
    shares = rows_kept(0.5).mean(axes)
    spread = math.sqrt(0.25 / (math.prod(SHAPE) / shares.size))
    assert np.abs(shares - 0.5).max() < 5 * spread
    assert shares.std() > spread / 3  # and no mask is repeated along them


WHERE = {
    "step": {"step": 1},
    "layer": {"layer": 2},
    "deeper layer": {"layer": SITES + 1},
    "sample": {"samples": SAMPLES + np.uint32(2)},
    "attention": {"site": ATTENTION},
    "embedding": {"site": EMBEDDING, "layer": 0},
}


def test_masks_of_different_places_agree_as_often_as_chance_would():
    masks = [rows_kept(0.5), *(rows_kept(0.5, **where) for where in WHERE.values())]
    masks += list(masks[0])  # sequences of one batch, against each other
    for a, b in combinations(masks, 2):
        if a.shape == b.shape:
            assert_rate(a == b, 0.5)
    heads = np.asarray(drop_probs(jnp.ones(PROBS), 0.5, dropout(), 0)) > 0
    for a, b in combinations(heads.reshape(-1, *PROBS[2:]), 2):
        assert_rate(a == b, 0.5)


def test_every_site_of_every_layer_has_a_key_of_its_own():
    places = [(0, EMBEDDING), *product(range(1, 9), (PROBABILITIES, ATTENTION, MLP))]
    keys = [jax.random.key_data(dropout(layer=layer).at(site)).tolist() for layer, site in places]
    flat = [tuple(key) for place in keys for key in place]
    assert len(set(flat)) == len(places) * len(SAMPLES)


def test_the_same_place_drops_the_same_again():
    np.testing.assert_array_equal(rows_kept(), rows_kept())
    traced = jax.jit(lambda layer: drop_rows(jnp.ones(SHAPE), 0.3, dropout(layer=layer), MLP, 0))
    np.testing.assert_array_equal(traced(1) > 0, rows_kept())


def test_parts_drop_what_the_whole_drops():
    # Elsewhere what is dropped depends on the number of partitions.
    rng = np.random.default_rng(0)
    x, p = (rng.random(shape, np.float32) for shape in (SHAPE, PROBS))
    whole = drop_rows(x, 0.3, dropout(), MLP, 0)
    rows = np.split(x, 4, 1)
    size = rows[0].shape[1]
    split = [drop_rows(part, 0.3, dropout(), MLP, i * size) for i, part in enumerate(rows)]
    np.testing.assert_array_equal(np.concatenate(split, 1), whole)

    whole = drop_probs(p, 0.3, dropout(), 0)
    heads = np.split(p, 2, 1)
    size = heads[0].shape[1]
    split = [drop_probs(part, 0.3, dropout(), i * size) for i, part in enumerate(heads)]
    np.testing.assert_array_equal(np.concatenate(split, 1), whole)

    each = [dropout(samples=SAMPLES[i : i + 1]) for i in range(len(SAMPLES))]
    alone = [drop_rows(x[i : i + 1], 0.3, d, MLP, 0) for i, d in enumerate(each)]
    np.testing.assert_array_equal(np.concatenate(alone), drop_rows(x, 0.3, dropout(), MLP, 0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_masks_are_the_same_in_every_dtype(dtype):
    with jax.enable_x64(True):
        kept = drop_rows(jnp.ones(SHAPE, dtype), 0.3, dropout(), MLP, 0)
        assert kept.dtype == dtype
        np.testing.assert_array_equal(kept > 0, rows_kept())


def test_nothing_is_dropped_at_rate_0_or_without_a_key():
    x = jnp.ones(SHAPE)
    assert drop_rows(x, 0.0, dropout(), MLP, 0) is x
    assert drop_rows(x, 0.5, None, MLP, 0) is x
    assert drop_probs(x, 0.0, dropout(), 0) is x


def test_gradients_are_dropped_where_elements_are():
    grad = jax.grad(lambda x: drop_rows(x, 0.3, dropout(), MLP, 0).sum())(jnp.ones(SHAPE))
    np.testing.assert_allclose(grad, rows_kept() / 0.7, rtol=1e-6)


# --- in the model ---


class Recorded(Dropout):
    """Remembers which sites of which layers were asked for."""

    asked: list

    def at(self, site):
        Recorded.asked.append((self.layer, site))
        return super().at(site)


@pytest.mark.parametrize("family", ["llama", "gpt", "bert"])
def test_a_model_drops_once_at_every_site(family):
    config = TransformerConfig(
        16, 8, 3, 2, 2, 8, True, family, 8, dropout=0.5, attention_dropout=0.5
    )
    model = Transformer(config)
    params = jax.tree.map(lambda x: x.astype(np.float32), random_params(config))
    tokens = np.zeros((len(SAMPLES), 4), np.int32)
    positions = np.tile(np.arange(4, dtype=np.int32), (len(SAMPLES), 1))
    Recorded.asked = []
    inputs = Inputs(positions, None, Recorded(*dropout(layer=0)))
    x = model.embed(params, tokens, inputs, "float32")
    assert (np.asarray(x) == 0).mean() == pytest.approx(0.5, abs=0.2)
    rotary = model.rotary(inputs)
    for i in range(config.layers):
        weights = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        x = model.layer(weights, x, i, rotary, inputs)
    sites = (PROBABILITIES, ATTENTION, MLP)
    assert Recorded.asked == [(0, EMBEDDING), *product(range(1, config.layers + 1), sites)]


def test_probabilities_are_dropped_before_values_are_mixed():
    rng = np.random.default_rng(0)
    b, t, h = len(SAMPLES), 6, 4
    q = rng.standard_normal((b, t, h, t)).astype(np.float32)
    k = rng.standard_normal((b, t, 2, t)).astype(np.float32)
    v = np.broadcast_to(np.eye(t, dtype=np.float32)[:, None], (b, t, 2, t)).copy()
    # Values that name their position make of the output the probabilities themselves.
    probs, dropped = (
        np.swapaxes(attend(q, k, v, None, True, drop), 1, 2)
        for drop in (None, lambda p: drop_probs(p, 0.4, dropout(), 0))
    )
    np.testing.assert_allclose(dropped, drop_probs(probs, 0.4, dropout(), 0), atol=1e-6)
    assert (dropped == 0).sum() > (probs == 0).sum()
