# SPDX-License-Identifier: Apache-2.0
"""A denoising step that computes no more of a prefix than a policy asks for.

A request's rows are [prefix | suffix], the suffix being its private prompt and its canvas. The
residual stream of the suffix runs through all layers at every step, or that of a window of it; the
prefix's runs through layers from `depth` on, and only in a refresh, starting from the hidden state
that a store keeps. In all other layers and steps its keys and values are read from pages.

Invariant: a request's row follows from its own fields. Rows that refresh and rows that do not share
a step: for the latter nothing is written, and they read what they read before. Bounds of loops over
layers are traced, so that no depth is a compile key.

Shapes: b requests, s positions, q rows of a suffix, j pages of a prefix, g rows of a page, w of a
window, L layers, d width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from geojax.bicache.paged import attend_paged, gather, row_places, tokens_at, write
from geojax.bicache.pages import Pool
from geojax.bicache.policy import Reach
from geojax.diffusion.canvas import Canvas, Rules, commit, window
from geojax.diffusion.choose import Read, read
from geojax.diffusion.forward import read_window
from geojax.models.transformer import Inputs, Params, Transformer


class Rows(NamedTuple):
    """What a batch reuses, by row."""

    prefix: Int[Any, " b"]
    """Tokens of the prefix; 0: there is none."""
    depth: Int[Any, " b"]
    """Layers below which the prefix's keys and values are the store's; L where it has no prefix."""
    table: Int[Any, "L b j"]
    """Pages of the prefix in each layer: the store's below depth, the request's own from there."""
    counts: Int[Any, "b j"]
    """Rows of each of them."""
    hidden: Int[Any, "b j"]
    """Pages of its hidden state at `depth`, where that is above 0 and below L."""
    suffix: Int[Any, "L b i"]
    """Pages of the suffix's keys and values, which windows smaller than it read; i is 0 else."""
    every: Int[Any, " b"]
    """As in Policy."""
    since: Int[Any, " b"]
    """Steps since the last refresh; 0: the next step is one."""
    watched: Bool[Any, " b"]
    """Rows before whose refreshes a call ends, so that the next one can look at them."""
    probes: Int[Any, "b n"]
    """Positions of the prefix that are looked at in a refresh; n is 0 where nobody looks."""
    probe_slots: Int[Any, "b n"]
    """Where they lie among all rows of the prefix's pages."""
    probe_count: Int[Any, " b"]
    """How many of them count."""


class Work(NamedTuple):
    """Row-layers of a batch's steps: one row of one request through one layer."""

    suffix: Float[Array, ""]
    prefix: Float[Array, ""]
    probes: Float[Array, ""]
    computed: Float[Array, ""]
    """All, with those that came to nothing."""
    refreshes: Float[Array, ""]
    """Not row-layers: how often a request's prefix was refreshed."""


class Carry(NamedTuple):
    pool: Pool
    canvas: Canvas
    since: Int[Array, " b"]
    work: Work
    drift: Float[Array, " b"]
    """The largest that was seen; see `drift_of`."""
    steps: Int[Array, ""]
    """Taken in this call."""


