# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's files were when it was written, so that damage is found when it is read.

Storage formats check parts of what they hold: of an array's own bytes a flipped bit passes for
another number. Invariant: a folder whose sums are there and agree is, byte for byte up to CRC-32,
what was written. A folder without sums says nothing.
"""

import json
import zlib
from pathlib import Path

from geojax.track.metrics import write_atomically

SUMS = "checksums.json"
_PIECE_BYTES = 2**24


def write_sums(folder: Path) -> None:
    """Write down size and CRC-32 of every file below `folder`."""
    sums = {str(path.relative_to(folder)): _sum(path) for path in _files(folder)}
    write_atomically(folder / SUMS, json.dumps(sums, indent=1) + "\n")


def has_sums(folder: Path) -> bool:
    return (folder / SUMS).is_file()


def damage(folder: Path) -> str:
    """The first file that is not as `write_sums` found it, and how; empty where all are."""
    try:
        sums = json.loads((folder / SUMS).read_bytes())
        known = {name: (int(size), str(crc)) for name, (size, crc) in sums.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return f"{SUMS} cannot be read"
    for name, (size, crc) in known.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if _sum(path)[1] != crc:
            return f"{name} is not what was written"
    return ""


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != SUMS)


def _sum(path: Path) -> tuple[int, str]:
    """Bytes and CRC-32 of a file."""
    crc = size = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
    return size, f"{crc:08x}"
