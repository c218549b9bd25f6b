# SPDX-License-Identifier: Apache-2.0
"""Scores against a slow reference: one pair at a time, logits of every place, no padding."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from geojax.choice import rows
from geojax.choice.causal import pack
from geojax.choice.diffusion import masks
from geojax.choice.likelihood import autoregressive, masked
from geojax.choice.pairs import Pair
from geojax.config import ConfigError
from geojax.models.config import TransformerConfig
from geojax.models.transformer import abstract_params, make_apply

LLAMA = TransformerConfig(
    vocab_size=50, dim=16, layers=2, heads=4, kv_heads=2, mlp_dim=24, context=40
)
GPT = TransformerConfig(
    vocab_size=50, dim=16, layers=2, heads=2, kv_heads=2, mlp_dim=24, tied=True,
    family="gpt", context=40,
)  # fmt: skip
LLADA = TransformerConfig(
    vocab_size=50, dim=16, layers=2, heads=2, kv_heads=2, mlp_dim=24, context=40,
    bidirectional=True,
)  # fmt: skip
DREAM = TransformerConfig(
    vocab_size=50, dim=16, layers=2, heads=4, kv_heads=2, mlp_dim=24, context=40,
    bidirectional=True, qkv_bias=True, shifted=True,
)  # fmt: skip
MASK = 49


@cache
def params_of(config):
    """Far from uniform, and no two alike."""
    rng = np.random.default_rng(0)
    draw = lambda leaf: rng.normal(0, 0.4, leaf.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, abstract_params(config))


def pairs(lengths, seed=0, vocab=49):
    rng = np.random.default_rng(seed)
    return [Pair(*(rng.integers(0, vocab, n).astype(np.int32) for n in both)) for both in lengths]


@cache
def plain(config):
    return jax.jit(make_apply(config))


def logs(config, params, tokens):
    """Log-probabilities [t, V] of one sequence, by the model's plain program."""
    found = plain(config)(params, jnp.asarray(tokens)[None], jnp.arange(len(tokens))[None])
    return np.asarray(jax.nn.log_softmax(found[0]), np.float64)


def slow_causal(config, params, pair):
    tokens = np.concatenate(pair)[:-1]
    seen = logs(config, params, tokens)[len(pair.context) - 1 :]
    best = (seen.argmax(1) == pair.continuation).all()
    return seen[np.arange(len(seen)), pair.continuation].sum(), best


def slow_diffusion(config, params, pair, samples):
    total = 0.0
    for mask, weight in masks(pair.context, len(pair.continuation), samples):
        hidden = np.where(mask, MASK, pair.continuation)
        seen = logs(config, params, np.concatenate([pair.context, hidden]))
        for j in np.flatnonzero(mask):
            row = len(pair.context) + j - config.shifted
            total += weight * seen[row, pair.continuation[j]]
    return total


@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_causal_scores_are_those_of_one_pair_at_a_time(config):
    params = params_of(config)
    asked = pairs([(5, 3), (7, 1), (1, 7)] + [(30, 11)] * (config is LLAMA))
    # Four continuations of one context, one of them another's beginning.
    context = asked[0].context
    asked += [Pair(context, p.continuation) for p in pairs([(1, 3), (1, 3)], seed=1)]
    asked += [Pair(context, asked[-1].continuation[:1])]
    found = autoregressive(config, params)(asked)
    for answer, pair in zip(found, asked, strict=True):
        log, best = slow_causal(config, params, pair)
        assert answer.log == pytest.approx(log, rel=1e-5)  # float32, sums of up to 11 terms
        assert answer.greedy == best
        assert answer.cut == 0


def test_what_the_model_says_itself_is_greedy():
    params = params_of(LLAMA)
    tokens = np.array([7, 3, 20, 0, 0, 0, 0], np.int32)
    for place in range(3, 7):
        tokens[place] = logs(LLAMA, params, tokens)[place - 1].argmax()
    other = tokens.copy()
    other[5] = (other[5] + 1) % 49
    first, second = autoregressive(LLAMA, params)([Pair(x[:3], x[3:]) for x in (tokens, other)])
    assert first.greedy
    assert not second.greedy
    assert first.log > second.log


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_diffusion_scores_are_those_of_the_same_masks_one_at_a_time(config):
    params = params_of(config)
    asked = pairs([(5, 3), (1, 7), (7, 1)])
    found = masked(config, params, MASK, 6)(asked)
    for answer, pair in zip(found, asked, strict=True):
        assert answer.log == pytest.approx(slow_diffusion(config, params, pair, 6), rel=1e-5)


