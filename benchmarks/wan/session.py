# SPDX-License-Identifier: Apache-2.0
"""A run in a lab: the coordinator and every slice as a process of its node, to the run's end.

A slice's quota begins once it listens, after its imports. Invariant: the run folder is that of
`geojax coordinator`, so a second start goes on where the first one stopped, and `geojax report`
reads it; what the lab saw is in `lab.json` beside it.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.wan.lab import Lab, open_lab
from benchmarks.wan.traffic import Report, traffic_report
from benchmarks.wan.world import PORT, Node, Weather, make_world, read_wan
from geojax.config import ConfigError, RunConfig, RunError, require
from geojax.config.files import read_config
from geojax.runs import save_config
from geojax.track.metrics import read_records, to_json, write_atomically

_POLL_SECONDS = 0.01  # a message of signs is under way for so long
_LISTEN_POLL_SECONDS = 0.2
_LISTEN_SECONDS = 120.0  # for a coordinator
_FAREWELL_SECONDS = 30.0  # for slices to end after the coordinator has
_PAUSE_SECONDS = 1.0  # before a new start
_RESTARTS = 20  # of each process
_USER_MISTAKE = 2  # exit code that a new start would give again
_CONFIG_FILE = """from pathlib import Path

from geojax.config.files import read_config


def config():
    return read_config(Path(__file__).with_name("config.json"))
"""
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
"""Of slices: a thread each, so that a quota is a speed."""


@dataclass(frozen=True)
class Setting:
    """Where a run takes place."""

    wan: str
    """A WAN of `meshes/wan.py`, or a CSV file."""
    weather: Weather = Weather()
    cores: Mapping[str, float] = field(default_factory=dict)
    """Quotas by slice; slices without one may use all there is."""
    coordinator: str = ""
    """Region; empty: that of the first slice."""


@dataclass
class Child:
    """A process of the run, started again when it dies."""

    node: Node
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    due: float = 0.0
    """When to start it again."""
    limited: bool = True
    """Whether its quota is in force."""
    factor: float = 1.0
    """Of its quota."""
    away: bool = False
    """Whether it is not to come back; who sets this ends or stops it."""

    @property
    def code(self) -> int | None:
        return self.process.poll() if self.process else None


@dataclass
class Situation:
    """What trouble can see and reach."""

    lab: Lab
    children: dict[str, Child]
    closed: list[float]
    """When each round of this session was over, in seconds since the first slice started."""
    round: int
    """The last one that is over."""
    now: float
    """Same clock as `closed`."""


Trouble = Callable[[Situation], None]
"""Called several times a second."""


def finished(config: RunConfig, folder: Path) -> bool:
    """Whether this run is over in `folder`. ConfigError where that holds another one."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return False
    _claim(config, folder)
    return any(r["kind"] == "end" for r in read_records(path))


def run(
    config: RunConfig,
    folder: Path,
    setting: Setting,
    console: Console,
    trouble: Trouble = lambda situation: None,
) -> Report:
    """Train `config`, a process a slice, with `folder` as its run folder, new or not; what went
    over the links.

    ConfigError, also for a folder that holds another run; RunError where a process fails for good.
    """
    world = make_world(
        read_wan(setting.wan),
        [(s.name, s.region) for s in config.slices],
        setting.coordinator or config.slices[0].region,
        setting.weather,
    )
    _claim(config, folder)
    _prepare_text(config, console)
    first = _rounds_written(folder)
    with open_lab(world, folder / "lab", config.seed, setting.cores) as lab:
        before = lab.counters()
        closed = _to_the_end(lab, folder, console, trouble)
        after, proxies = lab.counters(), lab.proxy_counts()
    records = list(read_records(folder / "metrics.jsonl"))
    report = traffic_report(world, before, after, proxies, records, first)
    content = {
        "wan": setting.wan,
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "weather": asdict(setting.weather),
        "cores": dict(setting.cores),
        "links": [
            {
                "source": link.source.name,
                "target": link.target.name,
                "bits_per_second": link.bits_per_second,
                "delay_seconds": link.delay_seconds,
            }
            for link in world.links.values()
        ],
        "first_round": first + 1,
        "closed_seconds": closed,
        "traffic": asdict(report),
    }
    write_atomically(folder / "lab.json", json.dumps(to_json(content), indent=2) + "\n")
    return report


