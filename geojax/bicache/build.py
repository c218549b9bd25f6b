# SPDX-License-Identifier: Apache-2.0
"""Filling an entry of the store: one segment through the shallow layers, after its parents.

Invariant: what is written follows from the entry's key alone; a build reads its parents' pages and
nothing of any request. Segments are padded to whole pages, and padding is neither seen nor kept.

Shapes: q rows of the segment and of the masks behind it, j pages of its parents, i of its own.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from geojax.bicache.denoise import run_layer, write_kv
from geojax.bicache.paged import attend_paged, write
from geojax.bicache.pages import Pool
from geojax.models.transformer import Inputs, Params, Transformer


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