def test_order_company_and_buckets_change_nothing(monkeypatch):
    params = params_of(DREAM)
    asked = pairs([(5, 3), (1, 1), (20, 3)])
    score = masked(DREAM, params, MASK, 4)
    together = [answer.log for answer in score(asked)]
    np.testing.assert_allclose([a.log for a in score(asked[::-1])[::-1]], together, rtol=1e-5)
    monkeypatch.setattr(rows, "HEAD_ROWS", 3)
    one_row_at_once = masked(DREAM, params, MASK, 4, batch_tokens=1)
    found = [answer.log for answer in one_row_at_once(asked)]
    np.testing.assert_allclose(found, together, rtol=1e-5)


def test_rows_of_one_context_are_split_where_they_grow_too_long(monkeypatch):
    monkeypatch.setattr("geojax.choice.causal.ROW_TOKENS", 20)
    context = np.arange(10, dtype=np.int32)
    asked = [Pair(context, np.arange(n, dtype=np.int32)) for n in (5, 5, 30, 2)]
    packed, owners = pack(asked)
    assert [len(row.tokens) for row in packed] == [18, 39, 11]
    assert [[i for i, _ in owner] for owner in owners] == [[0, 1], [2], [3]]
    assert all(len(row.reads) == len(row.targets) for row in packed)


def test_contexts_are_cut_from_the_left_and_counted():
    params = params_of(LLAMA)
    (long,) = pairs([(60, 4)])
    (found,) = autoregressive(LLAMA, params)([long])
    # 40 inputs: the last of 41 tokens is predicted only.
    kept = Pair(long.context[-37:], long.continuation)
    assert found.cut == 23
    assert found.log == pytest.approx(slow_causal(LLAMA, params, kept)[0], rel=1e-5)
    params = params_of(LLADA)
    (found,) = masked(LLADA, params, MASK, 3)([long])
    kept = Pair(long.context[-36:], long.continuation)
    assert found.cut == 24
    assert found.log == pytest.approx(slow_diffusion(LLADA, params, kept, 3), rel=1e-5)


def test_the_bound_is_one_in_expectation():
    """Over all masks it is the sum over k and all subsets of k, whatever the draws."""
    params = params_of(LLADA)
    (pair,) = pairs([(5, 3)])
    exact = 0.0
    for k in (1, 2, 3):
        subsets = list(itertools.combinations(range(3), k))
        for subset in subsets:
            mask = np.isin(np.arange(3), subset)
            hidden = np.concatenate([pair.context, np.where(mask, MASK, pair.continuation)])
            seen = logs(LLADA, params, hidden)
            own = sum(seen[5 + j, pair.continuation[j]] for j in subset)
            exact += own * (3 / k) / len(subsets) / 3
    (found,) = masked(LLADA, params, MASK, 3000)([pair])
    assert found.log == pytest.approx(exact, rel=0.02)  # 3,000 draws of values that differ by half


def test_masks_are_fixed_and_shared_by_choices_of_a_context():
    context = np.arange(6, dtype=np.int32)
    drawn = masks(context, 5, 8)
    again = masks(context.astype(np.int64), 5, 8)
    assert [(m.tolist(), w) for m, w in drawn] == [(m.tolist(), w) for m, w in again]
    other = masks(context + 1, 5, 8)
    assert [m.tolist() for m, _ in drawn] != [m.tolist() for m, _ in other]
    # Every number of hidden tokens as often as any, since there are as many parts as numbers.
    counts = np.zeros(5)
    for mask, weight in masks(context, 5, 500):
        counts[mask.sum() - 1] += weight * mask.sum() / 5
    np.testing.assert_allclose(counts, 0.2, atol=1e-9)
    # One token has one mask, and needs no second look.
    (only,) = masks(context, 1, 32)
    assert only[0].tolist() == [True]
    assert only[1] == pytest.approx(1)


def test_no_place_is_hidden_more_often_than_others():
    hidden = np.zeros(4)
    for c in range(300):
        for mask, weight in masks(np.array([c], np.int32), 4, 4):
            hidden += weight * mask
    # Each token counts once in expectation: 1,200 draws with a spread of about 1.
    np.testing.assert_allclose(hidden / 300, 1, atol=0.1)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([1, 2], []), "has no token; give one with text"),
        (([], [1, 2]), "a context has no token"),
        (([1], [1] * 41), "has 41 tokens"),
    ],
)
def test_pairs_that_cannot_be_scored_are_refused(pair, message):
    with pytest.raises(ConfigError, match=message):
        autoregressive(LLAMA, params_of(LLAMA))([Pair(*(np.array(x, np.int32) for x in pair))])


def test_the_wrong_kind_of_model_is_refused():
    with pytest.raises(ConfigError, match="score it by diffusion"):
        autoregressive(LLADA, {})
    with pytest.raises(ConfigError, match="fills no masks"):
        masked(LLAMA, {}, MASK, 4)
    with pytest.raises(ConfigError, match="samples 0 must be at least 1"):
        masked(LLADA, {}, MASK, 0)
