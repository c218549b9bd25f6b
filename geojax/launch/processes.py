# SPDX-License-Identifier: Apache-2.0
"""What one process of a run does: the coordinator's, and a slice's."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console

from geojax.config import ConfigError, GrpcConfig, RunConfig, RunError, require
from geojax.config.folder import require_local
from geojax.runs import alone, prepare, stop_on_signals
from geojax.track.console import RunConsole
from geojax.track.metrics import MetricsWriter, check_records, read_records, write_atomically

ADDRESS_FILE = "coordinator.json"
JOURNAL_FILE = "journal.jsonl"
LAUNCHER = "GEOJAX_LAUNCHER"
"""Environment variable: the process that started this one, and whose end is this one's."""


def with_grpc(config: RunConfig) -> RunConfig:
    """The same run with a process a slice. ConfigError where that cannot be."""
    require(
        len(config.slices) > 1,
        f"{config.name} has {len(config.slices)} slices; processes of their own want two or more",
    )
    return replace(config, exchange=replace(config.exchange, engine="grpc"))


def fingerprint(config: RunConfig) -> str:
    """Of what all slices of a run must share: all but addresses, the platform, in how many
    processes a slice is, and where the text and the checkpoints are."""
    same = replace(
        config,
        grpc=replace(config.grpc, **{name: getattr(GrpcConfig, name) for name in _OF_ONE_PROCESS}),
        platform=type(config.platform)(),
        data=replace(config.data, source=type(config.data.source)()),
        checkpoint=replace(config.checkpoint, folder=""),
        slices=tuple(replace(s, processes=1) for s in config.slices),
    )
    text = TypeAdapter(RunConfig).dump_json(same).decode() + version("geojax")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_OF_ONE_PROCESS = ("bind", "port", "advertise", "tls_ca", "tls_cert", "tls_key")


def coordinate(config: RunConfig, folder: Path, console: Console | None = None) -> bool:
    """Be the coordinator of the run in `folder`, new or not; False if stopped before its end."""
    from geojax.geomesh.wan.coordinator import Coordinator, Run, Served
    from geojax.geomesh.wan.journal import Journal
    from geojax.geomesh.wan.ledger import Ledger

    config, output = with_grpc(config), console or Console(highlight=False)
    names = tuple(s.name for s in config.slices)
    with ExitStack() as stack:
        stop = stack.enter_context(_stop())
        stack.enter_context(alone(folder))
        journal = Journal(folder / JOURNAL_FILE)
        stack.callback(journal.close)
        path = folder / "metrics.jsonl"
        metrics = stack.enter_context(MetricsWriter(path))
        check_records(read_records(path), path)
        shown = stack.enter_context(
            RunConsole(config.train.total_tokens, config.clock.kind, 0, output)
        )
        ledger = Ledger(metrics, path, names, shown)
        run = Run(names, fingerprint(config))
        coordinator = Coordinator(run, config.grpc, journal, ledger, shown.note)
        served = Served(coordinator, config.grpc, len(names), stop)
        stack.callback(served.close)
        write_atomically(folder / ADDRESS_FILE, json.dumps({"address": served.address}) + "\n")
        output.print(f"coordinator of {config.name} at {served.address}", soft_wrap=True)
        finished = served.run()
        if coordinator.history.stopped is not None:
            raise RunError(coordinator.history.stopped)
        if finished:
            ledger.end("all tokens seen")
    return finished


def take_part(
    config: RunConfig, folder: Path, name: str, coordinator: str, console: Console | None = None
) -> bool:
    """Train slice `name` with `folder` for its checkpoints, new or not, as one of a run, or be one
    of the processes that do; False if it was stopped before the run's end, saved."""
    from geojax import platform
    from geojax.launch.joining import connected, join

    config, output = with_grpc(config), console or Console(highlight=False)
    names = [s.name for s in config.slices]
    require(name in names, f"the run has no slice {name!r}; it has {', '.join(names)}")
    require_address(coordinator)
    require_local(folder)
    index = names.index(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot keep checkpoints of slice {name} in {folder}: {error.strerror}; choose "
            "another folder with --out"
        ) from error
    join(config.platform, config.slices[index])
    with ExitStack() as stack:
        stop = stack.enter_context(_stop())
        relay = stack.enter_context(connected(config.slices[index], stop))
        if relay.is_first:
            stack.enter_context(alone(folder))
        else:
            output = Console(quiet=True)
        from geojax.geomesh.led import Led
        from geojax.geomesh.slice_trainer import SliceTrainer
        from geojax.geomesh.wan.member import Member
        from geojax.train.checkpoint import Checkpoints
        from geojax.train.storage import checkpoint_folder

        place = checkpoint_folder(config.checkpoint, folder, name)
        checkpoints = stack.enter_context(Checkpoints(place, config.checkpoint))
        corpus = prepare(config, checkpoints, output)
        watchdog = stack.enter_context(platform.Watchdog(config.platform.watchdog, folder))
        trainer = SliceTrainer(config, index, corpus, checkpoints, watchdog)
        shown = RunConsole(config.train.total_tokens, config.clock.kind, 0, output)
        member = None
        if relay.is_first:
            member = Member(
                config.grpc,
                names,
                index,
                coordinator,
                fingerprint(config),
                trainer.check,
                trainer.message_bytes,
                stop,
                shown.note,
            )
            stack.enter_context(member)
        if trainer.resumed:
            output.print(f"slice {name}: goes on from its checkpoint of round {trainer.border}")
        finished = trainer.run(Led(index, relay, member), shown)
    if not finished:
        output.print(f"slice {name}: stopped and saved")
    return finished


@contextmanager
def _stop() -> Generator[threading.Event]:
    """An event that signals set, and the end of the launcher that started this process."""
    launcher = os.environ.get(LAUNCHER)
    with stop_on_signals() as stop:

        def watch() -> None:
            while str(os.getppid()) == launcher:
                time.sleep(1.0)
            stop.set()

        if launcher:
            threading.Thread(target=watch, name="launcher", daemon=True).start()
        yield stop


def require_address(text: str) -> None:
    """ConfigError unless it is HOST:PORT."""
    host, _, port = text.rpartition(":")
    require(
        host and port.isdecimal() and 0 < int(port) < 2**16,
        f"--coordinator {text!r} must be HOST:PORT, such as node0:9876",
    )
