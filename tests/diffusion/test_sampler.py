# SPDX-License-Identifier: Apache-2.0
"""The batched sampler against a slow one, and what a request may not depend on."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from geojax.config import ConfigError, RunError
from geojax.diffusion.blocks import by_block
from geojax.diffusion.choose import POLICIES
from geojax.diffusion.forward import hidden
from geojax.diffusion.request import Request, SamplingConfig, masks, prompt
from geojax.diffusion.sampler import Sampler
from geojax.models.config import TransformerConfig, get_model
from geojax.models.transformer import Transformer, init_params, make_apply

MASK, VOCAB = 31, 32
LLADA = TransformerConfig(
    vocab_size=VOCAB, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=48, bidirectional=True
)
DREAM = replace(LLADA, qkv_bias=True, shifted=True)


@cache
def params(config):
    tree = init_params(config, 1)
    # Larger weights, so that what a row sees matters to what it says.
    return jax.tree.map(lambda x: x * 2.5 if x.ndim > 2 else x, tree)


@cache
def sampler(config=LLADA, end_ids=(), dtype=jnp.float32):
    forbidden = np.arange(VOCAB) == MASK
    return Sampler(Transformer(config), params(config), MASK, forbidden, end_ids, dtype)


@cache
def apply(config):
    return jax.jit(make_apply(config))


def logits_of(config, tokens):
    """[n, vocab] that predict each token, one sequence alone and nothing padded."""
    tokens = jnp.asarray(tokens)[None]
    places = jnp.arange(tokens.shape[1])[None]
    found = np.asarray(apply(config)(params(config), tokens, places), np.float64)[0]
    return np.concatenate([found[:1], found[:-1]]) if config.shifted else found


def noise_of(seed, step, position):
    """Of a position in a step: what is added to its logits to draw a token, and a uniform place."""
    key = jax.random.key(np.uint32(seed))
    for number in (step, position):
        key = jax.random.fold_in(key, number)
    token, place = (jax.random.fold_in(key, i) for i in (0, 1))
    gumbel = jax.random.gumbel(token, (LLADA.padded_vocab,), jnp.float32, mode="high")
    return np.asarray(gumbel[:VOCAB], np.float64), float(jax.random.uniform(place))


def slow(config, request, end_ids=()):
    """One request, one step at a time, as the papers tell it. Yields after each step."""
    ask = request.sampling
    tokens = np.array(request.tokens)
    places = np.flatnonzero(tokens == MASK)
    places = places[places >= request.begin]
    first, last = places[0], places[-1] + 1
    steps, size = min(ask.steps or len(places), len(places)), ask.block or last - first
    warm, taken = ask.temperature, 0
    for begin in range(first, last, size):
        end = min(begin + size, last)
        masks, left = (int((tokens[begin:stop] == MASK).sum()) for stop in (end, last))
        if not masks:
            continue
        share = min(max(int(steps * masks / left), 1), masks)
        step = 0
        while (tokens[begin:end] == MASK).any():
            found = logits_of(config, tokens)
            if ask.guidance:
                blind = tokens.copy()
                blind[:first], blind[last:] = MASK, MASK
                other = logits_of(config, blind)
                found = other + (1 + ask.guidance) * (found - other)
            found[:, MASK] = -np.inf
            hidden_ = np.flatnonzero(tokens[begin:end] == MASK) + begin
            noise = {int(i): noise_of(ask.seed, taken, i) for i in hidden_}
            drawn = found.argmax(-1)
            for i in hidden_ if warm else ():
                drawn[i] = (found[i] / warm + noise[i][0]).argmax()
            likely = softmax(found)[np.arange(len(found)), drawn]
            probs = softmax(found / (warm or 1))
            best = np.sort(probs, -1)[:, ::-1]
            score = {
                "confidence": likely,
                "threshold": likely,
                "margin": best[:, 0] - best[:, 1],
                "entropy": np.sum(probs * np.log(np.where(probs > 0, probs, 1)), -1),
                "origin": np.array([-noise[i][1] if i in noise else 0 for i in range(len(found))]),
            }[ask.policy]
            count = masks // share + (step < masks % share)
            if ask.policy == "origin":
                count = int((-score[hidden_] < 1 / max(share - step, 1)).sum())
            if ask.policy == "threshold":
                count = max(int((score[hidden_] >= ask.threshold).sum()), 1)
            chosen = hidden_[np.argsort(-score[hidden_], kind="stable")[:count]]
            tokens[chosen] = drawn[chosen]
            step, steps, taken = step + 1, steps - 1, taken + 1
            yield tokens.copy()
            left = np.flatnonzero(tokens[first:] == MASK)
            border = first + left[0] if len(left) else last
            if request.ends and np.isin(tokens[first:border], end_ids).any():
                return


def softmax(logits):
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    return probs / probs.sum(-1, keepdims=True)


ROWS = [
    prompt([1, 2, 3], 20, MASK, SamplingConfig(steps=9, block=8)),
    prompt([4] * 17, 13, MASK, SamplingConfig(block=5, policy="margin")),
    prompt([9, 8, 7, 6, 5], 11, MASK, SamplingConfig(block=0, steps=4, policy="entropy")),
    prompt([11, 12], 30, MASK, SamplingConfig(block=16, policy="threshold", threshold=0.3)),
    prompt([13], 7, MASK, SamplingConfig(steps=1, block=4)),
    Request([3, MASK, 5, 6, MASK, MASK, 7, 8, MASK, 2], SamplingConfig(block=3)),
    # One mask, then many far from it: steps go by masks.
    Request([1, MASK, *[4] * 20, *[MASK] * 9, 2], SamplingConfig(block=8, steps=8)),
    # The blanks at 2 and 5 stay.
    Request([1, 2, MASK, 4, 5, MASK, *[MASK] * 9], SamplingConfig(block=4, steps=5), begin=6),
    prompt([2, 4, 6], 17, MASK, SamplingConfig(block=7, steps=8, policy="origin", seed=3)),
    prompt([7], 12, MASK, SamplingConfig(block=6, steps=7, temperature=0.7, seed=4)),
    prompt([7, 7], 9, MASK, SamplingConfig(policy="entropy", temperature=1.5, seed=2**32 - 1)),
]


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
@pytest.mark.parametrize("row", range(len(ROWS)))
def test_a_batch_equals_the_slow_sampler_row_by_row(config, row):
    states = list(slow(config, ROWS[row]))
    answer = together(config)[row]
    np.testing.assert_array_equal(answer.tokens, states[-1])
    assert answer.steps == len(states)
    assert MASK not in answer.tokens[ROWS[row].begin :]


@cache
def together(config):
    return sampler(config).sample(ROWS)


def test_guidance_equals_the_slow_sampler():
    strengths = (1.5, 0.0, 0.7)
    rows = [
        replace(row, sampling=replace(row.sampling, guidance=g))
        for row, g in zip(ROWS[:3], strengths, strict=True)
    ]
    for row, answer in zip(rows, sampler().sample(rows), strict=True):
        *_, expected = slow(LLADA, row)
        np.testing.assert_array_equal(answer.tokens, expected)


def test_tokens_a_step_are_as_scheduled():
    request = prompt([1, 2], 23, MASK, SamplingConfig(steps=10, block=8))
    left = []
    sampler().sample([request], lambda p: left.append(int((p.tokens[0] == MASK).sum())), 1)
    # Blocks of 8, 8, 7 have floor(10 * 8 / 23) = 3, floor(7 * 8 / 15) = 3, and the last 4 steps.
    assert -np.diff([23, *left]) == pytest.approx([3, 3, 2, 3, 3, 2, 2, 2, 2, 1])


def test_given_tokens_stay_whatever_is_filled_between_them():
    request = ROWS[5]
    (answer,) = sampler().sample([request])
    given = np.array(request.tokens) != MASK
    np.testing.assert_array_equal(answer.tokens[given], np.array(request.tokens)[given])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_the_batch_its_order_or_padding(temperature):
    rows = [
        replace(r, sampling=replace(r.sampling, temperature=temperature, seed=i))
        for i, r in enumerate([*ROWS, prompt([5] * 90, 9, MASK)])
    ]
    batch = sampler().sample(rows)
    backwards = sampler().sample(rows[::-1])[::-1]
    for i, (a, b) in enumerate(zip(batch, backwards, strict=True)):
        others = [b, *sampler().sample(rows[i : i + 1])] if i in (0, 5, 7) else [b]
        for other in others:
            np.testing.assert_array_equal(other.tokens, a.tokens)
            assert other.steps == a.steps


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_teacher_forced_logits_do_not_depend_on_batch_padding_or_order(config):
    rows = [[1, 2, 3, MASK, 5, MASK], [4, MASK, 6, 6, MASK, 1], list(range(30))]
    model = Transformer(config)

    @jax.jit
    def run(params, tokens, length):
        return model.logits(params, hidden(model, params, tokens, length, jnp.float32))

    def together(order, count, width):
        tokens, length = np.zeros((count, width), np.int32), np.ones(count, np.int32)
        for place, i in enumerate(order):
            tokens[place, : len(rows[i])], length[place] = rows[i], len(rows[i])
        found = np.asarray(run(params(config), tokens, length))
        assert np.isfinite(found[..., :VOCAB]).all()
        return {i: found[place, : len(rows[i]), :VOCAB] for place, i in enumerate(order)}

    batch, backwards = together([0, 1, 2], 4, 64), together([2, 1, 0], 3, 32)
    for i, row in enumerate(rows):
        alone = np.asarray(
            apply(config)(params(config), np.array([row]), np.arange(len(row))[None])
        )
        for found in (batch[i], backwards[i]):
            np.testing.assert_allclose(found, alone[0, :, :VOCAB], atol=1e-4)


def test_seeds_differ_and_repeat():
    rows = [prompt([1, 2], 20, MASK, SamplingConfig(temperature=1.0, seed=s)) for s in (0, 1, 0)]
    a, b, again = sampler().sample(rows)
    np.testing.assert_array_equal(a.tokens, again.tokens)
    assert (a.tokens != b.tokens).any()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_calls_number_of_steps_does_not_matter(policy):
    request = prompt([1, 2, 3], 12, MASK, SamplingConfig(block=5, policy=policy))
    one, many = (sampler().sample([request], steps_a_call=n)[0] for n in (1, 50))
    np.testing.assert_array_equal(one.tokens, many.tokens)
    assert one.steps == many.steps


@cache
def ending():
    """A request, what it is answered, and a token of the middle of its answer: an end-of-text."""
    request = prompt([1, 2], 20, MASK, SamplingConfig(block=4))
    (whole,) = sampler().sample([request])
    return request, whole, int(whole.new[9])


def test_end_of_text_stops_a_row_and_no_other():
    request, whole, end = ending()
    seen = []
    other = replace(ROWS[0], ends=False)
    ended, free = sampler(end_ids=(end,)).sample(
        [request, other], lambda p: seen.append(p.tokens[0]), 1
    )
    assert ended.ended
    assert end not in ended.new
    np.testing.assert_array_equal(ended.tokens, whole.tokens[: len(ended.tokens)])
    assert whole.tokens[len(ended.tokens)] == end
    assert ended.steps == len(list(slow(LLADA, request, (end,)))) < whole.steps
    np.testing.assert_array_equal(free.tokens, together(LLADA)[0].tokens)
    # Later masks stay as they are: nothing more was computed for that row.
    assert MASK in seen[-1][: len(request.tokens)]


def test_an_end_of_text_between_given_tokens_ends_nothing():
    request, _, end = ending()
    tokens = [*request.tokens, 3]
    (answer,) = sampler(end_ids=(end,)).sample([Request(tokens, request.sampling)])
    assert MASK not in answer.tokens
    assert len(answer.tokens) == len(tokens)
    assert len(answer.new) == 20


def test_progress_names_what_will_not_change():
    filled, tokens = [], []

    def see(progress):
        filled.append(int(progress.filled[0]))
        tokens.append(progress.tokens[0].copy())

    (answer,) = sampler().sample([ROWS[0]], see, 1)
    assert filled == sorted(filled)
    assert filled[-1] == len(ROWS[0].tokens)
    for border, seen in zip(filled, tokens, strict=True):
        np.testing.assert_array_equal(seen[:border], answer.tokens[:border])


@pytest.mark.parametrize("steps_a_call", [1, 50])
def test_blocks_are_told_once_in_order_and_make_up_the_answer(steps_a_call):
    rows = [
        *ROWS[:3],
        Request([5, MASK, 6, *[MASK] * 6, 7, MASK, MASK, 8], SamplingConfig(block=4)),
    ]
    told = {i: [] for i in range(len(rows))}
    on_step = by_block(rows, MASK, lambda i, begin, tokens: told[i].append((begin, tokens.copy())))
    answers = sampler().sample(rows, on_step, steps_a_call)
    for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        places = np.flatnonzero(masks(row, MASK))
        first, end, block = places[0], places[-1] + 1, row.sampling.block or len(row.tokens)
        assert [begin for begin, _ in told[i]] == list(range(first, end, block))
        joined = np.concatenate([tokens for _, tokens in told[i]])
        np.testing.assert_array_equal(joined, answer.tokens[first:end])


def test_blocks_end_with_the_end_of_text():
    request, whole, end = ending()
    told = []
    on_step = by_block([request], MASK, lambda i, begin, tokens: told.append(tokens.copy()))
    (answer,) = sampler(end_ids=(end,)).sample([request], on_step, 1)
    joined = np.concatenate(told)
    np.testing.assert_array_equal(joined[: len(answer.new)], answer.new)
    assert joined[len(answer.new)] == end
    assert MASK not in joined
    assert len(told) < len(whole.new) / request.sampling.block


def test_one_step_for_each_mask_wherever_they_are():
    tokens = np.full(40, 5)
    tokens[[0, 20, 21, 22, 39]] = MASK
    (answer,) = sampler().sample([Request(tokens, SamplingConfig(block=4))])
    assert answer.steps == 5


@cache
def broken():
    """A sampler of a model one of whose logits is no number."""
    head = params(LLADA)["head"].at[5].set(jnp.inf)
    return replace(sampler(), params=params(LLADA) | {"head": head})


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_that_are_no_numbers_are_an_error_whatever_the_policy(policy):
    rows = [prompt([1, 2], 5, MASK, SamplingConfig(policy=policy, temperature=t)) for t in (0, 1)]
    with pytest.raises(RunError, match="request 0 of the batch: the model's logits are not finite"):
        broken().sample(rows)


def test_models_and_masks_that_do_not_fit_are_refused():
    llama = get_model("llama-tiny")
    with pytest.raises(ConfigError, match="a causal llama predicts the next token"):
        Sampler(Transformer(llama), {}, 511, np.arange(512) == 511)
    with pytest.raises(ConfigError, match=r"mask id 3 must be in .* and forbidden"):
        Sampler(Transformer(LLADA), {}, 3, np.arange(VOCAB) == MASK)
    with pytest.raises(ConfigError, match="forbidden has shape"):
        Sampler(Transformer(LLADA), {}, 3, np.zeros(4, bool))
    with pytest.raises(ConfigError, match="no request"):
        sampler().sample([])
