# SPDX-License-Identifier: Apache-2.0
"""Attention over keys that lie in pages, and the writing of them.

Invariant: a row reads the pages of its own table alone, and of them the rows that count.

Shapes: b requests, t queries, s own keys, j pages of a table, g rows of a page, n pages of the
pool, h query heads, k key/value heads, e head size.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from geojax.bicache.kernels.choose import attend
from geojax.bicache.kernels.reference import Part

Own = tuple[Float[Array, "b s k e"], Float[Array, "b s k e"], Int[Array, " b"]]
"""Keys, values, and how many of them each row sees."""
_FEWEST = 8  # rows that every kernel takes


def attend_paged(
    q: Float[Array, "b t h e"],
    pool_k: Float[Array, "n g k e"],
    pool_v: Float[Array, "n g k e"],
    table: Int[Array, "b j"],
    counts: Int[Array, "b j"],
    own: Own | None,
) -> Float[Array, "b t h e"]:
    """softmax over the keys in the pages of each request's table and its own ones.

    `counts`: rows of each page that count, 0 where the table has none. A query that sees no key
    gives 0. By the best kernel for the device.
    """
    if own is None:
        shape = (len(q), _FEWEST, *pool_k.shape[2:])
        nothing = jnp.zeros(shape, pool_k.dtype)
        own = (nothing, nothing, jnp.zeros(len(q), jnp.int32))
    return attend(q, Part(pool_k, pool_v, counts), Part(*own), table)[0]


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