@dataclass(frozen=True)
class Denoiser:
    """Steps of one shape of batch."""

    model: Transformer
    mask_id: int
    dtype: str
    suffix_rows: int
    window_rows: int
    """Of the widest block."""
    reach: Reach
    """Which rows run between refreshes."""
    read: Read = read
    """As in Sampler."""

    def run(
        self,
        params: Params,
        pool: Pool,
        rows: Rows,
        canvas: Canvas,
        rules: Rules,
        steps: Int[Array, ""],
        forbidden: Bool[Array, " V"],
        end_ids: Bool[Array, " V"],
    ) -> Carry:
        """Up to `steps` steps, fewer where all rows are done before, or a watched one is due."""

        def wanted(state: Carry):
            due = jnp.any(rows.watched & (state.since == 0) & ~state.canvas.done)
            left = (state.steps < steps) & ~jnp.all(state.canvas.done)
            return left & ((state.steps == 0) | ~due)

        def one(state: Carry):
            now = rows._replace(since=state.since)
            return self._step(params, state, now, rules, forbidden, end_ids)

        zero = jnp.zeros((), jnp.float32)
        drift = jnp.zeros(len(rows.since), jnp.float32)
        begin = Carry(pool, canvas, rows.since, Work(*[zero] * 5), drift, jnp.int32(0))
        return lax.while_loop(wanted, one, begin)

    def _step(self, params, state: Carry, rows: Rows, rules, forbidden, end_ids) -> Carry:
        canvas = state.canvas
        seen = window(canvas, rules, self.mask_id, self.window_rows)
        refresh = (rows.since == 0) & ~canvas.done
        if self.reach == "suffix":
            found, pool, work, drift = self._whole(
                params, state.pool, rows, canvas, rules, seen, refresh
            )
        else:
            which, parts = self._parts(params, rows, canvas, rules, seen)
            found, pool, work, drift = lax.switch(
                jnp.where(jnp.any(refresh), len(parts), which),
                [
                    *parts,
                    lambda pool: self._whole(params, pool, rows, canvas, rules, seen, refresh),
                ],
                state.pool,
            )
        reading = read_window(
            self.model, params, found, None, seen, rules, canvas.steps, forbidden, self.read
        )
        new = commit(canvas, rules, seen, reading, self.mask_id, end_ids)
        due = (rows.every > 0) & (rows.since + 1 >= rows.every)
        since = jnp.where(due | (new.block != canvas.block), 0, rows.since + 1)
        since = jnp.where(canvas.done, rows.since, since)
        work = Work(*map(jnp.add, state.work, work))
        drift = jnp.maximum(state.drift, drift)
        return Carry(pool, new, since, work, drift, state.steps + 1)

    def _whole(self, params, pool: Pool, rows: Rows, canvas, rules, seen, refresh):
        """All rows of the suffix, and of the prefix in layers from the least depth on.

        Probes are rows of the prefix that run with the suffix through the shallow layers, and that
        no row sees: what the prefix's rows would be, saw they the suffix. From the least depth on
        they lie where the prefix's rows of their request come once it is at its own depth.
        """
        layers, page = self.model.config.layers, pool.k.shape[1]
        own, probes = self.suffix_rows, rows.probes.shape[1]
        places = rows.prefix[:, None] + jnp.arange(own)
        own_rows = jnp.clip(rules.length - rows.prefix, 0, own)
        real = places < rules.length[:, None]
        # Of a row that does not refresh, what is kept stays, apart from its window.
        first = self._first(canvas, rows)[:, None]
        inside = (places >= first) & (places < self._last(canvas, rules)[:, None])
        kept = real & (refresh[:, None] | inside) & ~canvas.done[:, None]
        zero = jnp.zeros_like(rows.prefix)

        def attention(layer, pool, q, k, v):
            if self.reach == "suffix":
                table, counts, seen = rows.table[layer], rows.counts, (k, v, own_rows)
            else:
                pool = write_kv(pool, rows.suffix[layer], zero, k, v, kept)
                table, counts, seen = *self._both(rows, rules, layer, page), None
            return attend_paged(q, pool.k, pool.v, table, counts, seen), pool

        running = jnp.concatenate([places, rows.probes], axis=1)
        rotary = self._rotary(running)

        def shallow(layer, carry):
            x, pool = carry

            def attend(pool, q, k, v):
                return attention(layer, pool, q, k[:, :own], v[:, :own])

            return self._layer(params, layer, x, running, rotary, pool, attend)

        least = jnp.min(jnp.where(refresh & (rows.prefix > 0), rows.depth, layers))
        x = self._embed(params, tokens_at(canvas.tokens, running), running)
        x, pool = lax.fori_loop(0, least, shallow, (x, pool))
        x, looked = x[:, :own], x[:, own:]
        prefix_rows = rows.counts.shape[1] * page
        drift = jnp.zeros(len(x), jnp.float32)
        if prefix_rows:
            before, there = row_places(rows.counts, page)
            both = jnp.concatenate([before, places], axis=1)
            rotary_both = self._rotary(both)
            rest = ((0, 0), (0, prefix_rows - probes))

            def deep(layer, carry):
                y, x, pool, drift = carry
                starts = refresh & (rows.depth == layer) & (layer > 0)

                def start(y):
                    stored = gather(pool.hidden, rows.hidden).astype(y.dtype)
                    found = drift
                    if probes:
                        kept = jnp.take_along_axis(stored, rows.probe_slots[..., None], axis=1)
                        counted = jnp.arange(probes) < rows.probe_count[:, None]
                        found = jnp.where(starts, drift_of(y[:, :probes], kept, counted), drift)
                    return jnp.where(starts[:, None, None], stored, y), found

                y, drift = lax.cond(jnp.any(starts), start, lambda y: (y, drift), y)
                begun = (layer >= rows.depth)[:, None]
                fresh = there & refresh[:, None] & begun
                at, turned = both, rotary_both
                if probes:
                    ahead = jnp.where(begun, before, jnp.pad(rows.probes, rest))
                    at = jnp.concatenate([ahead, places], axis=1)
                    turned = self._rotary(at)

                def attend(pool, q, k, v):
                    pool = write_kv(
                        pool, rows.table[layer], zero, k[:, :prefix_rows], v[:, :prefix_rows], fresh
                    )
                    return attention(layer, pool, q, k[:, prefix_rows:], v[:, prefix_rows:])

                joined = jnp.concatenate([y, x], axis=1)
                joined, pool = self._layer(params, layer, joined, at, turned, pool, attend)
                return joined[:, :prefix_rows], joined[:, prefix_rows:], pool, drift

            y = jnp.pad(looked, (*rest, (0, 0)))
            y = lax.cond(
                least == 0,
                lambda: jnp.where(
                    (rows.depth == 0)[:, None, None],
                    self._embed(params, tokens_at(canvas.tokens, before), before),
                    y,
                ),
                lambda: y,
            )
            _, x, pool, drift = lax.fori_loop(least, layers, deep, (y, x, pool, drift))
        active = ~canvas.done
        watched = refresh & rows.watched
        work = Work(
            jnp.sum(jnp.where(active, rules.length - rows.prefix, 0)) * layers * 1.0,
            jnp.sum(jnp.where(refresh, rows.prefix * (layers - rows.depth), 0)) * 1.0,
            jnp.sum(jnp.where(watched, rows.probe_count * rows.depth, 0)) * 1.0,
            len(x) * (own * layers + probes * least + prefix_rows * (layers - least)) * 1.0,
            jnp.sum(refresh & (rows.prefix > 0)) * 1.0,
        )
        return self._predicting(x, seen.positions - rows.prefix[:, None]), pool, work, drift

    def _parts(self, params, rows: Rows, canvas, rules, seen):
        """Which of some forms of a step that runs the window's rows alone and reads all others; and
        the forms."""
        widths = [self._width(self.window_rows)]
        if self.reach == "rest":  # in the narrowest of a few widths that hold it
            while widths[-1] < self.suffix_rows:
                widths.append(min(2 * widths[-1], self.suffix_rows))
        left = jnp.where(canvas.done, 0, rules.length - self._first(canvas, rows))
        which = jnp.sum(jnp.max(left) > jnp.array(widths[:-1], jnp.int32))
        return which, [
            lambda pool, width=width: self._window(width, params, pool, rows, canvas, rules, seen)
            for width in widths
        ]

    def _window(self, width: int, params, pool: Pool, rows: Rows, canvas, rules, seen):
        layers, page = self.model.config.layers, pool.k.shape[1]
        begin = self._first(canvas, rows)
        # Moved back where the window would end beyond the suffix; rows before it are not kept.
        start = jnp.clip(begin - rows.prefix, 0, self.suffix_rows - width)
        places = (rows.prefix + start)[:, None] + jnp.arange(width)
        inside = (places >= begin[:, None]) & (places < self._last(canvas, rules)[:, None])
        kept = inside & (places < rules.length[:, None]) & ~canvas.done[:, None]
        x = self._embed(params, tokens_at(canvas.tokens, places), places)
        rotary = self._rotary(places)

        def one(layer, carry):
            x, pool = carry

            def attend(pool, q, k, v):
                pool = write_kv(pool, rows.suffix[layer], start, k, v, kept)
                table, counts = self._both(rows, rules, layer, page)
                return attend_paged(q, pool.k, pool.v, table, counts, None), pool

            return self._layer(params, layer, x, places, rotary, pool, attend)

        x, pool = lax.fori_loop(0, layers, one, (x, pool))
        zero = jnp.zeros((), jnp.float32)
        useful, computed = jnp.sum(kept) * layers * 1.0, zero + len(x) * width * layers
        work = Work(useful, zero, zero, computed, zero)
        found = self._predicting(x, seen.positions - (rows.prefix + start)[:, None])
        return found, pool, work, jnp.zeros(len(x), jnp.float32)

    def _width(self, block_rows: int) -> int:
        return min(block_rows + self.model.config.shifted, self.suffix_rows)

    def _first(self, canvas: Canvas, rows: Rows) -> Int[Array, " b"]:
        """The first row of the window: the one that predicts the block's first token."""
        return jnp.maximum(canvas.block - self.model.config.shifted, rows.prefix)

    def _last(self, canvas: Canvas, rules: Rules) -> Int[Array, " b"]:
        if self.reach == "block":
            return jnp.minimum(canvas.block + rules.block_size, rules.end)
        return rules.length

    def _both(self, rows: Rows, rules: Rules, layer, page: int) -> tuple[Array, Array]:
        """Pages of prefix and suffix as one table."""
        pages = rows.suffix.shape[2]
        left = (rules.length - rows.prefix)[:, None] - jnp.arange(pages) * page
        table = jnp.concatenate([rows.table[layer], rows.suffix[layer]], axis=1)
        return table, jnp.concatenate([rows.counts, jnp.clip(left, 0, page)], axis=1)

    def _predicting(self, x: Float[Array, "b q d"], places: Int[Array, "b w"]) -> Array:
        rows = jnp.clip(places - self.model.config.shifted, 0, x.shape[1] - 1)
        return jnp.take_along_axis(x, rows[..., None], axis=1)

    def _embed(self, params, tokens, places) -> Float[Array, "b q d"]:
        return self.model.embed(params, tokens, Inputs(places, None, None), self.dtype)

    def _rotary(self, places):
        return self.model.rotary(Inputs(places, None, None))

    def _layer(self, params, layer, x, places, rotary, pool: Pool, attention: Callable):
        return run_layer(self.model, params, layer, x, places, rotary, pool, attention)


