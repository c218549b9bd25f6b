# SPDX-License-Identifier: Apache-2.0
"""Folders by their names: which ones checkpoints may lie in, and that all others are local.

Invariant: no URL becomes a local folder by mistake.
"""

import re
from pathlib import Path

from geojax.config.base import require

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/")  # pathlib makes one slash of two
_KNOWN = "gs"


def scheme(folder: str | Path) -> str:
    """Of a URL, such as gs; empty for a local path."""
    found = _SCHEME.match(str(folder))
    return found[1] if found else ""


def require_local(path: str | Path) -> None:
    """ConfigError where `path` is a URL."""
    there = scheme(path)
    url = re.sub(":/+", "://", str(path), count=1)
    require(
        not there,
        f"{url} is no local path, and all that a run reads and writes is local but for its "
        f"checkpoints: name a local folder here, and set checkpoint.folder to {url!r}",
    )


def require_checkpoint_folder(folder: str) -> None:
    """ConfigError unless checkpoints can lie there."""
    there = scheme(folder)
    require(
        there in ("", _KNOWN),
        f"checkpoint.folder {folder!r}: {there}:// is not known; Orbax keeps arrays on disks and "
        f"in Google Cloud Storage: use {_KNOWN}://BUCKET/PATH, or an absolute path",
    )
    require(
        re.match(f"{_KNOWN}://[^/]+" if there else "/", folder),
        f"checkpoint.folder {folder!r} must be {_KNOWN}://BUCKET/PATH or an absolute path, for the "
        "run may go on from another working folder; use one of these",
    )
