# SPDX-License-Identifier: Apache-2.0
"""Where a run's checkpoints lie: on a disk or in an object store, and what differs between them.

Invariant: at every moment a checkpoint is there whole or is none. On a disk one rename makes it
appear and sets it aside. A store has no such step for several objects; there a checkpoint is one
while its commit mark, one object that Orbax writes last, is there.
"""

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Any, cast

from etils import epath
from orbax.checkpoint.path import atomicity_types

from geojax.config import CheckpointConfig, ConfigError, RunError, require
from geojax.config.folder import scheme

_SEE = (
    "see to the network and the credentials (`gcloud auth application-default login`, or the file "
    "in GOOGLE_APPLICATION_CREDENTIALS; GOOGLE_CLOUD_PROJECT)"
)

type Folder = Path | epath.Path
"""epath's where it is a URL."""


def checkpoint_root(config: CheckpointConfig, run: Path) -> Folder:
    """The folder that has a run's `checkpoints` or `slices/NAME/checkpoints`, which need not be
    there yet; ConfigError where its store cannot be used."""
    if not config.folder:
        return run.resolve()
    if not scheme(config.folder):
        return Path(config.folder)
    _require_store(config.folder)
    return epath.Path(config.folder)


def checkpoint_folder(config: CheckpointConfig, folder: Path, slice_: str = "") -> Folder:
    """Of the run in `folder`, or of its slice `slice_`, whose own folder that is."""
    root = checkpoint_root(config, folder)
    return (root / "slices" / slice_ if slice_ and config.folder else root) / "checkpoints"


@contextmanager
def reading(folder: Folder) -> Generator[None]:
    """What goes wrong with a store, as RunError."""
    try:
        yield
    except (ConfigError, RunError):
        raise
    except Exception as error:  # whatever the store raises
        if isinstance(folder, Path):
            raise
        raise RunError(
            f"checkpoints in {folder} cannot be read: {_line(error)}; {_SEE}, then try again"
        ) from error


def holds_any(folder: Folder) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def set_aside(place: Folder) -> str:
    """Make a checkpoint none, and keep its files for whoever wants to see them; their new name.

    In a store its commit mark goes first: should what follows be cut short, the next run removes
    what is left, as it does of a save that was killed.
    """
    if isinstance(place, Path):
        aside = _unused(place.with_name(f"{place.name}.damaged"))
    else:
        aside = _unused(place.parent.with_name(f"damaged-{place.name}"))
        (place / atomicity_types.COMMIT_SUCCESS_FILE).unlink(missing_ok=True)
    place.rename(cast(Any, aside))
    return aside.name


def stored(folder: epath.Path) -> dict[str, tuple[int, str]]:
    """Bytes and MD5 of every object below `folder`, by name, as the store took them in."""
    files, path = _filesystem(str(folder))
    return {
        name.removeprefix(f"{path}/"): (int(found["size"]), found.get("md5Hash") or found["crc32c"])
        for name, found in files.find(path, detail=True).items()
    }


def _require_store(url: str) -> None:
    missing = [name for name in ("gcsfs", "google.cloud.storage") if not _installed(name)]
    require(
        not missing,
        f"checkpoint.folder {url!r} needs {', '.join(missing)}; install it with `pip install "
        "'geojax[gcs]'`",
    )
    bucket = url.split("/")[2]
    try:
        found = _filesystem(url)[0].exists(bucket)
    except Exception as error:  # whatever the store raises
        raise ConfigError(
            f"checkpoint.folder {url!r} cannot be reached: {_line(error)}; {_SEE}"
        ) from error
    require(
        found,
        f"checkpoint.folder {url!r}: there is no bucket {bucket!r}, or these credentials may not "
        "see it; make it, or name another",
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec.config
    import fsspec.core

    # Arrays are written and read past it, and by other processes: what it remembers may be old.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    return fsspec.core.url_to_fs(url)


def _unused[F: Folder](path: F) -> F:
    """`path`, or with a number behind it where there is something by that name."""
    numbered = (path.with_name(f"{path.name}{n}") for n in count(2))
    return next(p for p in chain([path], numbered) if not p.exists())
