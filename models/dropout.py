# SPDX-License-Identifier: Apache-2.0
"""Dropout that does not depend on the mesh.

Invariant: whether an element is dropped is a function of (seed, step, layer, site, global sample,
place in the sequence or head), never of a device or a micro-batch, so that every strategy drops the
same elements and a recomputed layer drops them again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt32

SITES = 4
EMBEDDING, PROBABILITIES, ATTENTION, MLP = range(SITES)
KEPT_MASK = "dropout mask"
"""Name by which policies of `jax.checkpoint` know masks: random bits cost more than their bytes."""


class Dropout(NamedTuple):
    """What a layer's masks follow from."""

    key: Array
    """Of the step."""
    samples: UInt32[Array, " b"]
    """Global number of each sequence."""
    layer: Int[Array, ""] | int
    """From 1 on; the embeddings are layer 0."""

    def at(self, site: int) -> Array:
        """Keys [b] of one site of this layer."""
        key = jax.random.fold_in(self.key, self.layer * SITES + site)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, self.samples)


def drop_rows(
    x: Float[Array, "b r d"],
    rate: float,
    dropout: Dropout | None,
    site: int,
    first_row: Array | int,
) -> Float[Array, "b r d"]:
    """Zero elements of x at `rate` and scale the rest; row i is place first_row + i of its
    sequence."""
    if dropout is None or not rate:
        return x
    places = first_row + jnp.arange(x.shape[1])
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(dropout.at(site), places)
    return _drop(x, rate, keys)


def drop_probs(
    x: Float[Array, "b h t s"], rate: float, dropout: Dropout | None, first_head: Array | int
) -> Float[Array, "b h t s"]:
    """The same of attention probabilities; head i is the model's head first_head + i."""
    if dropout is None or not rate:
        return x
    heads = first_head + jnp.arange(x.shape[1])
    keys = dropout.at(PROBABILITIES)
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys, heads)
    return _drop(x, rate, keys)


def _drop(x: Array, rate: float, keys: Array) -> Array:
    """keys [b, n] for x [b, n, ...]; bits are compared as integers, so that the mask is the same in
    any dtype."""
    bits = jax.vmap(jax.vmap(lambda k: jax.random.bits(k, x.shape[2:], "uint32")))(keys)
    keep = checkpoint_name(bits >= jnp.uint32(round(rate * 2**32)), KEPT_MASK)
    return jnp.where(keep, x / (1 - rate), 0)
