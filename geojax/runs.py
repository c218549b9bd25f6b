# SPDX-License-Identifier: Apache-2.0
"""Run folders: starting a run, continuing it, and stopping it without losing work.

A run folder holds `config.json` (the resolved config), `metrics.jsonl` and `checkpoints/`, unless
checkpoint.folder has these elsewhere.
Invariant: with these, and its text or the cached tokens of it, `resume` goes on exactly as if
nothing had happened. One process works on a run at a time.
"""

import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from geojax.config import (
    ClusterConfig,
    ConfigError,
    RunConfig,
    RunError,
    require,
    with_strategy,
)
from geojax.config.files import read_config, to_json
from geojax.config.folder import require_local
from geojax.track.metrics import MetricsWriter, write_atomically

if TYPE_CHECKING:
    from geojax.data import Corpus, TaskSet
    from geojax.platform import Rows, Watchdog
    from geojax.train.checkpoint import Checkpoints


def save_config(config: RunConfig, path: Path) -> None:
    """Write `config` as JSON, atomically."""
    write_atomically(path, to_json(config) + "\n")


def start(config: RunConfig, folder: Path | str, console: Console | None = None) -> bool:
    """Begin a run in a new folder; False if it was stopped before its end, saved.

    ConfigError before anything is written where the config or its text cannot be used, or where
    the folder holds something already.
    """
    folder, rows = Path(folder), _join(config)
    if not _first():  # the first process of the cluster makes the folder
        return _run(config, folder, console, rows)
    existed = folder.exists()
    begin_folder(config, folder)
    try:
        return _run(config, folder, console, rows)
    except ConfigError:
        if not _saved(config, folder):  # nothing was trained: leave nothing half-made
            shutil.rmtree(folder, ignore_errors=True)
            if existed:
                folder.mkdir()
        raise


def exit_code(finished: bool) -> int:
    """Of a process that trains: one that was stopped, saved, is to be started again (EX_TEMPFAIL),
    which schedulers tell from one that is done."""
    return 0 if finished else os.EX_TEMPFAIL


def begin_folder(config: RunConfig, folder: Path, command: str = "train") -> None:
    """Make a run folder. ConfigError where it cannot be made, or holds something already, which
    `command` would go on with, or where another run's checkpoints are."""
    require_local(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists already; continue the run in it with `geojax {command} --resume "
            f"{folder}`, or choose another folder with --out"
        )
    require(
        not config.checkpoint.folder or not _saved(config, folder),
        f"checkpoint.folder {config.checkpoint.folder!r} has another run's checkpoints; set it to "
        "a folder of this run's own",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Which processes work on it is not a fact of the run.
        save_config(with_cluster(config, ClusterConfig()), folder / "config.json")
    except OSError as error:
        raise ConfigError(f"cannot write the run into {folder}: {error}") from error


def _saved(config: RunConfig, folder: Path) -> bool:
    """Whether there are checkpoints of it, or of its slices."""
    from geojax.train.storage import checkpoint_root, holds_any

    root = checkpoint_root(config.checkpoint, folder)
    return any(map(holds_any, (root / "checkpoints", root / "slices")))


def resume(
    folder: Path | str,
    console: Console | None = None,
    strategy: str | None = None,
    cluster: ClusterConfig | None = None,
) -> bool:
    """Continue the run in `folder` from its newest checkpoint, or from its start if it has none.

    `strategy`: another than before, from now on; `cluster`: the processes that go on, where they
    are several. False if it was stopped again before its end, saved. ConfigError where it is not a
    run folder.
    """
    folder = Path(folder)
    config = read_config(folder / "config.json")
    if strategy is not None:
        config = with_strategy(config, strategy)
    running = with_cluster(config, cluster or ClusterConfig())
    rows = _join(running)
    return _run(running, folder, console, rows, config if strategy is not None else None)


def with_cluster(config: RunConfig, cluster: ClusterConfig) -> RunConfig:
    """`config` in these processes."""
    return replace(config, platform=replace(config.platform, cluster=cluster))


@contextmanager
def stop_on_signals() -> Generator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set; a second signal acts as usual."""
    stop = threading.Event()
    before = {}

    def handle(number, frame):
        stop.set()
        signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def alone(folder: Path) -> Generator[None]:
    """No other process works on the run in `folder`; RunError where one does."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                f"another process is training in {folder}; wait for it, or stop it"
            ) from error
        yield


