# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of everything a run needs to go on, through Orbax.

Invariant: a checkpoint appears whole or not at all (Orbax renames it into place when it is
written), and the newest whole one is what a run resumes from. Saving goes on in the background; the
arrays handed over are copied first, so the run may change its own.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from geojax.config import CheckpointConfig, ConfigError, RunError, require

logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax narrates; its errors are raised too


class Checkpoints:
    """The checkpoints of one run folder, oldest first; numbered by save."""

    def __init__(self, folder: Path, config: CheckpointConfig):
        """`folder` is made if need be."""
        newest: Any = ocp.training.preservation_policies.LatestN(config.keep)
        self._checkpointer = ocp.training.Checkpointer(
            str(folder.resolve()),
            preservation_policy=newest,
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def empty(self) -> bool:
        return self._checkpointer.latest is None

    def save(self, state: Any, meta: dict[str, Any]) -> None:
        """Save a pytree of arrays and JSON-able facts about it, in the background.

        Leaves may be spread over devices and processes, all of which call this. Waits for a save
        that is still going on; RunError where that one failed.
        """
        latest = self._checkpointer.latest
        copied = jax.tree.map(_snapshot, state)
        number = latest.step + 1 if latest else 0
        with self._writing():
            self._checkpointer.save_async(number, copied, force=True, custom_metadata=meta)

    def restore(self, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """State and facts of the newest checkpoint on disk; `abstract` is a pytree of its shapes,
        None for whatever is there.

        A leaf with a sharding is read to where that says, whatever mesh wrote it; one without is a
        host array. ConfigError where the shapes are those of another model.
        """
        found = self._checkpointer.metadata()
        if abstract is None:
            abstract = found.metadata
        _check_shapes(found.metadata, abstract, self._checkpointer.directory)
        wanted = jax.tree.map(
            lambda x: x if getattr(x, "sharding", None) else np.empty(x.shape, x.dtype), abstract
        )
        return self._checkpointer.load(abstract_state=wanted), self.meta()

    def meta(self) -> dict[str, Any]:
        """Facts of the newest checkpoint on disk, before any save of this object's."""
        return cast(dict[str, Any], self._checkpointer.metadata().custom_metadata)

    def wait(self) -> None:
        """Wait until the last save is on disk; RunError where it failed."""
        with self._writing():
            self._checkpointer.wait()

    def close(self) -> None:
        """Wait until the last save is on disk; RunError where it, or one before, failed."""
        with self._writing():
            self._checkpointer.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the storage raises, a full disk among it
            reason = " ".join(str(error).split())[:200]
            raise RunError(
                f"a checkpoint could not be written to {self._checkpointer.directory}: {reason}; "
                "those before it are whole: make room, then go on with `geojax train --resume`"
            ) from error


def read_params(run: Path) -> tuple[Any, dict[str, Any]]:
    """Parameters in a run folder's newest checkpoint, and its facts.

    Host arrays, layers in the model's order. ConfigError where there is no checkpoint.
    """
    folders = [run / "checkpoints", *sorted(run.glob("slices/*/checkpoints"))]
    there = [folder for folder in folders if folder.is_dir() and any(folder.iterdir())]
    require(there, f"{run} has no checkpoint yet; let the run save one, or name another folder")
    newest = max(there, key=lambda folder: max(p.stat().st_mtime for p in folder.iterdir()))
    with Checkpoints(newest, CheckpointConfig()) as checkpoints:
        require(not checkpoints.empty, f"{run} has no checkpoint yet; let the run save one")
        state, meta = checkpoints.restore(None)
    if "params" in state:  # of slices: what they share
        return state["params"], meta
    params, order = state["state"]["params"], meta["layer_order"]
    if order is not None:
        place = np.argsort(order)
        params["blocks"] = jax.tree.map(lambda x: x[place], params["blocks"])
    return params, meta


def _snapshot(x: Any) -> Any:
    """A copy that the run cannot change while it is being written."""
    if not isinstance(x, jax.Array):
        return np.array(x, copy=True)
    if next(iter(x.devices())).platform != "cpu":
        return x  # Orbax copies it to the host before `save` returns
    return np.array(x, copy=True) if x.is_fully_addressable else jnp.copy(x)


def _check_shapes(stored: Any, abstract: Any, folder: Any) -> None:
    theirs, ours = _shapes(stored), _shapes(abstract)
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise ConfigError(
                f"the checkpoint in {folder} is of another model or optimizer: {name} is "
                f"{theirs.get(name, 'missing')} there and {ours.get(name, 'absent')} in the "
                "config; resume with the config that wrote it, or start a new run folder"
            )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(_key(k) for k in path): tuple(leaf.shape) for path, leaf in leaves}


def _key(entry: Any) -> str:
    """Name of a path entry; Orbax stores named tuples as dicts of their fields."""
    return str(next(getattr(entry, a) for a in ("key", "name", "idx") if hasattr(entry, a)))
