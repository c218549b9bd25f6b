# SPDX-License-Identifier: Apache-2.0
"""Squared norms of parts of a gradient, block by block: what the noise scale is made of."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from geojax.meshes.strategy import Strategy
from geojax.models.params import block_dims
from geojax.models.transformer import Params


class Squares(NamedTuple):
    """Squared norms of gradients of parts of a batch, summed over the parts, and the squares of the
    parts' tokens; the noise scale follows from them (geojax.cona.noise).

    By block: a layer's tensor [L], layers in storage order; a table's row [V]; any other tensor
    whole. So a preconditioner that is one number a block can weigh them afterwards.
    """

    parts: Any
    """Like the parameters: over micro-batches and copies, as far as the strategy has their
    gradients apart (`gradient_parts`)."""
    parts_tokens: Any
    norms: Any
    """Like the norms among the blocks: over sequences."""
    norms_tokens: Any


def gradient_parts(strategy: Strategy) -> int:
    """Parts of a batch whose gradients a strategy computes apart: micro-batches, unless a pipeline
    differentiates all of them at once, and copies, unless FSDP sums theirs layer by layer."""
    micro_batches = strategy.micro_batches if strategy.pp == 1 else 1
    return micro_batches * (strategy.dp if strategy.sharding != "all" else 1)


def block_squares(tree: Params) -> Params:
    """Sum of squares of each block of a tree like the parameters; float32 or wider."""

    def squares(path, x: Array) -> Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return jnp.sum(jnp.square(wide), axis=range(block_dims(path), x.ndim))

    return jax.tree_util.tree_map_with_path(squares, tree)


def block_norms(blocks: Params) -> Params:
    """The norms among stacked parameters."""
    return {name: leaves for name, leaves in blocks.items() if name.endswith("_norm")}