def _run(
    config: RunConfig,
    folder: Path,
    console: Console | None,
    rows: "Rows",
    changed: RunConfig | None = None,
) -> bool:
    try:
        return _train(config, folder, console or Console(highlight=False), rows, changed)
    except OSError as error:
        raise RunError(
            f"cannot read or write what the run needs: {error}; put that right, then go on with "
            f"`geojax train --resume {folder}`"
        ) from error


def _train(
    config: RunConfig, folder: Path, output: Console, rows: "Rows", changed: RunConfig | None
) -> bool:
    """`changed`: what config.json is to hold from now on, once it has turned out to work."""
    from geojax import platform

    first = _first()
    if not first:
        output = Console(quiet=True)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        if first:
            stack.enter_context(alone(folder))
        from geojax.data import describe
        from geojax.track.console import RunConsole
        from geojax.train.checkpoint import Checkpoints
        from geojax.train.storage import checkpoint_folder

        metrics = None
        if first:
            metrics = stack.enter_context(MetricsWriter(folder / "metrics.jsonl"))
        place = checkpoint_folder(config.checkpoint, folder)
        checkpoints = stack.enter_context(Checkpoints(place, config.checkpoint))
        corpus = prepare(config, checkpoints, output)
        watchdog = stack.enter_context(platform.Watchdog(config.platform.watchdog, folder))
        trainer = _trainer(config, corpus, metrics, checkpoints, stop, watchdog)
        if changed and first:
            save_config(changed, folder / "config.json")
        total = config.train.total_tokens
        console = RunConsole(total, config.clock.kind, trainer.tokens, output)
        with console:
            console.header(f"{config.name} -> {folder}", describe(corpus))
            if rows:
                console.header("platform", rows)
            console.header("derived", trainer.describe())
            if trainer.resumed:
                done = " (its last)" if trainer.tokens >= total else ""
                console.header(f"resumed after round {trainer.position.round}{done}", [])
            finished = trainer.run(console)
    if not finished:
        output.print(f"stopped and saved; go on with `geojax train --resume {folder}`")
    return finished


def _join(config: RunConfig) -> "Rows":
    """Set the platform up, and join the run's cluster if it has one; rows of what was set."""
    from geojax import platform

    rows = platform.apply(config.platform)
    if config.platform.cluster.coordinator:
        platform.initialize(config.platform)
    return rows


def _first() -> bool:
    """Whether this process writes for its cluster."""
    import jax

    return jax.process_index() == 0


def _trainer(
    config: RunConfig,
    corpus: "Corpus | TaskSet",
    metrics: MetricsWriter | None,
    checkpoints: "Checkpoints",
    stop: threading.Event,
    watchdog: "Watchdog",
) -> Any:
    """Of slices, or of one cluster."""
    if not config.slices:
        from geojax.train.trainer import Trainer as StrategyTrainer

        return StrategyTrainer(config, corpus, metrics, checkpoints, stop, watchdog)
    from geojax.geomesh.trainer import Trainer

    require(
        config.exchange.engine == "mesh",
        "exchange.engine grpc: each slice is a process of its own; use `geojax launch --local N "
        "PRESET`, or `geojax launch --resume RUN` to go on",
    )
    require(
        config.platform.cluster.processes == 1,
        f"platform.cluster.processes {config.platform.cluster.processes}: one process has all "
        "slices here; set it to 1, start the run by `geojax launch`, or give a strategy in "
        "place of slices",
    )
    assert metrics is not None, "one process is the first"
    if config.halos:
        from geojax.baselines.halos import HalosTrainer

        return HalosTrainer(config, corpus, metrics, checkpoints, stop, watchdog)
    if config.streaming:
        from geojax.baselines.streaming import StreamingTrainer

        return StreamingTrainer(config, corpus, metrics, checkpoints, stop, watchdog)
    return Trainer(config, corpus, metrics, checkpoints, stop, watchdog)


def prepare(config: RunConfig, checkpoints: "Checkpoints", output: Console) -> "Corpus | TaskSet":
    """The tokens; made by one process at a time, as processes may share a cache."""
    import jax
    from jax.experimental import multihost_utils

    from geojax import data

    known = None if checkpoints.empty else checkpoints.meta()["corpus"]
    corpus = None
    for turn in range(jax.process_count()):
        if turn == jax.process_index():
            corpus = data.prepare(
                config.data, config.model.vocab_size, progress=output.print, known=known
            )
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"tokens of process {turn}")
    assert corpus is not None, "every process has its turn"
    return corpus
