# SPDX-License-Identifier: Apache-2.0
"""What each parameter is, by its place in the pytree: the one fact that weight decay, compression
and sharding all need.

Invariant: every leaf has exactly one role, decided by its path and shape alone.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax

_TABLES = ("embed", "head", "positions", "types")


@dataclass(frozen=True)
class Role:
    """vector: norm scale or bias; matrix: weights of a layer; table: one row an entry."""

    kind: Literal["vector", "matrix", "table"]
    stacked: int
    """Tensors that lie on the leading dim: the layers of a stack, or 1."""


def roles(params: Any) -> Any:
    """A pytree like `params` (arrays or shapes) with a `Role` at every leaf."""
    return jax.tree_util.tree_map_with_path(_role, params)


def block_dims(path: tuple[Any, ...]) -> int:
    """Leading dims that number a leaf's blocks: 1 for layers and a table's rows, else 0."""
    return int(path[0].key == "blocks" or path[-1].key in _TABLES)


def _role(path: tuple[Any, ...], leaf: Any) -> Role:
    names = [entry.key for entry in path]
    in_stack = names[0] == "blocks"
    stacked = leaf.shape[0] if in_stack else 1
    if names[-1].endswith(("scale", "bias")) or leaf.ndim - in_stack < 2:
        return Role("vector", stacked)
    if names[-1] in _TABLES and not in_stack:
        return Role("table", 1)
    return Role("matrix", stacked)
