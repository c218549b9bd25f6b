# SPDX-License-Identifier: Apache-2.0
"""Attention of a block of rows over [prefix | own] keys in XLA: the reference, and for any device.

Invariant: prefix and own keys are never joined in one array, and a prefix is never spread over the
batch. Each part gives unnormalised output, maximum and sum; they are merged at the end. Temporaries
are bounded (`TEMPORARIES_BYTES`), whatever the length of the prefix.

Shape suffixes: b sequence, t query, s own position, p prefix position, n prefix entry, h query
head, k key/value head, g query head of a key/value head (h = k g), e head size.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from geojax.models.attention import NEVER

TEMPORARIES_BYTES = 64 * 2**20
"""What one chunk of keys may take: its scores and probabilities, and where every row has a prefix
of its own, the rows' copies of that chunk. A chunk has at least `MIN_CHUNK` keys, if need be beyond
this."""
MIN_CHUNK = 64


class Part(NamedTuple):
    """Keys and values of one part. What lies beyond a length must be finite; it counts for nothing.

    Own: k and v [b, s, k, e], length [b]. Prefix that all rows share: [p, k, e] and []. Entries of
    which each row names its prefix: [n, p, k, e], and beside it an index; one [b], or a chain of
    them [b, j], such as the pages of a table. Lengths are then of the index's shape: a row may see
    less of an entry than another does.
    """

    k: Array
    v: Array
    length: Int[Array, "..."]


class State(NamedTuple):
    """A softmax over some keys, before it is divided: exp(score - top) weighs."""

    out: Float[Array, "b k g t e"]
    top: Float[Array, "b k g t"]
    total: Float[Array, "b k g t"]


def attend_xla(
    q: Float[Array, "b t h e"],
    prefix: Part,
    own: Part,
    index: Int[Array, "b *j"] | None = None,
) -> tuple[Float[Array, "b t h e"], Float[Array, "b h t"]]:
    """softmax(q [k_prefix | k_own]ᵀ / sqrt(e)) [v_prefix | v_own], and its log-sum-exp in float32.

    `index` names each row's entries, none where negative; without it all rows share `prefix`.
    Nothing is causal; positions are in the keys. A row that sees no key gives 0 and NEVER. Scores
    and sums are float32 or wider. ValueError where shapes do not fit.

    Shared keys are multiplied with all rows at once. With `index` a chunk of every row's entry is
    gathered first: read, written and read again, for each row that names it.
    """
    check(q, prefix, own, index)
    groups, state = begin(q, own.k.shape[2])
    if prefix.k.size and index is None:
        lengths = jnp.broadcast_to(prefix.length, q.shape[:1])
        state = _over_chunks(groups, prefix.k, prefix.v, lengths, state)
    elif index is not None and prefix.k.size and index.size:
        state = _over_entries(groups, prefix, index, state)
    if own.k.size:
        state = _over_chunks(groups, own.k, own.v, own.length, state)
    return finish(state, q)


def begin(q: Float[Array, "b t h e"], kv_heads: int) -> tuple[Float[Array, "b t k g e"], State]:
    """Queries by key/value head, and a softmax over no keys yet."""
    b, t, h, e = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    dims = (b, kv_heads, h // kv_heads, t)
    state = State(jnp.zeros((*dims, e), wide), jnp.full(dims, NEVER, wide), jnp.zeros(dims, wide))
    return q.reshape(b, t, kv_heads, h // kv_heads, e), state


def finish(
    state: State, q: Float[Array, "b t h e"]
) -> tuple[Float[Array, "b t h e"], Float[Array, "b h t"]]:
    """The softmax's output, in the type of `q`, and its log-sum-exp."""
    b, t, h, e = q.shape
    out = state.out / jnp.maximum(state.total, 1)[..., None]
    lse = jnp.where(state.total > 0, state.top + jnp.log(jnp.maximum(state.total, 1)), NEVER)
    out = out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, e)
    return out.astype(q.dtype), lse.reshape(b, h, t)


def merge(
    outs: Float[Array, "part b t h e"], lses: Float[Array, "part b h t"]
) -> tuple[Float[Array, "b t h e"], Float[Array, "b h t"]]:
    """One softmax from those of disjoint keys: outputs weighed by exp(log-sum-exp), in float32."""
    top = lses.max(axis=0)
    weights = jnp.exp(lses - top)
    total = weights.sum(axis=0)
    weights = (weights / total).transpose(0, 1, 3, 2)[..., None]
    out = (weights * outs).sum(axis=0).astype(outs.dtype)
    return out, top + jnp.log(total)


def check(q: Array, prefix: Part, own: Part, index: Array | None) -> None:
    """ValueError where the shapes or types of queries, parts and index do not fit each other."""
    b, _, h, e = q.shape
    kv_heads = own.k.shape[2]
    if h % kv_heads:
        raise ValueError(
            f"{h} query heads do not divide by {kv_heads} key/value heads; use a multiple"
        )
    lead = () if index is None else prefix.k.shape[:1]
    named = () if index is None else (b, *index.shape[1:2])
    expected = {
        "own keys": (own.k.shape, (b, own.k.shape[1], kv_heads, e)),
        "own values": (own.v.shape, own.k.shape),
        "own lengths": (own.length.shape, (b,)),
        "prefix keys": (prefix.k.shape, (*lead, *prefix.k.shape[-3:-2], kv_heads, e)),
        "prefix values": (prefix.v.shape, prefix.k.shape),
        "prefix index": (() if index is None else index.shape, named),
        "prefix lengths": (prefix.length.shape, named),
    }
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise ValueError(f"{name} have shape {found}, for queries {q.shape} use {wanted}")
    for name, x in zip(expected, (own.k, own.v, None, prefix.k, prefix.v), strict=False):
        if x is not None and x.dtype != q.dtype:
            raise ValueError(f"{name} are {x.dtype}, queries {q.dtype}; use one type")


