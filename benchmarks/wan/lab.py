# SPDX-License-Identifier: Apache-2.0
"""A world that exists: its namespaces, links, quotas and processes, made together and removed so.

Invariant: whatever ends a `Lab`, an error or a signal, what it made is gone; after SIGKILL of its
process `clean` removes the rest, which names that process.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from math import inf
from pathlib import Path

from benchmarks.wan import network, quota
from benchmarks.wan.network import Counters
from benchmarks.wan.proxy import Line
from benchmarks.wan.world import PORT, Node, World
from geojax.config import RunError
from geojax.launch.processes import LAUNCHER

_STOP_SECONDS = 20.0
_READY_SECONDS = 30.0


class Lab:
    """Where commands run as one of a world's nodes."""

    def __init__(self, world: World, folder: Path, seed: int, cores: Mapping[str, float]):
        """`folder`: for logs; `cores`: by the name of a node, of those that have a quota.
        ConfigError where one is too small."""
        quota.check(cores)
        self.world, self.folder, self.cores = world, folder, dict(cores)
        self._seed, self._owner = seed, os.getpid()
        self._groups: dict[str, Path] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def make(self) -> None:
        """All but the processes. ConfigError, RunError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        network.make(self._owner, self.world)
        for node in self.world.nodes:
            if node.name in self.cores:
                self._groups[node.name] = quota.make(network.namespace(self._owner, node))
        if self.world.proxied:
            self._start_proxies()

    def start(
        self, node: Node, command: Sequence[str], log: str, environment: Mapping[str, str] = {}
    ) -> subprocess.Popen[bytes]:
        """A command in the node's namespace and group; what it says goes to `log`."""
        name = network.namespace(self._owner, node)
        inside = ["ip", "netns", "exec", name, *command]
        if group := self._groups.get(node.name):
            # The shell joins the group before anything of the command runs.
            join = 'echo $$ > "$0" && exec "$@"'
            inside = ["sh", "-c", join, str(group / "cgroup.procs"), *inside]
        return self._spawn(inside, log, environment)

    def limit(self, node: Node, factor: float = 1.0) -> None:
        """Put the node's quota, times `factor`, in force, if it has one."""
        if group := self._groups.get(node.name):
            quota.limit(group, self.cores[node.name] * factor)

    def unlimit(self, node: Node) -> None:
        """Until `limit` is called."""
        if group := self._groups.get(node.name):
            quota.limit(group, None)

    def listens(self, node: Node) -> bool:
        """Whether a process of the node's takes calls."""
        address = "".join(f"{int(x):02X}" for x in reversed(node.wire.split(".")))
        listening = f"{address}:{PORT:04X}"
        for pid in network.pids(self._owner, node)[:1]:  # any of them sees the whole namespace
            for table in ("tcp", "tcp6"):
                with suppress(OSError):
                    rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
                    if any(r.split()[1].endswith(listening) and r.split()[3] == "0A" for r in rows):
                        return True
        return False

    def counters(self) -> dict[int, Counters]:
        return network.counters(self._owner, self.world)

    def proxy_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """Bytes that proxies let out, by the node that they belong to and the one they reach."""
        if not self.world.proxied:
            return {}
        time.sleep(1.2)  # they write once a second
        return {
            node.name: json.loads((self.folder / f"proxy-{node.name}-counts.json").read_text())
            for node in self.world.nodes
        }

    def remove(self) -> list[str]:
        """Everything; what could not be removed, in words."""
        for node in self.world.nodes:
            self.unlimit(node)  # saving is not what is measured
        living = [p for p in self._processes if p.poll() is None]
        for process in living:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + _STOP_SECONDS
        for process in living:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        mine = [name for name, owner in network.existing().items() if owner == self._owner]
        return network.remove(mine) + _remove_groups(self._groups.values())

    def _start_proxies(self) -> None:
        waiting = []
        for node in self.world.nodes:
            stem = self.folder / f"proxy-{node.name}"
            ready = stem.with_name(f"{stem.name}-ready")
            ready.unlink(missing_ok=True)
            spec = {
                "lines": [asdict(self._line(node, o)) for o in self.world.nodes if o != node],
                "seed": f"{self._seed} {node.name}",
                "ready": str(ready),
                "counts": str(stem.with_name(f"{stem.name}-counts.json")),
            }
            path = stem.with_suffix(".json")
            path.write_text(json.dumps(spec))
            name = network.namespace(self._owner, node)
            command = [sys.executable, "-m", "benchmarks.wan.proxy", str(path)]
            process = self._spawn(["ip", "netns", "exec", name, *command], f"proxy-{node.name}.log")
            waiting.append((process, ready))
        deadline = time.monotonic() + _READY_SECONDS
        for process, ready in waiting:
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RunError(f"no proxy came up; {self.folder}/proxy-*.log say why")
                time.sleep(0.05)

    def _line(self, node: Node, other: Node) -> Line:
        link = self.world.links[node.index, other.index]
        rate = link.loss_bits_per_second
        return Line(
            other.name,
            (other.delayed, PORT),
            (other.wire, PORT),
            link.delay_seconds,
            link.jitter_seconds,
            None if rate == inf else rate / 8,
            link.window_bytes,
        )

    def _spawn(
        self, command: Sequence[str], log: str, environment: Mapping[str, str] = {}
    ) -> subprocess.Popen[bytes]:
        own = {"PYTHONUNBUFFERED": "1", LAUNCHER: str(os.getpid())}
        with (self.folder / log).open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | environment | own,
                start_new_session=True,  # Ctrl-C is the lab's, which ends them in order
            )
        self._processes.append(process)
        return process


@contextmanager
def open_lab(
    world: World, folder: Path, seed: int = 0, cores: Mapping[str, float] = {}
) -> Generator[Lab]:
    """A lab, and its end. SIGTERM and SIGHUP end it as Ctrl-C does."""
    network.require_tools()
    lab = Lab(world, folder, seed, cores)
    handlers = {n: signal.signal(n, _interrupt) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        lab.make()
        yield lab
    finally:
        for number in (signal.SIGINT, *handlers):  # nothing cuts this short
            handlers.setdefault(number, signal.getsignal(number))
            signal.signal(number, signal.SIG_IGN)
        failed = lab.remove()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for line in failed:
            print(f"not removed: {line}", file=sys.stderr)


def clean(every: bool = False) -> list[str]:
    """Remove labs whose process is gone, or `every` one; names of what was removed. RunError."""
    network.require_tools()
    names = [name for name, owner in network.existing().items() if every or not _alive(owner)]
    groups = [
        group
        for group in quota.groups(network.PREFIX)
        if every or not _alive(network.owner_of(group.name))
    ]
    if failed := network.remove(names) + _remove_groups(groups):
        raise RunError("; ".join(failed))
    return names + [str(group) for group in groups]


def _remove_groups(groups: Iterable[Path]) -> list[str]:
    failed = []
    for group in groups:
        try:
            quota.remove(group)
        except RunError as error:
            failed.append(str(error))
    return failed


def _alive(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
