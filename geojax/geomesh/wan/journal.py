# SPDX-License-Identifier: Apache-2.0
"""The coordinator's memory: decisions in the order in which they were made, one JSON line each.

Invariant: an entry that anybody heard of is on disk. Each line carries a hash over all lines up to
it, so that two journals that ever differed are never taken for one. A last line that was torn by a
crash, or by a disk that was full for a moment, was heard by nobody, and is removed.
"""

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from geojax.config import ConfigError, RunError

type Entry = dict[str, Any]


class Journal:
    """Entries of one file, held by one process."""

    def __init__(self, path: Path):
        """Open or make it. RunError where another process holds it, ConfigError where a line other
        than a torn last one is damaged."""
        self.path = path
        self._file = path.open("ab+", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise RunError(
                f"another coordinator holds {path}; stop it, or wait for its end"
            ) from error
        self._file.seek(0)
        content = self._file.readall()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
        self.entries: list[Entry] = []
        self.chains = [""]
        """After so many entries."""
        for number, line in enumerate(content[:whole].splitlines(), 1):
            entry: Entry = {}
            try:
                entry = json.loads(line)
                intact = entry.pop("chain") == _chain(self.chains[-1], entry)
            except (ValueError, KeyError, AttributeError):
                intact = False
            if not intact:
                self._file.close()
                raise ConfigError(
                    f"{path}:{number} is damaged; put the file back from a copy, or start a new run"
                )
            self._remember(entry)
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)  # or a crash may lose the new file's name
        os.close(directory)

    def append(self, entry: Entry) -> None:
        """Return once it is on disk. OSError, with the file as it was, where it cannot be there."""
        line = json.dumps(entry | {"chain": _chain(self.chains[-1], entry)}) + "\n"
        whole, left = self._file.seek(0, os.SEEK_END), line.encode()
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(whole)
            raise
        self._remember(entry)

    def close(self) -> None:
        self._file.close()

    def _remember(self, entry: Entry) -> None:
        self.chains.append(_chain(self.chains[-1], entry))
        self.entries.append(entry)


def _chain(before: str, entry: Entry) -> str:
    text = before + json.dumps(entry, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