def _claim(config: RunConfig, folder: Path) -> None:
    path = folder / "config.json"
    if path.exists():
        require(
            read_config(path) == config,
            f"{folder} holds another run; choose another folder with --out, or delete it",
        )
        return
    require(
        not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
        f"{folder} is, or holds, something that is no run; choose another folder with --out",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.py").write_text(_CONFIG_FILE)
        save_config(config, path)
    except OSError as error:
        raise ConfigError(f"cannot write the run into {folder}: {error}") from error


def _prepare_text(config: RunConfig, console: Console) -> None:
    """Namespaces reach nothing but each other, so the text is here before they are."""
    from geojax.data import prepare

    prepare(config.data, config.model.vocab_size, progress=console.print)


def _rounds_written(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    records = read_records(path) if path.exists() else []
    return max((r["round"] for r in records if r["kind"] == "round"), default=0)


def _to_the_end(lab: Lab, folder: Path, console: Console, trouble: Trouble) -> list[float]:
    """When each round was over."""
    children = {node.name: Child(node, _command(lab, node, folder)) for node in lab.world.nodes}
    coordinator, *slices = children.values()
    _start(lab, coordinator)
    deadline = time.monotonic() + _LISTEN_SECONDS
    while not lab.listens(coordinator.node):
        if coordinator.code is not None or time.monotonic() > deadline:
            raise RunError(f"the coordinator does not listen; {_log(lab, coordinator)} says why")
        time.sleep(_LISTEN_POLL_SECONDS)
    begun = time.monotonic()
    for child in slices:
        _start(lab, child)
    journal = _JournalReader(folder / "journal.jsonl")
    situation = Situation(lab, children, [], journal.read(), 0.0)
    ended, looked = None, begun
    while True:
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        if now - looked >= _LISTEN_POLL_SECONDS:
            looked = now
            for child in slices:
                if not child.limited and child.process and lab.listens(child.node):
                    lab.limit(child.node, child.factor)
                    child.limited = True
        latest = journal.read()
        situation.now = now - begun
        if latest > situation.round:
            situation.closed += [situation.now] * (latest - situation.round)
            console.print(f"  round {latest} over at {situation.now:.1f} s")
        elif latest < situation.round:
            del situation.closed[latest - situation.round :]
            console.print(f"  back to round {latest} at {situation.now:.1f} s")
        situation.round = latest
        if coordinator.code == 0:
            ended = ended or now
            for child in slices:
                if child.away and child.process:
                    child.process.kill()  # it may be stopped, and has nothing to save
            if now - ended > _FAREWELL_SECONDS or all(c.code is not None for c in slices):
                return situation.closed
            continue
        trouble(situation)
        for child in children.values():
            _look_after(lab, child, console, now)


def _look_after(lab: Lab, child: Child, console: Console, now: float) -> None:
    """Start it where it has died. RunError where it dies too often."""
    if child.process is None:
        if now >= child.due:
            _start(lab, child)
        return
    code = child.code
    if code is None or code == 0 or child.away:
        return
    if code == _USER_MISTAKE or child.restarts >= _RESTARTS:
        raise RunError(
            f"{child.node.name} ended with code {code} after {child.restarts} new starts; "
            f"{_log(lab, child)} says why"
        )
    child.restarts += 1
    child.process, child.due = None, now + _PAUSE_SECONDS
    console.print(f"  {child.node.name} ended with code {code}; starting it again")


def _start(lab: Lab, child: Child) -> None:
    lab.unlimit(child.node)
    child.limited = False
    child.process = lab.start(child.node, child.command, f"{child.node.name}.log", ENVIRONMENT)


def _log(lab: Lab, child: Child) -> Path:
    return lab.folder / f"{child.node.name}.log"


def _command(lab: Lab, node: Node, folder: Path) -> list[str]:
    """Of `geojax`, by which the node starts or goes on."""
    coordinator = lab.world.nodes[0]
    program, config = [sys.executable, "-m", "geojax"], str(folder / "config.py")
    if node == coordinator:
        command = [*program, "coordinator", config, "--out", str(folder)]
    else:
        address = lab.world.address(coordinator)
        place = str(folder / "slices" / node.name)
        command = [*program, "train", config, "--slice", node.name, "--coordinator", address]
        command += ["--out", place]
    host = lab.world.address(node).rpartition(":")[0]
    listen = ["--grpc.bind", node.wire, "--grpc.port", str(PORT), "--grpc.advertise", host]
    return command + listen


class _JournalReader:
    """The last round that is over, from a file that grows."""

    def __init__(self, path: Path):
        self._path, self._end, self._round = path, 0, 0

    def read(self) -> int:
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            file.seek(self._end)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._end += whole
        for line in text[:whole].splitlines():
            entry = json.loads(line)
            if entry["kind"] in ("round", "rollback"):
                self._round = entry["round"]
        return self._round
