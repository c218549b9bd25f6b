# SPDX-License-Identifier: Apache-2.0
"""What a step draws and how many positions it fills."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.config import ConfigError
from geojax.diffusion.choose import (
    POLICIES,
    Draws,
    Reading,
    _gumbel,
    fill,
    guide,
    read,
    scheduled_count,
    steps_of_block,
)
from geojax.diffusion.request import Request, SamplingConfig, check, prompt
from geojax.models.config import get_model

NOTHING = np.zeros(5, bool)


def draws(rows, policy="confidence", temperature=0.0, seed=0):
    return Draws(
        jnp.full(rows, POLICIES.index(policy)),
        jnp.full(rows, temperature, jnp.float32),
        jnp.full(rows, seed, jnp.uint32),
    )


reading = jax.jit(read)


def read_once(logits, policy="confidence", temperature=0.0, seed=0, step=0, forbidden=NOTHING):
    logits = jnp.asarray(logits, jnp.float32)
    rows, width = logits.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    how = draws(rows, policy, temperature, seed)
    return reading(logits, forbidden, how, jnp.full(rows, step), positions)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_frequencies_are_the_softmax(temperature):
    logits = np.array([2.0, 1.0, 0.0, -1.0, -6.0])
    count = 20_000
    tokens = read_once(np.tile(logits, (1, count, 1)), temperature=temperature).token[0]
    expected = np.exp(logits / temperature)
    expected *= count / expected.sum()
    found = np.bincount(tokens, minlength=5)
    # Chi-square of 4 degrees of freedom: above 23.5 once in ten thousand.
    assert ((found - expected) ** 2 / expected).sum() < 23.5


def test_noise_has_a_whole_tail():
    """Noise of 23 bits, which is usual, has 51 values above 12; as many draws would collide."""
    keys = jax.random.split(jax.random.key(0), 8)
    noise = np.asarray(jax.jit(jax.vmap(lambda key: _gumbel(key, 2**20)))(keys))
    tail = noise[noise > 12]
    assert 20 < len(tail) < 100
    assert len(set(tail.tolist())) == len(tail)


def test_at_temperature_0_the_likeliest_token_is_taken_and_the_first_of_equals():
    logits = np.array([[[0, 3, 3, 1, 2], [5, 0, 0, 0, 5]]])
    for seed in range(3):
        assert read_once(logits, seed=seed).token.tolist() == [[1, 0]]


def test_forbidden_tokens_are_never_chosen():
    forbidden = np.array([False, True, False, True, False])
    logits = np.tile([0.0, 50.0, 0.0, 50.0, 0.0], (1, 5000, 1))
    for temperature in (0.0, 1.0, 50.0):
        found = set(
            read_once(logits, temperature=temperature, forbidden=forbidden).token[0].tolist()
        )
        assert found <= {0, 2, 4}
        assert temperature == 0 or found == {0, 2, 4}
    # Nor do they take from the others' probability.
    score = read_once(logits, forbidden=forbidden).score
    np.testing.assert_allclose(score, 1 / 3, rtol=1e-6)


def test_draws_depend_on_seed_step_and_position_and_not_on_the_row():
    logits = np.zeros((3, 40, 5))
    first = read_once(logits, temperature=1.0)
    assert (first.token == first.token[0]).all()
    for other in (
        read_once(logits, temperature=1.0, seed=1),
        read_once(logits, temperature=1.0, step=1),
    ):
        assert (other.token != first.token).any()
    alone = read_once(logits[:1, :7], temperature=1.0)
    np.testing.assert_array_equal(alone.token[0], first.token[0, :7])


def test_scores_are_as_published():
    logits = np.array([[[1.0, 0.5, 0.0, -1.0, -2.0]]])
    p = np.exp(logits[0, 0]) / np.exp(logits[0, 0]).sum()
    hot = np.exp(logits[0, 0] / 2) / np.exp(logits[0, 0] / 2).sum()
    found = read_once(logits, "confidence", temperature=2.0, seed=3)
    np.testing.assert_allclose(found.score[0, 0], p[found.token[0, 0]], rtol=1e-5)
    np.testing.assert_allclose(
        read_once(logits, "margin", temperature=2.0).score[0, 0], hot[0] - hot[1], rtol=1e-5
    )
    np.testing.assert_allclose(
        read_once(logits, "entropy", temperature=2.0).score[0, 0],
        (hot * np.log(hot)).sum(),
        rtol=1e-5,
    )
    np.testing.assert_allclose(read_once(logits, "margin").score[0, 0], p[0] - p[1], rtol=1e-5)


def fill_once(policy, scores, masked, threshold=0.9, scheduled=1, chance=0.5):
    found = Reading(jnp.zeros((1, len(scores)), jnp.int32), jnp.array([scores]))
    now = fill(
        found,
        jnp.array([masked], bool),
        jnp.array([POLICIES.index(policy)]),
        jnp.array([threshold]),
        jnp.array([scheduled]),
        jnp.array([chance]),
    )
    return np.flatnonzero(now[0]).tolist()


def test_the_best_masked_positions_are_filled():
    scores, masked = [0.2, 0.9, 0.95, 0.5, 0.9], [1, 1, 0, 1, 1]
    for policy in ("confidence", "margin", "entropy"):
        assert fill_once(policy, scores, masked, scheduled=2) == [1, 4]
        assert fill_once(policy, scores, masked, scheduled=3) == [1, 3, 4]
        assert fill_once(policy, scores, masked, scheduled=9) == [0, 1, 3, 4]
    assert fill_once("threshold", scores, masked, 0.85) == [1, 4]
    assert fill_once("threshold", scores, masked, 0.99) == [1]  # the best one always
    assert fill_once("threshold", scores, [0] * 5, 0.1) == []
    assert fill_once("origin", [-0.2, -0.6, -0.1, -0.4, -0.9], masked) == [0, 3]


@settings(deadline=None)
@given(masks=st.integers(1, 40), steps=st.integers(1, 60))
def test_a_blocks_steps_fill_all_its_masks_as_evenly_as_can_be(masks, steps):
    steps = min(steps, masks)
    counts = [int(scheduled_count(masks, steps, i)) for i in range(steps)]
    assert sum(counts) == masks
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@settings(deadline=None)
@given(blocks=st.lists(st.integers(1, 30), min_size=1, max_size=9), steps=st.integers(1, 100))
def test_steps_of_blocks_add_up(blocks, steps):
    left, steps_left, shares = sum(blocks), min(steps, sum(blocks)), []
    for masks in blocks:
        shares.append(int(steps_of_block(steps_left, left, masks)))
        left, steps_left = left - masks, steps_left - shares[-1]
    assert all(1 <= s <= m for s, m in zip(shares, blocks, strict=True))
    if steps >= sum(blocks) or all(m * steps >= sum(blocks) for m in blocks):
        assert sum(shares) == min(steps, sum(blocks))


def test_what_is_no_number_is_filled_last_and_does_not_stop_the_others():
    scores = [0.2, float("nan"), 0.9, float("nan")]
    assert fill_once("confidence", scores, [1, 1, 1, 1], scheduled=2) == [0, 2]
    assert fill_once("confidence", scores, [1, 1, 0, 1], scheduled=2) == [0, 1]
    assert fill_once("threshold", [float("nan")] * 4, [0, 1, 1, 1]) == [1]


def test_origin_fills_each_position_at_any_step_alike():
    """With n steps, each position is filled in each of them with chance 1 / n."""
    steps, width = 4, 2000
    left = np.ones(width, bool)
    for step in range(steps):
        logits = np.zeros((1, width, 5))
        now = fill(
            read_once(logits, "origin", step=step),
            jnp.asarray(left[None]),
            jnp.array([POLICIES.index("origin")]),
            jnp.array([0.9]),
            jnp.array([0]),
            jnp.array([1 / (steps - step)]),
        )[0]
        share = float(now.mean())
        assert abs(share - 1 / steps) < 5 * np.sqrt(0.25 * 0.75 / width)
        left &= ~np.asarray(now)
    assert not left.any()


def test_guidance_is_its_formula():
    given, blind = np.random.default_rng(0).normal(size=(2, 2, 3, 5)).astype(np.float32)
    found = guide(given, blind, np.array([0.0, 1.5], np.float32))
    np.testing.assert_allclose(found[0], given[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], 2.5 * given[1] - 1.5 * blind[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "best"}, "'best' is none of"),
        ({"policy": "threshold", "steps": 5}, "steps 5 mean nothing"),
        ({"threshold": 0.5}, "goes with policy 'threshold' only"),
        ({"temperature": -1}, r"temperature -1 must be 0, .* or lie in \[0\.001, 100\)"),
        ({"temperature": float("nan")}, "temperature nan must be 0"),
        ({"temperature": 2e-38}, "temperature 2e-38 must be 0"),
        ({"steps": -1}, "steps -1 must be at least 0"),
        ({"seed": -1}, "seed -1 must lie in"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**fields)


@pytest.mark.parametrize(
    ("name", "request_", "message"),
    [
        ("llada-tiny", Request([1, 2, 3]), "no token is the mask, 511"),
        ("llada-tiny", Request([512, 511]), r"token 512 is not in 0\.\.511"),
        ("llada-tiny", Request([-1, 511]), r"token -1 is not in 0\.\.511"),
        ("llada-tiny", Request([]), r"shape \(0,\)"),
        ("llada-tiny", Request([1.5, 2.5]), "give a list of ids"),
        ("dream-tiny", Request([511, 1]), "the first token is masked"),
        ("llada-8b", prompt([1], 5000, 126_336), "context is 4096; shorten"),
    ],
)
def test_requests_that_a_model_cannot_fill_are_refused(name, request_, message):
    config = get_model(name)
    with pytest.raises(ConfigError, match=message):
        check(request_, config, min(config.vocab_size - 1, 126_336))


def test_a_canvas_without_tokens_is_refused():
    with pytest.raises(ConfigError, match="0 new tokens were asked for"):
        prompt([1], 0, 511)
