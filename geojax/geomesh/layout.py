# SPDX-License-Identifier: Apache-2.0
"""How a pseudo-gradient lies in a message: which elements share a magnitude, which stay dense.

Invariant: the segments of a layout cover every element of every leaf exactly once, and so do the
segments of its shards together; each segment is made of whole groups. A layout depends on shapes
and settings alone, so every slice computes the same one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from geojax.config import ExchangeConfig
from geojax.models.params import Role, roles

SCALE_BYTES = 4
_ELEMENT_BITS = {"sign": 1, "int8": 8, "fp16": 16, "bf16": 16, "fp32": 32}
_GROUPED = ("sign", "int8")


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a flattened leaf, in groups of `group` that share a magnitude."""

    leaf: int
    start: int
    stop: int
    group: int
    codec: str

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def groups(self) -> int:
        return self.size // self.group

    @property
    def scale_bytes(self) -> int:
        return SCALE_BYTES * self.groups if self.codec in _GROUPED else 0

    @property
    def group_bytes(self) -> int:
        """Bytes of one group's elements; the last byte is padded."""
        return -(-self.group * _ELEMENT_BITS[self.codec] // 8)

    @property
    def num_bytes(self) -> int:
        """Bytes in a message: all magnitudes, then all groups."""
        return self.scale_bytes + self.groups * self.group_bytes


@dataclass(frozen=True)
class Layout:
    """The segments of one message, in order."""

    segments: tuple[Segment, ...]

    @cached_property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    @cached_property
    def num_elements(self) -> int:
        return sum(segment.size for segment in self.segments)

    def flattened(self) -> "Layout":
        """The same bytes for elements that lie end to end in one flat leaf."""
        parts, offset = [], 0
        for segment in self.segments:
            end = offset + segment.size
            parts.append(replace(segment, leaf=0, start=offset, stop=end))
            offset = end
        return Layout(tuple(parts))

    def shard(self, index: int, shards: int) -> "Layout":
        """The index-th of `shards` parts, of about the same number of elements."""
        begin, end = (_cut(self.num_elements, i, shards) for i in (index, index + 1))
        parts, offset = [], 0
        for segment in self.segments:
            low, high = max(begin, offset), min(end, offset + segment.size)
            if low < high:
                shift = segment.start - offset
                parts += _whole_groups(segment, low + shift, high + shift)
            offset += segment.size
        return Layout(tuple(parts))


def make_layout(params: Any, config: ExchangeConfig) -> Layout:
    """Layout of `params` (a pytree of arrays or shapes) under the configured codec.

    Under sign and int8, vectors stay dense float32, tables have a magnitude a row, and matrices one
    a tensor (each layer of a stack is a tensor) or a row.
    """
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(roles(params)), strict=True)
    return Layout(
        tuple(_segment(i, leaf.shape, role, config) for i, (leaf, role) in enumerate(leaves))
    )


def _segment(leaf: int, shape: tuple[int, ...], role: Role, config: ExchangeConfig) -> Segment:
    size = 1
    for dim in shape:
        size *= dim
    if config.codec not in _GROUPED:
        return Segment(leaf, 0, size, size, config.codec)
    if role.kind == "vector":
        return Segment(leaf, 0, size, size, "fp32")
    by_row = role.kind == "table" or config.scales == "row"
    return Segment(leaf, 0, size, shape[-1] if by_row else size // role.stacked, config.codec)


def _cut(size: int, index: int, shards: int) -> int:
    """Border before shard `index`: a multiple of 8 elements, to spare padding."""
    return size if index == shards else size * index // shards // 8 * 8


def _whole_groups(segment: Segment, low: int, high: int) -> Iterable[Segment]:
    """[low, high) of a segment as segments of whole groups; a cut group becomes its own."""
    group, origin = segment.group, segment.start
    first = min(high, origin + -(-(low - origin) // group) * group)
    last = max(first, origin + (high - origin) // group * group)
    for start, stop, size in (
        (low, first, first - low),
        (first, last, group),
        (last, high, high - last),
    ):
        if start < stop:
            yield Segment(segment.leaf, start, stop, size, segment.codec)
