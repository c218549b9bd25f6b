# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's files were when it was written, so that damage is found when it is read.

Storage formats check parts of what they hold: of an array's own bytes a flipped bit passes for
another number. Invariant: a folder whose sums are there and agree is, byte for byte up to CRC-32,
what was written; in an object store, up to the MD5 that the store keeps of each object. A folder
without sums says nothing.
"""

import json
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from geojax.track.metrics import write_atomically
from geojax.train.storage import Folder, stored

SUMS = "checksums.json"
_PIECE_BYTES = 2**24


def write_sums(folder: Folder) -> None:
    """Write down size and sum of every file below `folder`."""
    sums = {name: (size, find()) for name, (size, find) in sorted(_files(folder).items())}
    text = json.dumps(sums, indent=1) + "\n"
    if isinstance(folder, Path):
        write_atomically(folder / SUMS, text)
    else:  # where an object appears whole or not at all
        (folder / SUMS).write_text(text)


def has_sums(folder: Folder) -> bool:
    return (folder / SUMS).is_file()


def damage(folder: Folder) -> str:
    """The first file that is not as `write_sums` found it, and how; empty where all are."""
    try:
        sums = json.loads((folder / SUMS).read_bytes())
        known = {name: (int(size), str(sum_)) for name, (size, sum_) in sums.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        if isinstance(error, OSError) and not isinstance(folder, Path):
            raise  # it may be the network
        return f"{SUMS} cannot be read"
    files = _files(folder)
    for name, (size, sum_) in known.items():
        if name not in files:
            return f"{name} is missing"
        there, find = files[name]
        if there != size:
            return f"{name} has {there} bytes, not {size}"
        if find() != sum_:
            return f"{name} is not what was written"
    return ""


def _files(folder: Folder) -> dict[str, tuple[int, Callable[[], str]]]:
    """Bytes of every file below `folder`, by name, and what finds its sum. A store is asked for
    both, for it would be slow to read there what may be many gigabytes."""
    found: dict[str, tuple[int, Callable[[], str]]]
    if isinstance(folder, Path):
        paths = (path for path in folder.rglob("*") if path.is_file())
        found = {str(p.relative_to(folder)): (p.stat().st_size, partial(_crc, p)) for p in paths}
    else:
        found = {name: (n, partial(str, sum_)) for name, (n, sum_) in stored(folder).items()}
    found.pop(SUMS, None)
    return found


def _crc(path: Path) -> str:
    """CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"
