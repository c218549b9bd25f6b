# SPDX-License-Identifier: Apache-2.0
"""Attention over keys that lie in pages, and the writing of them.

Invariant: a row reads the pages of its own table alone, and of them the rows that count;
temporaries are of one chunk of pages, whatever the length of a prefix or the number of pages.

Shapes: b requests, t queries, s own keys, j pages of a table, g rows of a page, n pages of the
pool, h query heads, k key/value heads, e head size.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from geojax.bicache.kernels.reference import State, add_keys, begin, chunk_keys, finish

CHUNK_KEYS = 512
"""Keys at a time at most; as many as the temporaries of geojax.bicache.kernels.reference allow."""


def attend_paged(
    q: Float[Array, "b t h e"],
    pool_k: Float[Array, "n g k e"],
    pool_v: Float[Array, "n g k e"],
    table: Int[Array, "b j"],
    counts: Int[Array, "b j"],
    own: tuple[Float[Array, "b s k e"], Float[Array, "b s k e"], Bool[Array, "b s"]] | None,
) -> Float[Array, "b t h e"]:
    """softmax over the keys in the pages of each request's table and its own ones.

    `counts`: rows of each page that count, 0 where the table has none; `own`: keys, values, and
    which of them are seen. A query that sees no key gives 0.
    """
    kv_heads, page = pool_k.shape[2], pool_k.shape[1]
    groups, state = begin(q, kv_heads)
    pages = table.shape[1]
    if pages:
        keys = min(CHUNK_KEYS, chunk_keys(groups.shape, q.dtype, copies=True))
        chunk = min(pages, max(keys // page, 1))
        padded = -(-pages // chunk) * chunk - pages
        table, counts = (jnp.pad(x, ((0, 0), (0, padded))) for x in (table, counts))
        used = jnp.max(jnp.where(counts > 0, jnp.arange(pages + padded) + 1, 0))

        def take(i, state: State) -> State:
            ids = lax.dynamic_slice_in_dim(table, i * chunk, chunk, axis=1)
            there = lax.dynamic_slice_in_dim(counts, i * chunk, chunk, axis=1)
            seen = jnp.arange(page) < there[..., None]
            k, v = (x[ids].reshape(len(q), chunk * page, *x.shape[2:]) for x in (pool_k, pool_v))
            return add_keys(groups, k, v, seen.reshape(len(q), -1), state)

        state = lax.fori_loop(0, -(-used // chunk), take, state)
    if own is not None:
        k, v, seen = own
        keys = chunk_keys(groups.shape, q.dtype, copies=False)
        for start in range(0, k.shape[1], keys):
            part = slice(start, start + keys)
            state = add_keys(groups, k[:, part], v[:, part], seen[:, part], state)
    return finish(state, q)[0]


def write(
    pool: Float[Array, "n g *x"],
    table: Int[Array, "b j"],
    first: Int[Array, " b"],
    rows: Float[Array, "b t *x"],
    wanted: Bool[Array, "b t"],
) -> Float[Array, "n g *x"]:
    """The pool with `rows` written from row `first` of each table on, where they are `wanted`."""
    page = pool.shape[1]
    places = first[:, None] + jnp.arange(rows.shape[1])
    slot = jnp.clip(places // page, 0, table.shape[1] - 1)
    ids = jnp.where(wanted, jnp.take_along_axis(table, slot, axis=1), pool.shape[0])
    return pool.at[ids, places % page].set(rows.astype(pool.dtype), mode="drop")


def gather(pool: Float[Array, "n g *x"], table: Int[Array, "b j"]) -> Float[Array, "b j*g *x"]:
    """All rows of each table, one after another."""
    found = pool[table]
    return found.reshape(table.shape[0], -1, *pool.shape[2:])


def row_places(counts: Int[Array, "b j"], page: int) -> tuple[Array, Array]:
    """Of all rows of tables [b, j*g]: their positions in the sequence, and whether they count."""
    inside = jnp.arange(page)
    before = jnp.cumsum(counts, axis=1) - counts
    places = before[..., None] + inside
    real = inside < counts[..., None]
    flat = (counts.shape[0], -1)
    return jnp.where(real, places, 0).reshape(flat), real.reshape(flat)


def tokens_at(tokens: Int[Array, "b s"], places: Int[Array, "b t"]) -> Int[Array, "b t"]:
    return jnp.take_along_axis(tokens, jnp.minimum(places, tokens.shape[1] - 1), axis=1)
