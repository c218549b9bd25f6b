# SPDX-License-Identifier: Apache-2.0
"""A coordinator and all slices of a run as processes on this machine, watched.

Invariant: a process that dies is started again, with growing pauses and a limited number of times
in a row; a slice that is given up does not end the run while the others are a quorum. However the
launcher ends, its processes end with it, the slices' state saved where it was asked to stop.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from geojax.config import RunConfig, RunError, SliceConfig, require
from geojax.config.files import read_config
from geojax.geomesh.wan.decide import enough as is_quorum
from geojax.launch.processes import ADDRESS_FILE, JOURNAL_FILE, LAUNCHER, with_grpc
from geojax.runs import begin_folder, stop_on_signals

COORDINATOR = "coordinator"
_PROGRAM = [sys.executable, "-m", "geojax"]
_DEVICES, _DEVICES_FLAG = "JAX_NUM_CPU_DEVICES", "xla_force_host_platform_device_count"
_POLL_SECONDS = 0.1
_START_SECONDS = 60.0  # for the coordinator to listen
_STOP_SECONDS = 120.0  # for slices to save
_FAREWELL_SECONDS = 30.0  # for slices to end after the coordinator has
_FIRST_PAUSE_SECONDS = 1.0  # before a process is started again; doubles
_LONGEST_PAUSE_SECONDS = 30.0
_HEALTHY_SECONDS = 600.0  # of a process, after which its earlier deaths do not count
_USER_MISTAKE = 2  # exit code that a new start would give again


@dataclass
class _Child:
    name: str
    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    """Of its environment."""
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    restarts: int = 0
    """Of late: since it last ran for _HEALTHY_SECONDS."""
    due: float = 0.0
    """When to start it again."""
    given_up: bool = False

    @property
    def code(self) -> int | None:
        return self.process.poll() if self.process else None


def launch_local(
    config: RunConfig, folder: Path, slices: int, restarts: int, console: Console | None = None
) -> bool:
    """Begin a run in a new folder; False if it was stopped before its end, saved. `restarts`: of
    each process, in a row, before its slice is left away, or the run is given up."""
    config = with_grpc(config)
    require(
        slices == len(config.slices),
        f"--local {slices}: the run has {len(config.slices)} slices, and each is a process; say "
        f"--local {len(config.slices)}, or change slices",
    )
    _require_processors(config)
    begin_folder(config, folder, "launch")
    return _run(config, folder, restarts, console or Console(highlight=False))


def relaunch(folder: Path, restarts: int, console: Console | None = None) -> bool:
    """Go on with the run in `folder`; as `launch_local`."""
    config = with_grpc(read_config(folder / "config.json"))
    _require_processors(config)
    return _run(config, folder, restarts, console or Console(highlight=False))


def _run(config: RunConfig, folder: Path, restarts: int, console: Console) -> bool:
    (folder / ADDRESS_FILE).unlink(missing_ok=True)
    coordinator = _Child(COORDINATOR, [*_PROGRAM, "coordinator", "--resume", str(folder)])
    children = {COORDINATOR: coordinator}
    width = max(len(name) for s in config.slices for name in _names(s))
    with stop_on_signals() as stop:
        try:
            _start(coordinator, console, width)
            address = _wait_for_address(coordinator, folder, stop)
            if address is None:
                return False
            coordinator.command += ["--port", address.rsplit(":", 1)[1]]
            for child in _slices(config, folder, address):
                children[child.name] = child
                _start(child, console, width)
            enough = partial(_enough, config, folder)
            _watch(children, restarts, enough, stop, console, width)
        finally:
            _end(children)
    stopped = stop.is_set()
    if stopped:
        console.print(
            f"stopped and saved; go on with `geojax launch --resume {folder}`", soft_wrap=True
        )
    return not stopped


def _names(slice_: SliceConfig) -> list[str]:
    """Of its processes."""
    if slice_.processes == 1:
        return [slice_.name]
    return [f"{slice_.name}/{number}" for number in range(slice_.processes)]


def _slices(config: RunConfig, folder: Path, address: str) -> Iterator[_Child]:
    """The processes of all slices; those of one are a JAX cluster on a port of its own."""
    for s in config.slices:
        command = [*_PROGRAM, "train", "--resume", str(folder), "--slice", s.name]
        command += ["--coordinator", address]
        variables = _devices(s.devices // s.processes)
        if s.processes > 1:
            place = f"127.0.0.1:{_free_port()}"
            command += ["--cluster.coordinator", place, "--cluster.processes", str(s.processes)]
        for number, name in enumerate(_names(s)):
            own = ["--cluster.process-id", str(number)] if s.processes > 1 else []
            yield _Child(name, [*command, *own], variables)


def _devices(count: int) -> dict[str, str]:
    """Variables for as many devices of a CPU; none where the user has set their number."""
    given = _DEVICES in os.environ or _DEVICES_FLAG in os.environ.get("XLA_FLAGS", "")
    return {} if given else {_DEVICES: str(count)}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _require_processors(config: RunConfig) -> None:
    """ConfigError where processes would share GPUs that each takes whole."""
    from geojax.platform import why_no_gpu

    several = [s.name for s in config.slices if s.processes > 1]
    require(
        not several or why_no_gpu(),
        f"--local starts slices of several processes ({', '.join(several)}) on CPUs only, as each "
        "process would take all GPUs; set their processes to 1, or JAX_PLATFORMS=cpu, or start "
        "the processes by hand, each with its own CUDA_VISIBLE_DEVICES",
    )


def _watch(
    children: Mapping[str, _Child],
    restarts: int,
    enough: Callable[[int], bool],
    stop: threading.Event,
    console: Console,
    width: int,
) -> None:
    """Until the run has ended, or `stop`. A slice whose process dies too often is left away while
    `enough` are there without it; RunError where they are not, or the coordinator is it."""
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
            code, stopped = child.code, os.EX_TEMPFAIL
            # A slice that somebody stopped stays away.
            if code in (None, 0) or (code == stopped and child.name != COORDINATOR):
                continue
            if child.given_up:
                continue
            if now - child.began > _HEALTHY_SECONDS:
                child.restarts = 0
            if code == _USER_MISTAKE or child.restarts >= restarts:
                child.given_up = True
                said = f"{child.name} ended {_how(code)}"
                said += "" if code == _USER_MISTAKE else f" after {child.restarts} new starts"
                left = _slices_left(children)
                if code == _USER_MISTAKE or child.name == COORDINATOR or not enough(left):
                    raise RunError(f"{said}; its last lines say why")
                console.print(f"{said}; the others go on without it", soft_wrap=True)
                continue
            pause = min(_FIRST_PAUSE_SECONDS * 2**child.restarts, _LONGEST_PAUSE_SECONDS)
            child.restarts += 1
            child.process, child.due = None, now + pause
            console.print(
                f"{child.name} ended {_how(code)}; starting it again in {pause:g} s "
                f"({child.restarts} of {restarts})",
                soft_wrap=True,
            )


def _enough(config: RunConfig, folder: Path, left: int) -> bool:
    """Whether so many slices can go on; all are needed to begin."""
    journal = folder / JOURNAL_FILE
    begun = journal.exists() and journal.stat().st_size > 0
    return begun and is_quorum(left, len(config.slices), config.grpc)


def _slices_left(children: Mapping[str, _Child]) -> int:
    """Those of which no process was given up, or was stopped."""
    slices = {name.partition("/")[0] for name in children if name != COORDINATOR}
    away = [c for c in children.values() if c.given_up or c.code == os.EX_TEMPFAIL]
    return len(slices - {child.name.partition("/")[0] for child in away})


def _start(child: _Child, console: Console, width: int) -> None:
    own = {"PYTHONUNBUFFERED": "1", LAUNCHER: str(os.getpid())}
    child.process = subprocess.Popen(
        child.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | own | child.variables,
        start_new_session=True,  # Ctrl-C is the launcher's, which ends them in order
    )
    child.began = time.monotonic()
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
