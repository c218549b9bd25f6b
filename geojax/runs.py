# SPDX-License-Identifier: Apache-2.0
"""Run folders: starting a run, continuing it, and stopping it without losing work.

A run folder holds `config.json` (the resolved config), `metrics.jsonl` and `checkpoints/`.
Invariant: with these, and its text or the cached tokens of it, `resume` goes on exactly as if
nothing had happened. One process works on a run at a time.
"""

import fcntl
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from geojax.config import ConfigError, RunConfig, RunError
from geojax.track.metrics import MetricsWriter, write_atomically

_ADAPTER = TypeAdapter(RunConfig)


def save_config(config: RunConfig, path: Path) -> None:
    """Write `config` as JSON, atomically."""
    write_atomically(path, _ADAPTER.dump_json(config, indent=2).decode() + "\n")


def read_config(path: Path) -> RunConfig:
    """Read what `save_config` wrote; ConfigError where it is missing or not a config."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path.parent} is not a run folder: cannot read {path.name} ({error.strerror})"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {place}: {first['msg']}") from error


def start(config: RunConfig, folder: Path, console: Console | None = None) -> bool:
    """Begin a run in a new folder; False if it was stopped before its end, saved.

    ConfigError before anything is written where the config or its text cannot be used, or where
    the folder holds something already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists already; continue the run in it with `geojax train --resume "
            f"{folder}`, or choose another folder with --out"
        )
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_config(config, folder / "config.json")
    except OSError as error:
        raise ConfigError(f"cannot write the run into {folder}: {error}") from error
    try:
        return _run(config, folder, console)
    except ConfigError:
        if not any(folder.glob("checkpoints/*")):  # nothing was trained: leave nothing half-made
            shutil.rmtree(folder, ignore_errors=True)
            if existed:
                folder.mkdir()
        raise


def resume(folder: Path, console: Console | None = None) -> bool:
    """Continue the run in `folder` from its newest checkpoint, or from its start if it has none.

    False if it was stopped again before its end, saved. ConfigError where it is not a run folder.
    """
    return _run(read_config(folder / "config.json"), folder, console)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
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
def _alone(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                f"another process is training in {folder}; wait for it, or stop it"
            ) from error
        yield


def _run(config: RunConfig, folder: Path, console: Console | None) -> bool:
    try:
        return _train(config, folder, console)
    except OSError as error:
        raise RunError(
            f"cannot read or write what the run needs: {error}; put that right, then go on with "
            f"`geojax train --resume {folder}`"
        ) from error


def _train(config: RunConfig, folder: Path, console: Console | None) -> bool:
    from geojax.data import describe, prepare

    output = console or Console(highlight=False)
    with stop_on_signals() as stop, _alone(folder):
        from geojax.geomesh.trainer import Trainer
        from geojax.track.console import RunConsole
        from geojax.train.checkpoint import Checkpoints

        with (
            MetricsWriter(folder / "metrics.jsonl") as metrics,
            Checkpoints(folder / "checkpoints", config.checkpoint) as checkpoints,
        ):
            known = None if checkpoints.empty else checkpoints.meta()["corpus"]
            corpus = prepare(
                config.data, config.model.vocab_size, progress=output.print, known=known
            )
            trainer = Trainer(config, corpus, metrics, checkpoints, stop)
            total = config.train.total_tokens
            with RunConsole(total, config.clock.kind, trainer.tokens, output) as run_console:
                run_console.header(f"{config.name} -> {folder}", describe(corpus))
                run_console.header("derived", trainer.describe())
                if trainer.resumed:
                    done = " (its last)" if trainer.tokens >= total else ""
                    run_console.header(f"resumed after round {trainer.position.round}{done}", [])
                finished = trainer.run(run_console)
    if not finished:
        output.print(f"stopped and saved; go on with `geojax train --resume {folder}`")
    return finished
