# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of everything a run needs to go on, through Orbax.

Invariant: a checkpoint appears whole or not at all (geojax.train.storage), and the newest one that
is still as it was written (geojax.train.checksums) is what a run resumes from. Saving goes on in
the background; the arrays handed over are copied first, so the run may change its own.
"""

import errno
import logging
import sys
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from geojax.config import CheckpointConfig, ConfigError, RunError, require
from geojax.config.files import read_config
from geojax.train.agree import first_chooses
from geojax.train.checksums import damage, has_sums, write_sums
from geojax.train.storage import Folder, checkpoint_root, holds_any, reading, set_aside

logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax narrates; its errors are raised too


# Where the folders of a save cannot be made in the background, threads wait minutes for them, and
# keep a process that has failed from ending.
_PROMPT = ocp.options.AsyncOptions(create_directories_asynchronously=False)


class Checkpoints:
    """The checkpoints of one run folder, oldest first; numbered by save."""

    def __init__(self, folder: Folder, config: CheckpointConfig, reads_only: bool = False):
        """`folder` is made if need be. `reads_only`: leave it as it is, since a run may write it.

        RunError where no checkpoint of several, or the only one, is as it was written.
        """
        newest: Any = ocp.training.preservation_policies.LatestN(config.keep)
        self._folder = folder.resolve() if isinstance(folder, Path) else folder
        with reading(self._folder):
            self._checkpointer = ocp.training.Checkpointer(
                str(self._folder),
                context=ocp.Context(async_options=_PROMPT),
                preservation_policy=newest,
                cleanup_tmp_directories=not reads_only,
            )
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._summed: Future[None] | None = None
        """Of the last save: that it is on disk, and its sums too."""
        try:
            with reading(self._folder):
                self._step = self._find_whole(reads_only)
        except BaseException:
            self._checkpointer.close()
            raise

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def empty(self) -> bool:
        return self._step is None

    def save(self, state: Any, meta: dict[str, Any]) -> None:
        """Save a pytree of arrays and JSON-able facts about it, in the background.

        Leaves may be spread over devices and processes, all of which call this. Waits for a save
        that is still going on; RunError where that one failed.
        """
        copied = jax.tree.map(_snapshot, state)
        with self._writing():
            self._settle()
            latest = self._checkpointer.latest
            number = latest.step + 1 if latest else 0
            response = self._checkpointer.save_async(
                number, copied, force=True, custom_metadata=meta
            )
        self._step = number
        self._summed = self._background.submit(_finish, response, self._folder / str(number))

    def restore(self, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """State and facts of the newest whole checkpoint; `abstract` is a pytree of its shapes,
        None for whatever is there.

        A leaf with a sharding is read to where that says, whatever mesh wrote it; one without is a
        host array. ConfigError where the shapes are those of another model.
        """
        found = self._checkpointer.metadata(self._step)
        if abstract is None:
            abstract = found.metadata
        _check_shapes(found.metadata, abstract, self._checkpointer.directory)
        wanted = jax.tree.map(
            lambda x: x if getattr(x, "sharding", None) else np.empty(x.shape, x.dtype), abstract
        )
        return self._checkpointer.load(self._step, abstract_state=wanted), self.meta()

    def meta(self) -> dict[str, Any]:
        """Facts of the newest whole checkpoint, before any save of this object's."""
        return cast(dict[str, Any], self._checkpointer.metadata(self._step).custom_metadata)

    def wait(self) -> None:
        """Wait until the last save is on disk; RunError where it failed."""
        with self._writing():
            self._settle()
            self._checkpointer.wait()

    def close(self) -> None:
        """Wait until the last save is on disk; RunError where it, or one before, failed."""
        with self._writing():
            try:
                self._settle()
            finally:
                self._background.shutdown()
                self._checkpointer.close()

    def _settle(self) -> None:
        """Wait for the last save and its sums; raise what they raised, once."""
        pending, self._summed = self._summed, None
        if pending:
            pending.result()

    def _find_whole(self, reads_only: bool) -> int | None:
        """The newest checkpoint that is as it was written; those after it are set aside, and
        named on stderr."""
        steps = [c.step for c in self._checkpointer.checkpoints]
        good, damaged = -1, {}
        if jax.process_index() == 0:
            for step in reversed(steps):
                damaged[step] = self._damage(step)
                if not damaged[step]:
                    good = step
                    break
        good = first_chooses(good)
        if jax.process_index() == 0:
            self._report({step: why for step, why in damaged.items() if why}, good, reads_only)
        if steps and good < 0:
            raise RunError(
                f"no checkpoint in {self._folder} is as it was written; put a copy of one back, or "
                "start a new run in another folder"
            )
        if not reads_only and steps and good < steps[-1]:
            first_chooses(0)  # the first process has set them aside
            self._checkpointer.reload()
        return good if steps else None

    def _damage(self, step: int) -> str:
        folder = self._folder / str(step)
        if has_sums(folder):
            return damage(folder)
        # Its run was killed before sums were written: it is read whole, unless that is too much.
        try:
            if jax.process_count() == 1:
                self._checkpointer.load(step)
            facts = self._checkpointer.metadata(step).custom_metadata
        except Exception as error:  # whatever the storage raises
            if not isinstance(folder, Path):
                raise  # it may be the network
            return f"it cannot be read: {' '.join(str(error).split())[:120]}"
        return "" if facts else "it says nothing of its run"

    def _report(self, damaged: dict[int, str], good: int, reads_only: bool) -> None:
        for step, why in damaged.items():
            place, fate = self._folder / str(step), "it is left out"
            if not reads_only and good >= 0:
                try:
                    fate = f"it is now {set_aside(place)}"
                except Exception as error:  # whatever the storage raises
                    raise RunError(
                        f"checkpoint {place} is damaged ({why}) and cannot be set aside: "
                        f"{getattr(error, 'strerror', None) or error}; make its folder writable, "
                        "or remove it"
                    ) from error
            ahead = f", and checkpoint {good} is used in its place" if good >= 0 else ""
            print(
                f"geojax: warning: checkpoint {place} is damaged ({why}); {fate}{ahead}",
                file=sys.stderr,
            )

    @contextmanager
    def _writing(self) -> Generator[None]:
        try:
            yield
        except Exception as error:  # whatever the storage raises, a full disk among it
            reason = " ".join(str(error).split())[:200]
            refused = isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES)
            fix = "make it writable" if refused else "make room"
            if not isinstance(self._folder, Path):
                fix = "see to the network and to what these credentials may do"
            raise RunError(
                f"a checkpoint could not be written to {self._checkpointer.directory}: {reason}; "
                f"those before it are whole: {fix}, then go on with `geojax train --resume`"
            ) from error


