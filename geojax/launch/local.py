# SPDX-License-Identifier: Apache-2.0
"""A coordinator and all slices of a run as processes on this machine, watched.

Invariant: a process that dies is started again, with growing pauses and a limited number of times;
however the launcher ends, its processes end with it, the slices' state saved where it was asked to
stop.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from geojax.config import RunConfig, RunError, require
from geojax.launch.processes import ADDRESS_FILE, LAUNCHER, with_grpc
from geojax.runs import begin_folder, read_config, stop_on_signals

COORDINATOR = "coordinator"
_POLL_SECONDS = 0.1
_START_SECONDS = 60.0  # for the coordinator to listen
_STOP_SECONDS = 120.0  # for slices to save
_FAREWELL_SECONDS = 30.0  # for slices to end after the coordinator has
_FIRST_PAUSE_SECONDS = 1.0  # before a process is started again; doubles
_LONGEST_PAUSE_SECONDS = 30.0
_USER_MISTAKE = 2  # exit code that a new start would give again


@dataclass
class _Child:
    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    due: float = 0.0
    """When to start it again."""

    @property
    def code(self) -> int | None:
        return self.process.poll() if self.process else None


def launch_local(
    config: RunConfig, folder: Path, slices: int, restarts: int, console: Console | None = None
) -> bool:
    """Begin a run in a new folder; False if it was stopped before its end, saved. `restarts`: of
    each process, before the run is given up."""
    config = with_grpc(config)
    require(
        slices == len(config.slices),
        f"--local {slices}: the run has {len(config.slices)} slices, and each is a process; say "
        f"--local {len(config.slices)}, or change slices",
    )
    begin_folder(config, folder, "launch")
    return _run(config, folder, restarts, console or Console(highlight=False))


def relaunch(folder: Path, restarts: int, console: Console | None = None) -> bool:
    """Go on with the run in `folder`; as `launch_local`."""
    config = with_grpc(read_config(folder / "config.json"))
    return _run(config, folder, restarts, console or Console(highlight=False))


def _run(config: RunConfig, folder: Path, restarts: int, console: Console) -> bool:
    program = [sys.executable, "-m", "geojax"]
    (folder / ADDRESS_FILE).unlink(missing_ok=True)
    coordinator = _Child(COORDINATOR, [*program, "coordinator", "--resume", str(folder)])
    children = {COORDINATOR: coordinator}
    width = max(len(s.name) for s in config.slices)
    with stop_on_signals() as stop:
        try:
            _start(coordinator, console, width)
            address = _wait_for_address(coordinator, folder, stop)
            if address is None:
                return False
            coordinator.command += ["--port", address.rsplit(":", 1)[1]]
            for s in config.slices:
                command = ["train", "--resume", str(folder), "--slice", s.name]
                child = _Child(s.name, [*program, *command, "--coordinator", address])
                children[s.name] = child
                _start(child, console, width)
            _watch(children, restarts, stop, console, width)
        finally:
            _end(children)
    stopped = stop.is_set()
    if stopped:
        console.print(
            f"stopped and saved; go on with `geojax launch --resume {folder}`", soft_wrap=True
        )
    return not stopped


def _watch(
    children: Mapping[str, _Child],
    restarts: int,
    stop: threading.Event,
    console: Console,
    width: int,
) -> None:
    """Until the run has ended, or `stop`. RunError where a process dies too often."""
    ended = None
    while not stop.wait(_POLL_SECONDS):
        now = time.monotonic()
        if children[COORDINATOR].code == 0:  # the run has ended, and whoever knows it ends too
            ended = ended or now
            if now - ended > _FAREWELL_SECONDS or all(
                c.code is not None for c in children.values()
            ):
                return
            continue
        for child in children.values():
            if child.process is None:
                if now >= child.due:
                    _start(child, console, width)
                continue
            code = child.code
            if code is None or code == 0:  # a slice that somebody stopped stays away
                continue
            if code == _USER_MISTAKE or child.restarts >= restarts:
                raise RunError(
                    f"{child.name} ended {_how(code)}"
                    + ("" if code == _USER_MISTAKE else f" after {child.restarts} new starts")
                    + "; its last lines say why"
                )
            pause = min(_FIRST_PAUSE_SECONDS * 2**child.restarts, _LONGEST_PAUSE_SECONDS)
            child.restarts += 1
            child.process, child.due = None, now + pause
            console.print(
                f"{child.name} ended {_how(code)}; starting it again in {pause:g} s "
                f"({child.restarts} of {restarts})",
                soft_wrap=True,
            )


def _start(child: _Child, console: Console, width: int) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": "1", LAUNCHER: str(os.getpid())}
    child.process = subprocess.Popen(
        child.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # Ctrl-C is the launcher's, which ends them in order
    )
    label = "" if child.name == COORDINATOR else f"{child.name:>{width}} | "
    console.print(f"{child.name} starts as process {child.process.pid}")
    reader = threading.Thread(
        target=_copy, args=(child.process, label, console), name=child.name, daemon=True
    )
    reader.start()


def _copy(process: subprocess.Popen[bytes], label: str, console: Console) -> None:
    assert process.stdout, "it is a pipe"
    with process.stdout:
        for line in process.stdout:
            text = label + line.decode(errors="replace").rstrip("\n")
            console.print(Text(text), soft_wrap=True)


def _wait_for_address(coordinator: _Child, folder: Path, stop: threading.Event) -> str | None:
    """Where the coordinator listens; None where `stop` came first."""
    deadline = time.monotonic() + _START_SECONDS
    path = folder / ADDRESS_FILE
    while not path.exists():
        if stop.wait(_POLL_SECONDS):
            return None
        if coordinator.code is not None:
            raise RunError(f"the coordinator ended {_how(coordinator.code)}; its lines say why")
        if time.monotonic() > deadline:
            raise RunError(f"the coordinator did not listen within {_START_SECONDS:.0f} s")
    return json.loads(path.read_text())["address"]


def _end(children: Mapping[str, _Child]) -> None:
    """The coordinator first, so that nothing is decided while slices save."""
    for group in (
        [c for c in children.values() if c.name == COORDINATOR],
        [c for c in children.values() if c.name != COORDINATOR],
    ):
        living = [c.process for c in group if c.process and c.code is None]
        for process in living:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # one that was stopped could not hear it
        deadline = time.monotonic() + _STOP_SECONDS
        for process in living:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _how(code: int) -> str:
    if code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"