def drift_of(
    seen: Float[Array, "b n d"], kept: Float[Array, "b n d"], counted: Bool[Array, "... n"]
) -> Float[Array, " b"]:
    """How far rows are from those that were kept: 1 less their cosine, the mean over rows that are
    counted; 0 where none is."""
    wide = [x.astype(jnp.float32) for x in (seen, kept)]
    dot = jnp.sum(wide[0] * wide[1], axis=-1)
    size = jnp.linalg.norm(wide[0], axis=-1) * jnp.linalg.norm(wide[1], axis=-1)
    far = jnp.where(counted, 1 - dot / jnp.maximum(size, 1e-30), 0)
    return jnp.sum(far, axis=-1) / jnp.maximum(jnp.sum(counted, axis=-1), 1)


def run_layer(
    model: Transformer,
    params: Params,
    layer: Int[Array, ""],
    x: Float[Array, "b q d"],
    places: Int[Array, "b q"],
    rotary,
    pool: Pool,
    attention: Callable[..., tuple[Array, Pool]],
) -> tuple[Float[Array, "b q d"], Pool]:
    """A layer whose attention is `attention(pool, q, k, v)`: the mixed values, and the new pool."""
    after = [pool]

    def attend(q, k, v, segments, causal, drop):
        mixed, after[0] = attention(pool, q, k, v)
        return mixed

    weights = jax.tree.map(
        lambda w: lax.dynamic_index_in_dim(w, layer, keepdims=False), params["blocks"]
    )
    inside = replace(model, attend=attend)
    return inside.layer(weights, x, layer, rotary, Inputs(places, None, None)), after[0]


def write_kv(pool: Pool, table, first, k, v, wanted) -> Pool:
    return pool._replace(
        k=write(pool.k, table, first, k, wanted), v=write(pool.v, table, first, v, wanted)
    )
