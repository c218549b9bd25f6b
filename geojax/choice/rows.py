# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens of any lengths through one model, and what it says of some of their places.

Invariant: what is said of a row does not depend on the rows beside it or on padding, apart from
rounding. Shapes come in buckets, so that few programs serve all rows, and logits exist for
HEAD_ROWS places at a time: 4 * HEAD_ROWS * vocabulary bytes. Beside them a batch of `batch_tokens`
takes 4 * batch_tokens * (a few widths of the model + the MLP's) bytes and, of rows of t tokens,
8 * batch_tokens * heads * t bytes for the scores of attention.

Shapes: b rows, t tokens of a row, r places that are read.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import batched
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float32, Int, Int32

from geojax.diffusion.canvas import power_of_two
from geojax.models.transformer import Inputs, Params, Transformer

HEAD_ROWS = 128
BATCH_TOKENS = 2048
_PADDING = -1  # the segment of tokens that stand for nothing


class Row(NamedTuple):
    """Tokens, and the places that are read."""

    tokens: Int32[np.ndarray, " t"]
    positions: Int32[np.ndarray, " t"]
    segments: Int32[np.ndarray, " t"]
    """At least 0; who sees whom is the model's matter."""
    reads: Int32[np.ndarray, " r"]
    """Places whose logits count; one may be read often."""
    targets: Int32[np.ndarray, " r"]
    """The token that each is asked about."""


class Reading(NamedTuple):
    """What the model says of a row's targets."""

    nats: Float32[np.ndarray, " r"]
    """Minus the logarithm of their probability."""
    likeliest: Bool[np.ndarray, " r"]
    """Whether no token is likelier."""


type Reader = Callable[[Sequence[Row]], list[Reading]]


def make_reader(
    model: Transformer, params: Params, dtype: DTypeLike, batch_tokens: int = BATCH_TOKENS
) -> Reader:
    """A function from rows to readings, in order; parameters are held in `dtype`.

    At most `batch_tokens` tokens with padding are computed at once, or else one row.
    """
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
    score = jax.jit(partial(_score, model, dtype))

    def read(rows: Sequence[Row]) -> list[Reading]:
        found: dict[int, Reading] = {}
        for length, places in _buckets(rows).items():
            most = 1 << (max(batch_tokens // length, 1).bit_length() - 1)
            for group in batched(places, most):
                batch = _batch([rows[i] for i in group], length)
                nats, likeliest = map(np.asarray, score(params, *batch))
                ends = np.cumsum([len(rows[i].reads) for i in group])
                for i, end in zip(group, ends, strict=True):
                    own = slice(end - len(rows[i].reads), end)
                    found[i] = Reading(nats[own], likeliest[own])
        return [found[i] for i in range(len(rows))]

    return read


def bucket(length: int) -> int:
    """The padded length: 16, 24, 32, 48, 64, 96 and so on."""
    power = 16
    while power < length:
        if length <= power + power // 2:
            return power + power // 2
        power *= 2
    return power


def _buckets(rows: Sequence[Row]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for i in sorted(range(len(rows)), key=lambda i: len(rows[i].tokens)):
        found.setdefault(bucket(len(rows[i].tokens)), []).append(i)
    return found


def _batch(rows: Sequence[Row], length: int) -> tuple:
    """Arrays of rows of `length`, a power of two of them, and how many places are read."""
    count = power_of_two(len(rows))
    tokens, positions = np.zeros((2, count, length), np.int32)
    segments = np.full((count, length), _PADDING, np.int32)
    pieces = -(-count * length // HEAD_ROWS)
    most = max(pieces * HEAD_ROWS, -(-sum(len(r.reads) for r in rows) // HEAD_ROWS) * HEAD_ROWS)
    reads, targets = np.zeros((2, most), np.int32)
    read = 0
    for i, row in enumerate(rows):
        n, r = len(row.tokens), len(row.reads)
        tokens[i, :n], positions[i, :n], segments[i, :n] = row[:3]
        reads[read : read + r], targets[read : read + r] = i * length + row.reads, row.targets
        read += r
    return tokens, positions, segments, reads, targets, np.int32(read)


def _score(
    model: Transformer,
    dtype: DTypeLike,
    params: Params,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    segments: Int[Array, "b t"],
    reads: Int[Array, " r"],
    targets: Int[Array, " r"],
    count: Int[Array, ""],
) -> tuple[Array, Array]:
    """Nats and whether likeliest, of the first `count` places."""
    inputs = Inputs(positions, segments, None)
    rotary = model.rotary(inputs)

    def layer(x, weights):
        return model.layer(weights, x, 0, rotary, inputs), None

    x = jax.lax.scan(layer, model.embed(params, tokens, inputs, dtype), params["blocks"])[0]
    x = x.reshape(-1, x.shape[-1])

    def piece(i, found):
        at, of = (
            jax.lax.dynamic_slice_in_dim(a, i * HEAD_ROWS, HEAD_ROWS) for a in (reads, targets)
        )
        logits = model.logits(params, x[at][None])[0]
        own = jnp.take_along_axis(logits, of[:, None], axis=1)[:, 0]
        new = jax.nn.logsumexp(logits, axis=1) - own, own >= logits.max(axis=1)
        return jax.tree.map(
            lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, i * HEAD_ROWS, 0), found, new
        )

    empty = jnp.zeros(len(reads), jnp.float32), jnp.zeros(len(reads), bool)
    return jax.lax.fori_loop(0, -(-count // HEAD_ROWS), piece, empty)
