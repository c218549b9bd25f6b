# SPDX-License-Identifier: Apache-2.0
"""Pseudo-gradients to bytes and back, with error feedback.

Works on the host in numpy, elementwise and in a fixed order, so that copies of the merged result on
unlike machines are equal bit for bit; whatever needs a reduction (magnitudes) is computed by the
sender and travels. Tiles of 512k elements: small enough for the caches, large enough that the
interpreter's share is small.

sign (Bernstein et al. 2018, signSGD; error feedback: Karimireddy et al. 2019): x is sent as
s * sign(x) with s = mean|x| over its group, the scale that minimises the squared error. Zero has
the sign of its sign bit. int8: x is sent as round(x / s) with s = max|x| / 127 over its group.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float32, UInt8

from geojax.geomesh.layout import Layout, Segment

Leaves = Sequence[Float32[np.ndarray, "..."]]
"""Leaves of a parameter pytree, in its order, each C-contiguous float32."""
Message = UInt8[np.ndarray, "_"]

_TILE = 1 << 19
_THREADED = 1 << 22
_ELEMENT_TYPES = {
    "sign": np.uint8,
    "int8": np.int8,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp32": np.float32,
}
# Row B holds the eight signs of byte B, most significant bit first; a set bit is a minus.
_SIGNS = np.float32(1) - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(
    np.float32
)


@dataclass(frozen=True)
class Share:
    """A part of a total, summed over pieces of a message."""

    part: float = 0
    total: float = 0

    def __add__(self, other: "Share") -> "Share":
        return Share(self.part + other.part, self.total + other.total)

    @property
    def fraction(self) -> float | None:
        return self.part / self.total if self.total else None


def encode(leaves: Leaves, layout: Layout, residual: Leaves | None = None) -> tuple[Message, Share]:
    """The elements of `layout` as `layout.num_bytes` bytes, and the share of energy (squared norm)
    of what is sign-coded that they carry.

    With error feedback, `residual` (shaped like `leaves`) is added first and overwritten, in place,
    with what the message does not carry.
    """
    message = np.empty(layout.num_bytes, np.uint8)

    def encode_rows(segment: Segment, rows: slice, body: Message) -> Share:
        x = _groups(leaves, segment)[rows]
        error = None if residual is None else _groups(residual, segment)[rows]
        scales, elements = (part[rows] for part in _split(segment, body))
        if segment.codec == "sign":
            return _encode_sign(x, error, scales, elements)
        if segment.codec == "int8":
            _encode_int8(x, error, scales, elements)
        else:
            _encode_float(x, error, elements)
        return Share()

    return message, sum(_over_rows(encode_rows, layout, message), Share())


def decode(
    messages: Sequence[Message], weights: Sequence[float], layout: Layout, out: Leaves
) -> None:
    """Write sum_i weights[i] * message_i, summed in that order, into the layout's part of `out`."""
    factors = np.asarray(weights, np.float32)

    def decode_rows(segment: Segment, rows: slice, *bodies: Message) -> None:
        target = _groups(out, segment)[rows]
        parts = [[part[rows] for part in _split(segment, body)] for body in bodies]
        for columns in _column_runs(segment.group):
            tile = target[:, columns]
            for i, (factor, (scales, elements)) in enumerate(zip(factors, parts, strict=True)):
                if segment.codec == "sign":
                    term = _decode_sign(scales * factor, elements, columns)
                elif segment.codec == "int8":
                    term = elements[:, columns] * (scales * factor)[:, None]
                else:
                    term = elements[:, columns].astype(np.float32) * factor
                if i == 0:
                    tile[...] = term
                else:
                    tile += term

    for _ in _over_rows(decode_rows, layout, *messages):
        pass


def sign_agreement(messages: Sequence[Message], layout: Layout) -> Share:
    """Signs that agree, over all pairs of messages: 0.5 of the total where they are unrelated.

    Nothing is counted where a layout has no signs.
    """
    result = Share()
    for segment, *bodies in _bodies(layout, *messages):
        if segment.codec != "sign":
            continue
        elements = [body[segment.scale_bytes :] for body in bodies]
        for i, first in enumerate(elements):
            for second in elements[i + 1 :]:
                differ = int(np.bitwise_count(first ^ second).sum())
                result += Share(segment.size - differ, segment.size)
    return result


def finite(message: Message, layout: Layout, largest: float) -> bool:
    """Whether all numbers that a message stands for are finite, and within `largest`."""
    for segment, body in _bodies(layout, message):
        scales, elements = _split(segment, body)
        numbers = scales if segment.scale_bytes else elements
        if not np.all(np.abs(numbers.astype(np.float32)) <= largest):
            return False
    return True


