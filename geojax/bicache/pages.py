# SPDX-License-Identifier: Apache-2.0
"""Memory for keys, values and hidden states, in pages: arrays on the device, books on the host.

Invariant: every page is free or has one owner; what owners hold and what is free add up to the
pool, and all arrays were made when the pool was. A key/value page holds PAGE rows of one layer, a
hidden page PAGE rows of the residual stream; page 0 of each kind belongs to nobody, is all zeros,
and stands where a table has no page.

Shapes: n key/value pages, m hidden pages, g rows of a page, k key/value heads, e head size, d model
width.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from geojax.config import RunError, require
from geojax.diffusion.canvas import power_of_two
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


@dataclass(frozen=True)
class Sizes:
    """Memory of an engine."""

    kv_bytes: float
    """Of keys and values: the store's, and of requests that run."""
    hidden_bytes: float
    """Of the store's hidden states."""
    page: int = PAGE
    """Rows of a page."""
    quota_bytes: float | None = None
    """Keys and values that entries of one salt may hold."""


class Memory:
    """A pool and the books of its pages. Programs take the pool over, and give it back changed."""

    def __init__(
        self, config: TransformerConfig, dtype: DTypeLike, sizes: Sizes, hidden: bool = True
    ):
        """ConfigError where a size is that of less than a page. `hidden`: whether hidden states
        are stored at all; else they take no memory."""
        self.page = sizes.page
        kv_page = kv_page_bytes(config, dtype, self.page)
        hidden_page = hidden_page_bytes(config, dtype, self.page)
        self.kv = Pages(_count("kv_bytes", sizes.kv_bytes, kv_page))
        self.hidden = Pages(
            _count("hidden_bytes", sizes.hidden_bytes, hidden_page) if hidden else 2
        )
        self.quota = None if sizes.quota_bytes is None else int(sizes.quota_bytes // kv_page)
        """Key/value pages."""
        self._new = partial(make_pool, config, self.kv.count, self.hidden.count, dtype, self.page)
        self.pool = self._new()
        self.losses = 0
        """How often the pool was lost with all that was in it."""

    @contextmanager
    def keeping(self, forget: Callable[[], None]) -> Generator[None]:
        """A program that fails may leave no pool: then there is a new one, `forget` is called, and
        whoever had pages has lost what was in them."""
        try:
            yield
        except BaseException:
            if not _whole(self.pool):
                self.pool = self._new()
                forget()
                self.losses += 1
            raise

    def clear(self, kv_ids: np.ndarray) -> None:
        """Zeros into key/value pages, for an owner who must find numbers."""
        ids = np.zeros(power_of_two(len(kv_ids)), np.int32)
        ids[: len(kv_ids)] = kv_ids
        self.pool = _cleared(self.pool, ids)


def _count(name: str, given: float, page: int) -> int:
    """Pages in so many bytes."""
    count = int(given // page)
    require(
        count >= 2,
        f"{name} {given:g} holds nothing: a page takes {page} bytes, and one stays empty; give "
        f"{2 * page} or more",
    )
    return count


def _whole(pool: Pool) -> bool:
    """Whether its arrays are there, and what was to be written into them is."""
    try:
        return not any(x.is_deleted() for x in jax.block_until_ready(pool))
    except Exception:  # whatever a failed program left
        return False


@partial(jax.jit, donate_argnums=0)
def _cleared(pool: Pool, ids: Int[Array, " n"]) -> Pool:
    return pool._replace(k=pool.k.at[ids].set(0), v=pool.v.at[ids].set(0))
