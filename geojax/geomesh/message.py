# SPDX-License-Identifier: Apache-2.0
"""The frame around encoded bytes: who sends it, for which round, and what it weighs.

Invariant: a frame that opens is the one that was sent, whole, by that slice for that round.
"""

import struct
import zlib
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from geojax.config import RunError

_FORMAT = struct.Struct("<4sIIQQ")
_CHECKSUM = struct.Struct("<I")  # of all the rest
_MAGIC = b"GJX1"
FRAME_BYTES = _FORMAT.size + _CHECKSUM.size


class MessageError(RunError):
    """A message that is not what its slot in the round should hold; names the slice."""


class Header(NamedTuple):
    """What a message says beside its body."""

    round: int
    slice: int
    """Index of the sender."""
    tokens: int
    """Loss-bearing tokens behind the pseudo-gradient; 0: leave it out of the merge."""
    steps: int
    """Inner steps behind it."""


def pack(header: Header, body: UInt8[np.ndarray, " n"]) -> UInt8[np.ndarray, " m"]:
    """Header and body as one buffer of FRAME_BYTES more than the body."""
    frame = np.empty(FRAME_BYTES + body.size, np.uint8)
    frame[FRAME_BYTES:] = body
    start = _FORMAT.pack(_MAGIC, *header)
    start += _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(start)))
    frame[:FRAME_BYTES] = np.frombuffer(start, np.uint8)
    return frame


def version(frame: UInt8[np.ndarray, " m"]) -> str:
    """Its checksum, which tells two messages of one slice and round apart: a slice that was started
    again within a round sends another one."""
    return frame[_FORMAT.size : FRAME_BYTES].tobytes().hex()


def unpack(
    frame: UInt8[np.ndarray, " m"], round_: int, slice_: int, name: str
) -> tuple[Header, UInt8[np.ndarray, " n"]]:
    """Header and body (a view); MessageError unless it is slice `slice_`'s for `round_`, intact."""
    if frame.size < FRAME_BYTES:
        raise MessageError(
            f"slice {name}: its message for round {round_} was cut to {frame.size} bytes on the way"
        )
    start, body = frame[: _FORMAT.size].tobytes(), frame[FRAME_BYTES:]
    (checksum,) = _CHECKSUM.unpack(frame[_FORMAT.size : FRAME_BYTES].tobytes())
    magic, *fields = _FORMAT.unpack(start)
    header = Header(*fields)
    if magic != _MAGIC or (header.round, header.slice) != (round_, slice_):
        raise MessageError(
            f"slice {name}: its message for round {round_} is not one (found {magic!r}, round "
            f"{header.round}, slice {header.slice}); do all slices run the same version and config?"
        )
    if zlib.crc32(body, zlib.crc32(start)) != checksum:
        raise MessageError(
            f"slice {name}: its message for round {round_} was damaged on the way (checksum)"
        )
    return header, body
