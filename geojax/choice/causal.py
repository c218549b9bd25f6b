# SPDX-License-Identifier: Apache-2.0
"""Several continuations of one context in one row, for a model that sees what came before.

Invariant: each continuation sees the context and itself, at the positions it has after the context,
and so gets what it would get in a row of its own; the context is computed once for all of them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from geojax.choice.pairs import Pair
from geojax.choice.rows import Row

ROW_TOKENS = 1024  # no row grows beyond it by adding a continuation
_CONTEXT = 0  # its segment; continuations have those from 1 on


def pack(pairs: Sequence[Pair]) -> tuple[list[Row], list[list[tuple[int, slice]]]]:
    """Rows of pairs with equal contexts, and of each row (number of a pair, its reads).

    The first token of a continuation is read at the context's last; the last is no input.
    """
    groups: dict[bytes, list[int]] = {}
    for i, pair in enumerate(pairs):
        groups.setdefault(pair.context.tobytes(), []).append(i)
    rows, owners = [], []
    for group in groups.values():
        context = pairs[group[0]].context
        while group:
            length, some = len(context), 0
            for i in group:
                length += len(pairs[i].continuation) - 1
                if some and length > ROW_TOKENS:
                    break
                some += 1
            taken, group = group[:some], group[some:]
            row, own = _row(context, [pairs[i].continuation for i in taken])
            rows.append(row)
            owners.append(list(zip(taken, own, strict=True)))
    return rows, owners


def _row(context: np.ndarray, continuations: list[np.ndarray]) -> tuple[Row, list[slice]]:
    n = len(context)
    tokens, positions = [context], [np.arange(n)]
    segments, reads, own = [np.full(n, _CONTEXT)], [], []
    at, read = n, 0
    for number, continuation in enumerate(continuations, _CONTEXT + 1):
        more = len(continuation) - 1
        tokens.append(continuation[:-1])
        positions.append(n + np.arange(more))
        segments.append(np.full(more, number))
        reads += [[n - 1], at + np.arange(more)]
        own.append(slice(read, read + more + 1))
        at, read = at + more, read + more + 1
    parts = (tokens, positions, segments, reads, continuations)
    return Row(*(np.concatenate(part).astype(np.int32) for part in parts)), own


def attend_branches(
    q: Float[Array, "b t h e"],
    k: Float[Array, "b s k e"],
    v: Float[Array, "b s k e"],
    segments: Int[Array, "b t"] | None = None,
    causal: bool = True,
    drop: Any = None,
) -> Float[Array, "b t h e"]:
    """`geojax.models.attention.attend` where all see the context beside their own segment."""
    assert causal, "a model that sees both sides has no branches"
    assert segments is not None, "rows come with segments"
    assert drop is None, "scoring is no training"
    own = segments[:, :, None] == segments[:, None, :]
    shared = segments[:, None, :] == _CONTEXT
    seen = (own | shared) & jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], implementation="xla")
