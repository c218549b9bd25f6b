# SPDX-License-Identifier: Apache-2.0
"""Filling an entry of the store: one segment through the shallow layers, after its parents.

Invariant: what is written follows from the entry's key alone; a build reads its parents' pages and
nothing of any request. Segments are padded to whole pages, and padding is neither seen nor kept.

Shapes: q rows of the segment and of the masks behind it, j pages of its parents, i of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from geojax.bicache.denoise import run_layer, write_kv
from geojax.bicache.paged import attend_paged, write
from geojax.bicache.pages import Memory, Pool, pages_of
from geojax.bicache.shapes import page_bucket, page_buckets
from geojax.bicache.slot import Job, page_counts
from geojax.bicache.store import Builder, Entry, Store
from geojax.diffusion.canvas import power_of_two
from geojax.diffusion.sampler import Sampler
from geojax.models.transformer import Inputs, Params, Transformer

_ROOM = 128
"""For masks behind a segment, at least, in a program."""


@dataclass(frozen=True)
class Build:
    """Builds for one set of depths."""

    model: Transformer
    dtype: str
    depths: tuple[int, ...]
    """At which hidden states are kept, increasing; keys and values are kept below the last."""

    def run(
        self,
        params: Params,
        pool: Pool,
        tokens: Int[Array, "1 q"],
        first: Int[Array, ""],
        rows: Int[Array, ""],
        seen: Int[Array, ""],
        parents: Int[Array, "depth 1 j"],
        parent_counts: Int[Array, "1 j"],
        kv: Int[Array, "depth 1 i"],
        hidden: Int[Array, "depths 1 i"],
    ) -> Pool:
        """The pool with the segment's pages filled.

        `first`: position of its first token; `rows`: its tokens, of `seen` with the masks that
        follow them.
        """
        at = jnp.arange(tokens.shape[1])[None]
        places, kept = first + at, at < rows
        inputs = Inputs(places, None, None)
        rotary = self.model.rotary(inputs)
        x = self.model.embed(params, tokens, inputs, self.dtype)
        zero = jnp.zeros(1, jnp.int32)

        def one(layer, carry):
            x, pool = carry

            def attend(pool, q, k, v):
                own = (k, v, seen[None])
                mixed = attend_paged(q, pool.k, pool.v, parents[layer], parent_counts, own)
                # Read, then written: else XLA copies the whole pool, for it may do both at once.
                mixed, pool = lax.optimization_barrier((mixed, pool))
                return mixed, write_kv(pool, kv[layer], zero, k, v, kept)

            return run_layer(self.model, params, layer, x, places, rotary, pool, attend)

        below = 0
        for number, depth in enumerate(self.depths):
            x, pool = lax.fori_loop(below, depth, one, (x, pool))
            if depth < self.model.config.layers:
                pages = write(pool.hidden, hidden[number], zero, x, kept)
                pool = pool._replace(hidden=pages)
            below = depth
        return pool


@lru_cache(maxsize=64)
def _compiled(build: Build) -> Callable[..., Pool]:
    """One program for all engines that would compile the same; the pool is taken over."""
    return jax.jit(build.run, donate_argnums=1)


class Builds:
    """Prefixes of jobs from a store; what is not in it is built."""

    def __init__(
        self,
        sampler: Sampler,
        memory: Memory,
        store: Store,
        builder: Builder,
        depths: tuple[int, ...],
    ):
        """`depths`: as of `Build`."""
        self.builder = builder
        self._sampler, self._memory, self._store = sampler, memory, store
        self._program = Build(sampler.model, jnp.dtype(sampler.dtype).name, depths)
        self._kept = sum(depth < sampler.model.config.layers for depth in depths)
        self.used: set[tuple[int, int, int]] = set()
        """Programs: pages of a segment, those behind it, room for masks."""

    def acquire(self, job: Job) -> list[Entry]:
        """Its chain of segments, held; NoPagesError as `Store.acquire`."""
        segments, name, masks = self._wanted(job)
        return self._store.acquire(segments, job.salt, name, partial(self._fill, masks))

    def stored(self, job: Job) -> list[Entry]:
        """As much of its chain as is there, without building."""
        segments, name, _ = self._wanted(job)
        return self._store.stored(segments, job.salt, name)

    def _wanted(self, job: Job) -> tuple[list[np.ndarray], str, int]:
        """Its segments, the builder's name, and masks behind them."""
        tokens = np.asarray(job.request.tokens, np.int32)
        segments = np.split(tokens[: job.prefix], np.cumsum(job.segments)[:-1])
        masks = self._masks(len(tokens) - job.prefix)
        return segments, f"canvas {masks}" if masks else self.builder, masks

    def warm(self, prefix: int, suffix: int, segments: int, between: Callable[[], None]) -> None:
        """Compile what prefixes of up to so many tokens need, before suffixes of up to so many.
        `between`: called before each program, and may raise."""
        longest = pages_of(prefix, self._memory.page)
        for own in page_buckets(longest)[1:]:
            # What lies behind is a token less, at least, in a segment less.
            for behind in page_buckets(longest + segments - 2) if segments > 1 else [0]:
                for room in sorted({self._room(self._masks(n)) for n in range(1, suffix + 1)}):
                    between()
                    self._run(own, behind, room, 0, None)

    def _masks(self, suffix: int) -> int:
        """That are seen behind a segment of a request with such a suffix, in buckets."""
        return power_of_two(suffix) if self.builder == "canvas" else 0

    def _room(self, masks: int) -> int:
        return max(masks, _ROOM) if masks else 0

    def _fill(self, masks: int, entry: Entry) -> None:
        own = page_bucket(pages_of(entry.rows, self._memory.page))
        behind = page_bucket(sum(e.kv.shape[1] for e in entry.chain()[:-1]))
        self._run(own, behind, self._room(masks), masks, entry)

    def _run(self, own: int, behind: int, room: int, masks: int, entry: Entry | None) -> None:
        """Fill an entry of up to `own` pages after up to `behind`, before `masks` of at most
        `room`; no entry: compile that."""
        self.used.add((own, behind, room))
        with self._memory.keeping(self._store.forget):
            given = self._given(own, behind, room, masks, entry)
            self._memory.pool = _compiled(self._program)(*given)

    def _given(self, own: int, behind: int, room: int, masks: int, entry: Entry | None) -> tuple:
        """What a program takes, as for `_run`."""
        memory, depth = self._memory, self._store.depth
        tokens = np.full((1, own * memory.page + room), self._sampler.mask_id, np.int32)
        table, counts = np.zeros((depth, 1, behind), np.int32), np.zeros((1, behind), np.int32)
        kv = np.zeros((depth, 1, own), np.int32)
        hidden = np.zeros((self._kept, 1, own), np.int32)
        first = rows = 0
        if entry:
            before, rows = entry.chain()[:-1], entry.rows
            first, pages = sum(e.rows for e in before), entry.kv.shape[1]
            tokens[0, :rows] = entry.tokens
            kv[:, 0, :pages], hidden[:, 0, :pages] = entry.kv, entry.hidden
            if before:
                parents = np.concatenate([e.kv for e in before], axis=1)
                table[:, 0, : parents.shape[1]] = parents
                there = np.concatenate([page_counts(e.rows, memory.page) for e in before])
                counts[0, : len(there)] = there
        places = (np.int32(first), np.int32(rows), np.int32(rows + masks))
        params = self._sampler.params
        return params, memory.pool, tokens, *places, table, counts, kv, hidden