def entries(prefix: Part, index: Int[Array, "b *j"]) -> tuple[Int[Array, "j b"], Int[Array, "j b"]]:
    """Entry and length of every link of the rows' chains; entry 0 and length 0 where none is."""
    links = index.reshape(len(index), -1).T
    lengths = jnp.where(index < 0, 0, prefix.length).reshape(len(index), -1).T
    return jnp.maximum(links, 0), lengths


def _over_entries(
    groups: Float[Array, "b t k g e"], prefix: Part, index: Int[Array, "b *j"], state: State
) -> State:
    """`state` with each row's entries: several at once where they are short, up to the last that
    counts for any row."""
    links, lengths = entries(prefix, index)
    size = prefix.k.shape[1]
    keys = chunk_keys(groups.shape, groups.dtype, copies=True)
    some = min(len(links), max(keys // size, 1))
    pad = ((0, -len(links) % some), (0, 0))
    links, lengths = (jnp.pad(x, pad).reshape(-1, some, len(groups)) for x in (links, lengths))
    used = jnp.max(jnp.where(lengths.max((1, 2)) > 0, jnp.arange(len(links)) + 1, 0))

    def take(i: Array, state: State) -> State:
        if some == 1:
            return _over_chunks(groups, prefix.k, prefix.v, lengths[i, 0], state, links[i, 0])
        seen = jnp.arange(size) < lengths[i].T[..., None]
        k, v = (
            x[links[i].T].reshape(len(groups), some * size, *x.shape[2:])
            for x in (prefix.k, prefix.v)
        )
        return add_keys(groups, k, v, seen.reshape(len(groups), -1), state)

    return lax.fori_loop(0, used, take, state)


def _over_chunks(
    groups: Float[Array, "b t k g e"],
    k: Array,
    v: Array,
    length: Int[Array, "b"],
    state: State,
    entry: Int[Array, "b"] | None = None,
) -> State:
    """`state` with [b, s, k, e], or [p, k, e] for all rows, or each row's `entry`, by chunks."""
    axis = k.ndim - 3
    size = k.shape[axis]
    chunk = min(size, chunk_keys(groups.shape, groups.dtype, copies=axis == 1))

    def take(x: Array, start: Array) -> Array:
        if entry is None:
            return lax.dynamic_slice_in_dim(x, start, chunk, axis)
        sizes = (1, chunk, *x.shape[2:])
        return jax.vmap(lambda i: lax.dynamic_slice(x, (i, start, 0, 0), sizes)[0])(entry)

    def step(state: State, first: Array) -> tuple[State, None]:
        # The last chunk reaches back over keys that are done, rather than the part being padded.
        start = jnp.minimum(first, size - chunk)
        at = start + jnp.arange(chunk)
        seen = (at >= first) & (at < length[:, None])
        return add_keys(groups, take(k, start), take(v, start), seen, state), None

    return lax.scan(step, state, jnp.arange(0, size, chunk))[0]


def add_keys(groups: Array, k: Array, v: Array, seen: Array, state: State) -> State:
    """`state` with keys k and v [c, k, e], or [b, c, k, e], of which each row sees some [b, c]."""
    dims = "cke" if k.ndim == 3 else "bcke"
    wide = state.top.dtype
    scores = jnp.einsum(f"btkge,{dims}->bkgtc", groups, k, preferred_element_type=wide)
    scores = jnp.where(seen[:, None, None, None], scores / math.sqrt(groups.shape[-1]), -jnp.inf)
    top = jnp.maximum(state.top, scores.max(axis=-1))
    weights = jnp.exp(scores - top[..., None])
    decay = jnp.exp(state.top - top)
    total = state.total * decay + weights.sum(axis=-1)
    # What no row sees may be anything, and nothing times a value that is no number is none.
    there = seen if k.ndim == 4 else seen.any(0)
    v = jnp.where(there[..., None, None], v, 0)
    add = jnp.einsum(
        f"bkgtc,{dims}->bkgte", weights.astype(v.dtype), v, preferred_element_type=wide
    )
    return State(state.out * decay[..., None] + add, top, total)


def chunk_keys(groups: tuple[int, ...], dtype: jnp.dtype, copies: bool) -> int:
    """Keys a chunk for queries [b t k g e], within TEMPORARIES_BYTES; a multiple of MIN_CHUNK."""
    b, t, kv_heads, group, e = groups
    # Scores, probabilities as they are summed, and as they are multiplied.
    wide_bytes = jnp.promote_types(dtype, jnp.float32).itemsize
    key_bytes = b * t * kv_heads * group * (2 * wide_bytes + dtype.itemsize)
    if copies:
        key_bytes += 2 * b * kv_heads * e * dtype.itemsize
    return max(TEMPORARIES_BYTES // key_bytes // MIN_CHUNK, 1) * MIN_CHUNK
