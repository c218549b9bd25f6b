# SPDX-License-Identifier: Apache-2.0
"""The model as a sampler runs it: layers over whole rows, the head over masked ones only.

Shapes: b requests, s positions, w positions of a window, d model width, V padded vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from geojax.diffusion.canvas import Rules, Window
from geojax.diffusion.choose import Read, Reading, guide, read
from geojax.models.transformer import Inputs, Params, Transformer

HEAD_ROWS = 32
"""Positions of a request whose logits exist at once: LLaDA's are 16 MB then, in float32."""


def inputs(tokens: Int[Array, "b s"], length: Int[Array, " b"]) -> Inputs:
    """Positions from 0 on; padding sees padding only."""
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return Inputs(places, (places >= length[:, None]).astype(jnp.int32), None)


def hidden(
    model: Transformer,
    params: Params,
    tokens: Int[Array, "b s"],
    length: Int[Array, " b"],
    dtype: DTypeLike,
) -> Float[Array, "b s d"]:
    """The residual stream after the last layer, nothing reused."""
    given = inputs(tokens, length)
    rotary = model.rotary(given)

    def layer(x, weights):
        return model.layer(weights, x, 0, rotary, given), None

    return jax.lax.scan(layer, model.embed(params, tokens, given, dtype), params["blocks"])[0]


def rows_of(
    x: Float[Array, "b s d"], positions: Int[Array, "b w"], model: Transformer
) -> Float[Array, "b w d"]:
    """The rows that predict the tokens at `positions`."""
    rows = jnp.maximum(positions - 1, 0) if model.config.shifted else positions
    return jnp.take_along_axis(x, rows[..., None], axis=1)


def read_window(
    model: Transformer,
    params: Params,
    rows: Float[Array, "b w d"],
    blind: Float[Array, "b w d"] | None,
    seen: Window,
    rules: Rules,
    steps: Int[Array, " b"],
    forbidden: Array,
    read: Read = read,
) -> Reading:
    """What the model says of a window's masked positions, which come first; others get anything.

    `rows` predict them; `blind` are the same under a masked prompt, for guidance. HEAD_ROWS of
    them have logits at once, and as many such pieces are computed as the row with the most masks
    needs. `read` makes token and score of logits; whatever it makes of those that are no numbers,
    the score is none.
    """
    count, width = seen.masked.shape
    piece = min(HEAD_ROWS, width)
    pieces = -(-width // piece)
    pad = pieces * piece - width

    def cut(x: Array, i) -> Array:
        x = jnp.pad(x, ((0, 0), (0, pad), *[(0, 0)] * (x.ndim - 2)))
        return jax.lax.dynamic_slice_in_dim(x, i * piece, piece, axis=1)

    def one(i, found: Reading) -> Reading:
        logits = model.logits(params, cut(rows, i))
        if blind is not None:
            logits = guide(logits, model.logits(params, cut(blind, i)), rules.guidance)
        new = read(logits, forbidden, rules.draws, steps, cut(seen.positions, i))
        # NaN and the logit that softmax makes NaN of; one of minus infinity is never drawn.
        numbers = jnp.all(forbidden | (logits < jnp.inf), axis=-1)
        new = new._replace(score=jnp.where(numbers, new.score, jnp.nan))
        put: Callable = lambda a, b: jax.lax.dynamic_update_slice_in_dim(  # noqa: E731
            a, b.astype(a.dtype), i * piece, axis=1
        )
        return jax.tree.map(put, found, new)

    most = jnp.max(jnp.sum(seen.masked, axis=1))
    empty = Reading(
        jnp.zeros((count, pieces * piece), jnp.int32), jnp.zeros((count, pieces * piece))
    )
    found = jax.lax.fori_loop(0, -(-most // piece), one, empty)
    return jax.tree.map(lambda x: x[:, :width], found)