def _encode_sign(x, error, scales, elements) -> Share:
    total = np.zeros(len(x))
    norm = 0.0
    for columns in _column_runs(x.shape[1]):
        total += np.abs(_add(x, error, columns)).sum(axis=1)
    scales[:] = total / x.shape[1]
    kept = x if error is None else error
    for columns in _column_runs(x.shape[1]):
        tile = kept[:, columns]
        elements[:, _byte_columns(columns)] = np.packbits(np.signbit(tile), axis=1)
        norm += float(np.vdot(tile, tile))
        if error is not None:
            tile -= np.copysign(scales[:, None], tile)
    return Share(float(np.square(scales, dtype=np.float64).sum()) * x.shape[1], norm)


def _encode_int8(x, error, scales, elements) -> None:
    largest = np.zeros(len(x), np.float32)
    for columns in _column_runs(x.shape[1]):
        np.maximum(largest, np.abs(_add(x, error, columns)).max(axis=1), out=largest)
    scales[:] = largest / np.float32(127)
    scales[scales < np.finfo(np.float32).tiny] = 0  # too imprecise to divide by
    divisor = np.where(scales > 0, scales, np.float32(1))[:, None]
    kept = x if error is None else error
    for columns in _column_runs(x.shape[1]):
        tile = kept[:, columns]
        levels = np.rint(tile / divisor)
        elements[:, columns] = levels
        if error is not None:
            tile -= levels * scales[:, None]


def _encode_float(x, error, elements) -> None:
    largest = ml_dtypes.finfo(elements.dtype).max
    for columns in _column_runs(x.shape[1]):
        tile = _add(x, error, columns)
        sent = np.clip(tile, -largest, largest).astype(elements.dtype)
        elements[:, columns] = sent
        if error is not None:
            tile -= sent.astype(np.float32)


def _decode_sign(scales, elements, columns: slice):
    packed = elements[:, _byte_columns(columns)]
    one_group = len(scales) == 1  # scaling the table costs less than scaling the tile
    signs = (_SIGNS * scales if one_group else _SIGNS).take(packed, axis=0)
    signs = signs.reshape(len(scales), -1)[:, : columns.stop - columns.start]
    return signs if one_group else np.multiply(signs, scales[:, None], out=signs)


def _add(x, error, columns: slice):
    """x + error in these columns, kept in `error` where there is one."""
    if error is None:
        return x[:, columns]
    tile = error[:, columns]
    tile += x[:, columns]
    return tile


def _over_rows(work: Callable[..., Any], layout: Layout, *messages: Message) -> Iterator[Any]:
    """`work(segment, rows, *bodies)` over all runs of groups; results in order.

    The calls share nothing, so large layouts use two threads (numpy releases the GIL; more gain
    little) without any effect on the result.
    """
    tasks = (
        (segment, rows, *bodies)
        for segment, *bodies in _bodies(layout, *messages)
        for rows in _row_runs(segment)
    )
    if layout.num_elements < _THREADED:
        yield from (work(*task) for task in tasks)
        return
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(lambda task: work(*task), tasks)


def _bodies(layout: Layout, *messages: Message) -> Iterator[tuple]:
    """(segment, its bytes in each message) in order."""
    offset = 0
    for segment in layout.segments:
        end = offset + segment.num_bytes
        yield segment, *(message[offset:end] for message in messages)
        offset = end


def _groups(leaves: Leaves, segment: Segment) -> Float32[np.ndarray, "groups group"]:
    leaf = leaves[segment.leaf]
    assert leaf.flags.c_contiguous, "a leaf must be contiguous, or writes into it would be lost"
    return leaf.reshape(-1)[segment.start : segment.stop].reshape(segment.groups, segment.group)


def _split(segment: Segment, body: Message) -> tuple[np.ndarray, np.ndarray]:
    """Magnitudes [groups] and elements [groups, ...] of a segment, as views of its bytes."""
    scales = body[: segment.scale_bytes].view(np.float32)
    elements = body[segment.scale_bytes :].reshape(segment.groups, segment.group_bytes)
    return scales, elements.view(_ELEMENT_TYPES[segment.codec])


def _row_runs(segment: Segment) -> Iterator[slice]:
    """Runs of groups that fill one tile, or one group where it is larger than that."""
    rows = max(1, _TILE // segment.group)
    for start in range(0, segment.groups, rows):
        yield slice(start, min(start + rows, segment.groups))


def _column_runs(group: int) -> Iterator[slice]:
    """Columns of a group in runs of at most one tile; each begins at a whole byte."""
    for start in range(0, group, _TILE):
        yield slice(start, min(start + _TILE, group))


def _byte_columns(columns: slice) -> slice:
    return slice(columns.start // 8, -(-columns.stop // 8))
