# SPDX-License-Identifier: Apache-2.0
"""The Mosaic GPU kernel itself, on rows and segments: see mosaic_gpu.py.

A thread block takes one tile of rows of one key/value head. Invariant: it loads every run of its
rows that see the same keys of an entry once, and each row's own keys once; both go through one ring
of slots into one online softmax.

One warpgroup fetches keys and values by TMA; each of the others has GROUP_ROWS rows. Queries and
keys are multiplied from shared memory, and so are probabilities, which are written there first:
Pallas' interpreter has no multiplication from registers, nor sums that begin with what is in them.
Tilings with `registers` do without that way through memory, and no interpreter runs them.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from geojax.bicache.kernels.reference import Part
from geojax.models.attention import NEVER

GROUP_ROWS = 64
"""Rows of a warpgroup: the M of one wgmma."""

# Of a thread; 2 x 224 + 56 are the 504 that three warpgroups share.
_COMPUTE_REGISTERS = 224
_FETCH_REGISTERS = 56
_LOG2_E = math.log2(math.e)


class Tiling(NamedTuple):
    """How the work is cut."""

    groups: int
    """Warpgroups that compute; a tile has GROUP_ROWS rows for each."""
    keys: int
    """Keys a step."""
    slots: int
    """Steps that are loaded ahead, at most."""
    splits: int
    """Blocks that share the keys of one tile; their results are merged by log-sum-exp."""
    registers: bool = False
    """Probabilities are multiplied from registers, onto sums in registers."""


class Segments(NamedTuple):
    """Which keys of a part its rows see. A run is of neighbours that see the same ones."""

    table: Int[Array, "flat"]
    """For each sequence and link of its chain: entry, length, and the last sequence of the run;
    and at the end, how many links any sequence has."""
    links: int


def run_kernel(
    q: Float[Array, "padded k e"],
    rows: int,
    parts: list[tuple[Part, Segments]],
    sequence_rows: int,
    cut: Tiling,
    interpret: object,
) -> tuple[Float[Array, "split padded k e"], Float[Array, "split k padded"]]:
    """The kernel, on its own layouts. Log-sum-exps are padded to whole tiles of rows."""
    padded, kv_heads, e = q.shape
    groups, keys, slots, splits, registers = cut
    tile_rows = groups * GROUP_ROWS
    tiles = pl.cdiv(rows, tile_rows)
    scale = _LOG2_E / math.sqrt(e)
    column = plgpu.Layout.WGMMA.reduce(1)
    tables = len(parts)

    def body(*refs):
        q_ref, *part_refs, out_ref, lse_ref = refs[: 3 * tables + 3]
        q_smem, k_smem, v_smem, lse_smem, *more = refs[3 * tables + 3 :]
        q_loaded, k_loaded, v_loaded, k_free, v_free, *p_smem = more
        split, head, tile = (lax.axis_index(name) for name in ("split", "head", "tile"))
        warpgroup = lax.axis_index("warpgroup")
        tile_row = tile * tile_rows
        first = lax.div(tile_row, sequence_rows)
        last = lax.div(jnp.minimum(tile_row + tile_rows, rows) - 1, sequence_rows)

        def over_segments(visit, carry):
            """visit(k, v, segment, carry) for every run of rows of this tile, in either part.

            Steps are counted through; those that leave `split` when divided by `splits` are ours.
            """

            def of_part(k_ref, v_ref, table, links, carry):
                def link(j, at):
                    i, carry = at
                    entry, length, end = (table[3 * (i * links + j) + x] for x in range(3))
                    before = table[3 * (jnp.maximum(i - 1, 0) * links + j) + 2]
                    begins = (i == first) | (before < i)
                    steps = jnp.where(begins, lax.div(length + keys - 1, keys), 0)
                    phase, *carry = carry
                    segment = _Segment(
                        entry, length, phase, steps, i * sequence_rows, (end + 1) * sequence_rows
                    )
                    carry = visit(k_ref, v_ref, segment, carry)
                    phase = lax.rem(phase + splits - lax.rem(steps, splits), splits)
                    return i, (phase, *carry)

                def sequence(i, carry):
                    used = table[table.shape[0] - 1]
                    return lax.fori_loop(0, used, link, (i, carry))[1]

                return lax.fori_loop(first, last + 1, sequence, carry)

            carry = (split, *carry)
            for i, (_, segments) in enumerate(parts):
                k_ref, v_ref, table = part_refs[3 * i : 3 * i + 3]
                carry = of_part(k_ref, v_ref, table, segments.links, carry)
            return carry[1:]

        def ours(segment, steps):
            """How many of the first `steps` of a segment are this split's."""
            return jnp.maximum(lax.div(steps - segment.phase + splits - 1, splits), 0)

        @pl.when(warpgroup == groups)
        def _fetch():
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

            def visit(k_ref, v_ref, segment, carry):
                def step(i, count):
                    slot = lax.rem(count, slots)
                    j = segment.phase + i * splits
                    at = (segment.entry, pl.ds(j * keys, keys), head)

                    @pl.when(count >= slots)
                    def _():
                        plgpu.barrier_wait(k_free.at[slot])

                    plgpu.copy_gmem_to_smem(k_ref.at[at], k_smem.at[slot], k_loaded.at[slot])

                    @pl.when(count >= slots)
                    def _():
                        plgpu.barrier_wait(v_free.at[slot])

                    plgpu.copy_gmem_to_smem(v_ref.at[at], v_smem.at[slot], v_loaded.at[slot])
                    return count + 1

                return (lax.fori_loop(0, ours(segment, segment.steps), step, *carry),)

            (count,) = over_segments(visit, (jnp.int32(0),))

            def drain(j, _):
                # The interpreter wants every arrival seen before a barrier goes (JAX 0.11).
                plgpu.barrier_wait(k_free.at[lax.rem(j, slots)])
                plgpu.barrier_wait(v_free.at[lax.rem(j, slots)])

            lax.fori_loop(jnp.maximum(count - slots, 0), count, drain, None)

        @pl.when(warpgroup < groups)
        def _attend():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            row = tile_row + warpgroup * GROUP_ROWS
            q_rows, lse_rows = q_smem.at[warpgroup], lse_smem.at[warpgroup]
            plgpu.copy_gmem_to_smem(
                q_ref.at[pl.ds(row, GROUP_ROWS), head], q_rows, q_loaded.at[warpgroup]
            )
            plgpu.barrier_wait(q_loaded.at[warpgroup])

            def idle(j, carry):
                count, *state = carry
                slot = lax.rem(count, slots)
                plgpu.barrier_wait(k_loaded.at[slot])
                plgpu.barrier_arrive(k_free.at[slot])
                plgpu.barrier_wait(v_loaded.at[slot])
                plgpu.barrier_arrive(v_free.at[slot])
                return count + 1, *state

            def step(i, carry, segment, masked):
                count, acc, top, total = carry
                slot = lax.rem(count, slots)
                plgpu.barrier_wait(k_loaded.at[slot])

                def score(ref):
                    plgpu.wgmma(ref, q_rows, k_smem.at[slot].transpose((1, 0)))
                    return ref[...]

                s = pl.run_scoped(score, plgpu.ACC((GROUP_ROWS, keys), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                s = s * scale
                if masked:
                    # What a row sees of this step; 0 for rows that are not of the segment.
                    at_row = row + _iota((GROUP_ROWS,), 0, column)
                    seen = (at_row >= segment.from_row) & (at_row < segment.to_row)
                    j = segment.phase + i * splits
                    left = jnp.where(seen, segment.length - j * keys, 0)
                    at_key = _iota(s.shape, 1, plgpu.Layout.WGMMA)
                    s = jnp.where(at_key < lax.broadcast_in_dim(left, s.shape, [0]), s, -jnp.inf)
                new_top = jnp.maximum(top, s.max(axis=1))
                p = jnp.exp2(s - lax.broadcast_in_dim(new_top, s.shape, [0]))
                decay = jnp.exp2(top - new_top)
                total = total * decay + p.sum(axis=1)
                p = p.astype(q.dtype)
                acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
                if not registers:
                    p_rows = p_smem[0].at[warpgroup]
                    p_rows[...] = p
                    p = p_rows
                    plgpu.commit_smem()
                plgpu.barrier_wait(v_loaded.at[slot])

                def weigh(ref):
                    plgpu.wgmma(ref, p, v_smem.at[slot])
                    if registers:
                        plgpu.wgmma_wait(0)
                        return None
                    return ref[...]

                if registers:
                    acc = pl.run_state(weigh)(plgpu.ACC.init(acc))
                else:
                    acc += pl.run_scoped(weigh, plgpu.ACC((GROUP_ROWS, e), jnp.float32))
                plgpu.barrier_arrive(v_free.at[slot])
                return count + 1, acc, new_top, total

            def visit(k_ref, v_ref, segment, carry):
                end = ours(segment, segment.steps)
                meets = (segment.from_row < row + GROUP_ROWS) & (row < segment.to_row)
                fills = (segment.from_row <= row) & (row + GROUP_ROWS <= segment.to_row)
                # Steps of which all is seen; of which some is; and none, which the others read.
                whole = jnp.where(fills, ours(segment, lax.div(segment.length, keys)), 0)
                whole = jnp.minimum(whole, end)
                some = jnp.where(meets, end, 0)
                carry = tuple(carry)
                carry = lax.fori_loop(0, whole, partial(step, segment=segment, masked=False), carry)
                carry = lax.fori_loop(
                    whole, some, partial(step, segment=segment, masked=True), carry
                )
                return lax.fori_loop(some, end, idle, carry)

            acc = jnp.zeros((GROUP_ROWS, e), jnp.float32)
            top = jnp.full(GROUP_ROWS, NEVER, jnp.float32)
            start = (
                jnp.int32(0),
                plgpu.layout_cast(acc, plgpu.Layout.WGMMA),
                plgpu.layout_cast(top, column),
                plgpu.layout_cast(jnp.zeros_like(top), column),
            )
            _, acc, top, total = over_segments(visit, start)
            seen = total > 0
            total = jnp.where(seen, total, 1.0)
            acc = acc / lax.broadcast_in_dim(total, acc.shape, [0])
            q_rows[...] = acc.astype(q.dtype)
            lse_rows[...] = jnp.where(seen, top * (1 / _LOG2_E) + jnp.log(total), NEVER)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_rows, out_ref.at[split, pl.ds(row, GROUP_ROWS), head])
            plgpu.copy_smem_to_gmem(lse_rows, lse_ref.at[split, head, pl.ds(row, GROUP_ROWS)])
            plgpu.wait_smem_to_gmem(0)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    smem = lambda *shape: plgpu.SMEM(shape, q.dtype, transforms=tiled)  # noqa: E731
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((splits, padded, kv_heads, e), q.dtype),
            jax.ShapeDtypeStruct((splits, kv_heads, tiles * tile_rows), jnp.float32),
        ),
        scratch_types=(
            smem(groups, GROUP_ROWS, e),
            smem(slots, keys, e),
            smem(slots, keys, e),
            plgpu.SMEM((groups, GROUP_ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=groups),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_arrivals=groups, num_barriers=slots),
            plgpu.Barrier(num_arrivals=groups, num_barriers=slots),
            *([] if registers else [smem(groups, GROUP_ROWS, keys)]),
        ),
        grid=(splits, kv_heads, tiles),
        grid_names=("split", "head", "tile"),
        num_threads=groups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    flat = [x for part, segments in parts for x in (part.k, part.v, segments.table)]
    return kernel(q, *flat)


class _Segment(NamedTuple):
    """Keys that some rows share: `steps`, of which a split takes each `splits`-th from `phase`."""

    entry: Array
    length: Array
    phase: Array
    steps: Array
    from_row: Array
    to_row: Array


def _iota(shape: tuple[int, ...], dim: int, layout: Any) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=layout)