def _finish(response: Any, folder: Folder) -> None:
    """Wait until a checkpoint is on disk, and write its sums."""
    if response is not None:
        response.result()
    if jax.process_index() == 0:
        write_sums(folder)


def read_params(run: Path) -> tuple[Any, dict[str, Any]]:
    """Parameters in a run folder's newest checkpoint, and its facts.

    Host arrays, layers in the model's order. ConfigError where there is no checkpoint.
    """
    path = run / "config.json"
    config = read_config(path).checkpoint if path.is_file() else CheckpointConfig()
    root = checkpoint_root(config, run)
    folders = [root / "checkpoints", *sorted(root.glob("slices/*/checkpoints"))]
    with ExitStack() as stack:
        opened, refused = [], None
        for folder in filter(holds_any, folders):
            try:
                found = Checkpoints(folder, config, reads_only=True)
            except RunError as error:  # of one slice; another may do
                refused = error
                continue
            if not stack.enter_context(found).empty:
                opened.append(found)
        if refused and not opened:
            raise refused
        require(opened, f"{run} has no checkpoint yet; let the run save one, or name another")
        newest = max(opened, key=lambda checkpoints: _border(checkpoints.meta()))
        state, meta = newest.restore(None)
    if "params" in state:  # of slices: what they share
        return state["params"], meta
    params, order = state["state"]["params"], meta["layer_order"]
    if order is not None:
        place = np.argsort(order)
        params["blocks"] = jax.tree.map(lambda x: x[place], params["blocks"])
    return params, meta


def _border(meta: dict[str, Any]) -> tuple[int, int]:
    """How far a slice is whose processes are its own; anything else has one checkpoint."""
    return meta.get("epoch", 0), meta.get("border", 0)


def _snapshot(x: Any) -> Any:
    """A copy that the run cannot change while it is being written."""
    if not isinstance(x, jax.Array):
        return np.array(x, copy=True)
    if next(iter(x.devices())).platform != "cpu":
        return x  # Orbax copies it to the host before `save` returns
    return np.array(x, copy=True) if x.is_fully_addressable else jnp.copy(x)


def by_name(tree: Any) -> dict[str, Any]:
    """Leaves by their path, `a/b/c`; the same of a tree as it was saved and as it is read without
    its shapes."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(_key(k) for k in path): leaf for path, leaf in leaves}


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
    return {name: tuple(leaf.shape) for name, leaf in by_name(tree).items()}


def _key(entry: Any) -> str:
    """Name of a path entry; Orbax stores named tuples as dicts of their fields."""
    return str(next(getattr(entry, a) for a in ("key", "name", "idx") if hasattr(entry, a)))
