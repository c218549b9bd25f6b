# SPDX-License-Identifier: Apache-2.0
"""Attention of a block of rows over [prefix | own] keys on Hopper, in Pallas' Mosaic GPU.

Rows of all sequences, and within a key/value head all of its query heads, stand below each other in
one M dimension, which is cut into tiles, whatever sequences that cuts. Invariant: neither prefixes
nor, where their size is a multiple of KEYS_MULTIPLE, own keys are copied or joined on their way to
the kernel (mosaic_body.py).
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from geojax.bicache.kernels.mosaic_body import GROUP_ROWS, Segments, Tiling, run_kernel
from geojax.bicache.kernels.reference import Part, check, entries, merge

CORES = 132
"""Streaming multiprocessors of an H100 or H200, which splits of the keys try to fill."""
HEAD_SIZES = (64, 128)
DTYPES = ("bfloat16", "float16")

KEYS_MULTIPLE = 8
"""TMA moves tiles of 8 rows: dims of rows and keys are whole multiples of it."""


def tiling(rows: int, kv_heads: int, keys: int, entry_keys: int) -> Tiling:
    """For `rows`, sequences x queries x query heads a key/value head, and `keys` of both parts.

    `entry_keys` is what a prefix entry holds: no step is larger, down to 64.
    """
    groups = 1 if rows <= GROUP_ROWS else 2
    step = 64 if 0 < entry_keys <= 64 else 128
    blocks = kv_heads * pl.cdiv(rows, groups * GROUP_ROWS)
    # A split shall have two steps at least, to be worth its share of the merge.
    splits = max(1, min(CORES // blocks, keys // (2 * step)))
    # As many slots as fit in shared memory with heads of 128; with more, heads of 64 spill.
    return Tiling(groups, step, (4 - groups) * 128 // step, splits)


def attend_mosaic(
    q: Float[Array, "b t h e"],
    prefix: Part,
    own: Part,
    index: Int[Array, "b *j"] | None = None,
    *,
    cut: Tiling | None = None,
    registers: bool = False,
    interpret: object = None,
) -> tuple[Float[Array, "b t h e"], Float[Array, "b h t"]]:
    """`reference.attend_xla` on a Hopper GPU, or under Pallas' interpreter.

    ValueError for a head size or type that wgmma tiles here do not take, and for a prefix that is
    padded to no multiple of KEYS_MULTIPLE; own keys, if they are not, are copied. `registers` as in
    Tiling, where no `cut` is given. `interpret` is Pallas': plgpu.InterpretGPUParams(), or None to
    compile.
    """
    check(q, prefix, own, index)
    b, t, h, e = q.shape
    if q.dtype.name not in DTYPES or e not in HEAD_SIZES:
        raise ValueError(
            f"heads of {e} in {q.dtype} have no kernel; use sizes {HEAD_SIZES} and types {DTYPES}, "
            "or attend_xla"
        )
    if (size := prefix.k.shape[-3]) % KEYS_MULTIPLE:
        raise ValueError(
            f"prefixes are padded to {size}, no multiple of {KEYS_MULTIPLE}; pad them to "
            f"{_whole(size, KEYS_MULTIPLE)} where they are stored, or use attend_xla"
        )
    kv_heads = own.k.shape[2]
    group = h // kv_heads
    if index is None:
        lengths = jnp.broadcast_to(prefix.length, b)
        prefix, index = Part(prefix.k[None], prefix.v[None], lengths), jnp.zeros(b, jnp.int32)
    # Rows of a sequence in the order of (query, query head); without groups only a new shape.
    rows = q.reshape(b, t, kv_heads, group, e).swapaxes(2, 3).reshape(b * t * group, kv_heads, e)
    own = own._replace(k=_pad(own.k, 1), v=_pad(own.v, 1))
    parts = [(own, _segments(jnp.arange(b)[None], own.length[None]))]
    if prefix.k.size:
        parts.insert(0, (prefix, _segments(*entries(prefix, index))))
    if cut is None:
        keys = prefix.k.shape[1] * (index.size // b) + own.k.shape[1]
        cut = tiling(len(rows), kv_heads, keys, prefix.k.shape[1])._replace(registers=registers)
    outs, lses = run_kernel(_pad(rows, 0), len(rows), parts, t * group, cut, interpret)
    outs = (
        outs[:, : len(rows)]
        .reshape(-1, b, t, group, kv_heads, e)
        .swapaxes(3, 4)
        .reshape(-1, b, t, h, e)
    )
    lses = lses[:, :, : len(rows)].reshape(-1, kv_heads, b, t, group)
    lses = lses.transpose(0, 2, 1, 4, 3).reshape(-1, b, h, t)
    return (outs[0], lses[0]) if cut.splits == 1 else merge(outs, lses)


def _segments(entry: Int[Array, "j b"], length: Int[Array, "j b"]) -> Segments:
    links, b = entry.shape
    same = (entry[:, 1:] == entry[:, :-1]) & (length[:, 1:] == length[:, :-1])
    ends = jnp.pad(~same, ((0, 0), (0, 1)), constant_values=True)
    last = lax.cummin(jnp.where(ends, jnp.arange(b), b), axis=1, reverse=True)
    table = jnp.stack([entry, length, last], axis=2).swapaxes(0, 1)
    used = jnp.max(jnp.where(length > 0, jnp.arange(links)[:, None] + 1, 0))
    return Segments(jnp.append(table.reshape(-1), used).astype(jnp.int32), links)


def _whole(size: int, multiple: int) -> int:
    """`size`, or the next multiple."""
    return -(-size // multiple) * multiple


def _pad(x: Array, axis: int) -> Array:
    """`x` with zeros up to a multiple of KEYS_MULTIPLE; itself where it is one."""
    more = _whole(x.shape[axis], KEYS_MULTIPLE) - x.shape[axis]
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)]) if more else x
