# SPDX-License-Identifier: Apache-2.0
"""Several runs, resumable: as processes of their own, a core each, or here, one after another.

Invariant: a run folder is the whole state of a job. Finished ones are kept, unfinished ones go on,
whatever ended the command before; a folder that holds another config is never touched.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console

from geojax import runs
from geojax.config import ConfigError, RunConfig, RunError, require
from geojax.config.files import read_config
from geojax.track.console import format_seconds
from geojax.track.environment import usable_cores
from geojax.track.metrics import read_records

_POLL_SECONDS = 0.2
_SAY_SECONDS = 15.0
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


class _Job(NamedTuple):
    folder: Path
    process: subprocess.Popen
    core: int
    total_tokens: int


def run_all(configs: Mapping[Path, RunConfig], jobs: int, console: Console) -> None:
    """Train every config in its folder, `jobs` at a time, one core each.

    ConfigError where a folder holds another run; RunError where a run fails, with its last words.
    """
    require(jobs >= 1, f"jobs {jobs} must be at least 1")
    cores = usable_cores()
    free = [cores[i % len(cores)] for i in range(jobs)]
    waiting = []
    for folder, config in configs.items():
        _claim(folder, config)
        if _finished(folder):
            console.print(f"{folder} is finished already; delete it to train again")
        else:
            waiting.append((folder, config.train.total_tokens))
    running: list[_Job] = []
    started, said = time.monotonic(), time.monotonic()
    total, done = len(waiting), 0
    with _ending(running):
        while waiting or running:
            while waiting and free:
                running.append(_launch(*waiting.pop(0), free.pop()))
            time.sleep(_POLL_SECONDS)
            for job in [j for j in running if j.process.poll() is not None]:
                running.remove(job)
                free.append(job.core)
                _require_success(job)
                done += 1
                took = format_seconds(time.monotonic() - started)
                console.print(f"{job.folder}: done ({done} of {total}, {took} in all)")
            if running and time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                console.print("  " + ", ".join(_progress(job) for job in running))


def run_here(configs: Mapping[Path, RunConfig], console: Console) -> None:
    """Train every config in its folder, one after another in this process, on one core.

    What starting takes, importing and the like, is paid once; of short runs that is the most of it.
    The same bits as a process of its own, where JAX had not started before the first call.
    ConfigError where a folder holds another run; KeyboardInterrupt, with the run saved, where it is
    told to stop.
    """
    for folder, config in configs.items():
        _claim(folder, config)
        if _finished(folder):
            continue
        stay_on_one_core()
        began = time.monotonic()
        with (folder / "log.txt").open("a") as log:
            finished = runs.resume(folder, Console(file=log, width=100, highlight=False))
        if not finished:
            raise KeyboardInterrupt
        jax.clear_caches()  # nothing of a run serves the next, and compiled programs are large
        console.print(f"{folder}: done in {format_seconds(time.monotonic() - began)}")


def stay_on_one_core() -> None:
    """What JAX computes depends on the number of its threads, to the last bit."""
    if _ONE_THREAD not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_ONE_THREAD}".strip()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {usable_cores()[0]})


def _claim(folder: Path, config: RunConfig) -> None:
    path = folder / "config.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        runs.save_config(config, path)
    elif read_config(path) != config:
        raise ConfigError(
            f"{folder} holds a run with other settings; delete it, or choose another folder"
        )


def _finished(folder: Path) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and any(r["kind"] == "end" for r in read_records(path))


def _launch(folder: Path, total_tokens: int, core: int) -> _Job:
    env = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_ONE_THREAD}".strip()}
    command = [sys.executable, "-m", "geojax", "train", "--resume", str(folder)]
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process.pid, {core})
    return _Job(folder, process, core, total_tokens)


def _require_success(job: _Job) -> None:
    if job.process.returncode == 0 and _finished(job.folder):
        return
    words = (job.folder / "log.txt").read_text(errors="replace").strip().splitlines()
    raise RunError(
        f"the run in {job.folder} ended with code {job.process.returncode}: "
        f"{words[-1] if words else 'no output'} (all of it: {job.folder / 'log.txt'})"
    )


def _progress(job: _Job) -> str:
    path = job.folder / "metrics.jsonl"
    tail = path.read_bytes()[-65536:].splitlines() if path.exists() else []
    for line in reversed(tail):
        if line.startswith(b'{"kind": "round"') and line.endswith(b"}"):
            tokens = json.loads(line)["tokens"]
            return f"{job.folder.name} {min(1, tokens / job.total_tokens):.0%}"
    return f"{job.folder.name} starting"


@contextmanager
def _ending(running: Iterable[_Job]) -> Generator[None]:
    """However this command ends, its jobs save and end too."""

    def handle(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        for job in running:
            job.process.terminate()
        for job in running:
            job.process.wait()
        signal.signal(signal.SIGTERM, before)
