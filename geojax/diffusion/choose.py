# SPDX-License-Identifier: Apache-2.0
"""Which masked positions a denoising step fills, and with what.

Invariant: what is drawn for a position follows from its request's seed, the step and the position
alone, never from the batch that it shares or how that is padded; ties go to the position that comes
first, so at temperature 0 a step is deterministic.

Shapes: b requests, w positions of a window, r of them at once, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from geojax.models.attention import NEVER

POLICIES = ("confidence", "threshold", "margin", "entropy", "origin")
"""confidence: the scheduled number of positions, the likeliest tokens first (low-confidence
remasking, Nie et al. 2025). threshold: all that are likelier than a threshold, and always the
likeliest (Wu et al. 2025, "Fast-dLLM"). margin, entropy: the scheduled number, by the distance of
the two best tokens, or by the least entropy; origin: at random, each with the chance that empties
the block in time (Ye et al. 2025, "Dream 7B")."""
_TOKEN, _PLACE = 0, 1  # what a draw is for


class Reading(NamedTuple):
    """What the model says of each position."""

    token: Int[Array, "b w"]
    """The token that it would be filled with."""
    score: Float[Array, "b w"]
    """Higher ones are filled first; NaN where a logit is no number."""


class Draws(NamedTuple):
    """How the rows of a batch are read."""

    policy: Int[Array, " b"]
    temperature: Float[Array, " b"]
    """Of the token's distribution; 0 takes the likeliest."""
    seed: UInt[Array, " b"]


Read = Callable[
    [Float[Array, "b r V"], Bool[Array, " V"], Draws, Int[Array, " b"], Int[Array, "b r"]], Reading
]
"""What `read` is: the rule by which a sampler reads logits, traced under jit."""


def read(
    logits: Float[Array, "b r V"],
    forbidden: Bool[Array, " V"],
    draws: Draws,
    step: Int[Array, " b"],
    positions: Int[Array, "b r"],
) -> Reading:
    """Token and score of positions from their float32 logits; forbidden tokens are never chosen.

    A token is drawn by the Gumbel-max trick, from noise whose tail keeps full float32 precision.
    Confidence is the token's probability at temperature 1; margin and entropy are of the
    distribution at the temperature, as published.
    """
    logits = jnp.where(forbidden, NEVER, logits)
    warm = draws.temperature[:, None, None]
    tempered = logits / jnp.where(warm > 0, warm, 1)
    keys = jax.vmap(_keys)(draws.seed, step, positions)

    def draw(_):
        noise = jax.vmap(jax.vmap(lambda key: _gumbel(key, logits.shape[-1])))(keys)
        return jnp.argmax(jnp.where(warm > 0, tempered + noise, logits), axis=-1)

    token = jax.lax.cond(
        jnp.any(warm > 0), draw, lambda _: jnp.argmax(logits, axis=-1), operand=None
    )
    picked = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    confidence = jnp.exp(picked - jax.nn.logsumexp(logits, axis=-1))
    log_probs = jax.nn.log_softmax(tempered, axis=-1)
    probs = jnp.exp(log_probs)
    first = jnp.argmax(probs, axis=-1)
    others = jnp.where(jnp.arange(probs.shape[-1]) == first[..., None], 0, probs)
    margin = jnp.max(probs, axis=-1) - jnp.max(others, axis=-1)
    negative_entropy = jnp.sum(jnp.where(probs > 0, probs * log_probs, 0), axis=-1)
    place = jax.vmap(jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, _PLACE))))
    by_policy = [confidence, confidence, margin, negative_entropy]
    scores = jnp.stack([*by_policy, -place(keys)])
    return Reading(token, _pick(scores, draws.policy))


def fill(
    reading: Reading,
    masked: Bool[Array, "b w"],
    policy: Int[Array, " b"],
    threshold: Float[Array, " b"],
    scheduled: Int[Array, " b"],
    chance: Float[Array, " b"],
) -> Bool[Array, "b w"]:
    """The masked positions that are filled now.

    `scheduled`: how many, under policies that have a schedule; `chance`: of each, under origin.
    """
    # What is no number is filled last, and never waits for ever.
    numbers = jnp.where(jnp.isnan(reading.score), NEVER, reading.score)
    score = jnp.where(masked, numbers, -jnp.inf)
    sure = jnp.sum(masked & (score >= threshold[:, None]), axis=-1)
    drawn = jnp.sum(masked & (-score < chance[:, None]), axis=-1)
    counts = jnp.stack([scheduled, jnp.maximum(sure, 1), scheduled, scheduled, drawn])
    count = jnp.minimum(_pick(counts, policy), jnp.sum(masked, axis=-1))
    order = jnp.argsort(-score, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    return masked & (rank < count[:, None])


def guide(
    given: Float[Array, "b r V"], blind: Float[Array, "b r V"], guidance: Float[Array, " b"]
) -> Float[Array, "b r V"]:
    """Classifier-free guidance (Ho and Salimans 2022, as in Nie et al. 2025): logits moved away
    from those that a masked prompt gives, blind + (1 + guidance) (given - blind)."""
    return blind + (1 + guidance[:, None, None]) * (given - blind)


def steps_of_block(
    steps: Int[Any, " b"],
    left: Int[Any, " b"],
    masks: Int[Any, " b"],
    xp: Any = jnp,
) -> Int[Any, " b"]:
    """Denoising steps of a block with `masks` of the `left` masks, where `steps` are left.

    By its share of the masks, so that blocks' steps add up where each has one at least; never more
    than its masks, so that no step fills nothing. `xp`: jax.numpy or numpy.
    """
    return xp.clip(steps * masks // xp.maximum(left, 1), 1, xp.maximum(masks, 1))


def scheduled_count(
    masks: Int[Array, " b"], steps: Int[Array, " b"], step: Int[Array, " b"]
) -> Int[Array, " b"]:
    """Positions that step 0..steps-1 fills, of `masks` in all: as equal as can be, more first."""
    return masks // steps + (step < masks % steps)


def _pick(values: Array, which: Int[Array, " b"]) -> Array:
    """values[which[i], i] for each row i."""
    return jax.vmap(lambda column, i: column[i], in_axes=(1, 0))(values, which)


def _keys(seed, step, positions):
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda position: jax.random.fold_in(key, position))(positions)


def _gumbel(key: Array, size: int) -> Float[Array, " V"]:
    return jax.random.gumbel(jax.random.fold_in(key, _TOKEN), (size,), jnp.float32, mode="high")
