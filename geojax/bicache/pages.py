# SPDX-License-Identifier: Apache-2.0
"""Memory for keys, values and hidden states, in pages: arrays on the device, books on the host.

Invariant: every page is free or has one owner; what owners hold and what is free add up to the
pool, and all arrays were made when the pool was. A key/value page holds PAGE rows of one layer, a
hidden page PAGE rows of the residual stream; page 0 of each kind belongs to nobody, is all zeros,
and stands where a table has no page.

Shapes: n key/value pages, m hidden pages, g rows of a page, k key/value heads, e head size, d model
width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from geojax.config import RunError, require
from geojax.models.config import TransformerConfig

PAGE = 64
"""Rows of a page; a tile of the GPU kernel."""


class Pool(NamedTuple):
    """On the device."""

    k: Float[Array, "n g k e"]
    v: Float[Array, "n g k e"]
    hidden: Float[Array, "m g d"]


class NoPagesError(RunError):
    """There are fewer free pages than were asked for."""


class QuotaError(NoPagesError):
    """A tenant holds all that its quota allows, in use; others are not affected."""


class CrowdedError(NoPagesError):
    """What other tenants store within their quotas leaves too few pages; no request's end changes
    that."""


def pages_of(rows: int, page: int = PAGE) -> int:
    """Pages that `rows` rows take."""
    return -(-rows // page)


def kv_page_bytes(config: TransformerConfig, dtype: DTypeLike, page: int = PAGE) -> int:
    return 2 * page * config.kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


def hidden_page_bytes(config: TransformerConfig, dtype: DTypeLike, page: int = PAGE) -> int:
    return page * config.dim * jnp.dtype(dtype).itemsize


class Pages:
    """The books of one kind of page."""

    def __init__(self, count: int):
        require(count >= 2, f"a pool of {count} pages holds nothing beside the empty one; give 2")
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> int:
        return len(self._taken)

    def take(self, count: int) -> np.ndarray:
        """Ids of `count` pages [count]; NoPagesError, and none taken, where fewer are free."""
        if count > len(self._free):
            raise NoPagesError(f"{count} pages are wanted and {len(self._free)} are free")
        ids = [self._free.pop() for _ in range(count)]
        self._taken.update(ids)
        return np.array(ids, np.int32)

    def give(self, ids: Sequence[int] | np.ndarray) -> None:
        """Back what `take` gave."""
        for page in np.asarray(ids).reshape(-1).tolist():
            assert page in self._taken, f"page {page} is given back, and nobody had it"
            self._taken.remove(page)
            self._free.append(page)


def make_pool(
    config: TransformerConfig,
    kv_pages: int,
    hidden_pages: int,
    dtype: DTypeLike,
    page: int = PAGE,
) -> Pool:
    """Zeros on the default device."""
    kv = (kv_pages, page, config.kv_heads, config.head_dim)
    zeros = jax.jit(jnp.zeros, static_argnums=(0, 1))
    dtype = jnp.dtype(dtype)
    return Pool(zeros(kv, dtype), zeros(kv, dtype), zeros((hidden_pages, page, config.dim), dtype))
