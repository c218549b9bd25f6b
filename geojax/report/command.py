# SPDX-License-Identifier: Apache-2.0
"""The command `geojax report`: runs and results in the terminal, as a page, as pictures, as JSON,
and in other trackers; once, or as often as a run goes on.

Invariant: terminal and page are made of the same sections, read at the same moment.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import tyro
from rich.console import Console
from rich.text import Text

from geojax.config import ConfigError, require
from geojax.report.inputs import Inputs, read_inputs
from geojax.report.page import write_page
from geojax.runs import stop_on_signals
from geojax.track.metrics import NewFile, NewFolder
from geojax.track.report import publish
from geojax.track.section import new_console

_WATCH_SECONDS = "2"


@dataclass(frozen=True)
class ReportOptions:
    """Runs and results side by side: tables, pictures, a page, JSON."""

    inputs: tyro.conf.Positional[tuple[str, ...]]
    """Run folders, and files that `bench`, `profile depth`, `simulate` or `report` wrote."""
    html: NewFile | None = None
    """File for one page of everything, which loads nothing else."""
    out: NewFolder | None = None
    """Folder for the pictures."""
    json: NewFile | None = None
    """File for the figures of runs, with units, clock, seeds, versions and machine."""
    target: float | None = None
    """Target perplexity; unset: 1.02 times the worst final one."""
    watch: float | None = None
    """Report again when a run has gone on, until all have ended; seconds between looks, 2 where
    none are given."""
    tensorboard: Path | None = None
    """Folder for the runs' scalars as TensorBoard reads them (extra `tensorboard`)."""
    trackio: str | None = None
    """Project for the runs' scalars in Trackio (extra `trackio`)."""


def with_seconds(args: Sequence[str]) -> list[str]:
    """`args` with seconds behind a --watch that has none."""
    args = list(args)
    if "--watch" in args:
        place = args.index("--watch") + 1
        if place == len(args) or not _is_number(args[place]):
            args.insert(place, _WATCH_SECONDS)
    return args


def run_report(options: ReportOptions) -> None:
    """ConfigError where an input is none, or an option makes no sense."""
    console = new_console()
    if options.watch is not None:
        require(
            0 < options.watch <= 3600,
            f"--watch {options.watch}: seconds must be above 0, and 3600 at most",
        )
        require(
            not (options.tensorboard or options.trackio),
            "--watch is for the terminal and the page; leave it out to export to other trackers",
        )
        _watch(options, options.watch, console)
        return
    inputs = read_inputs(options.inputs, options.target, wait=False)
    exports = [name for name in ("tensorboard", "trackio") if getattr(options, name)]
    require(
        inputs.runs or not (exports or options.json),
        f"{', '.join(f'--{n}' for n in exports) or '--json'} is of runs, and none is given",
    )
    _publish(options, inputs, None, console)
    if exports:
        from geojax.report.export import to_tensorboard, to_trackio

        if options.tensorboard:
            _wrote(to_tensorboard(inputs.runs, options.tensorboard), console)
        if options.trackio:
            _wrote(to_trackio(inputs.runs, options.trackio), console)


def _publish(
    options: ReportOptions, inputs: Inputs, reload_seconds: float | None, console: Console
) -> None:
    sections = inputs.sections()
    json_path = options.json if inputs.runs else None
    publish(sections, inputs.compared, options.out, json_path, console)
    for message in inputs.waiting:
        console.print(Text(f"waiting: {message}"))
    if options.html:
        write_page(options.html, sections, inputs.waiting, reload_seconds)
        _wrote(str(options.html), console)


def _watch(options: ReportOptions, seconds: float, console: Console) -> None:
    """Until all runs have ended, or a signal. A report takes a fifth of the time at most, since a
    run may need the same cores."""
    seen, inputs, pause = None, None, seconds
    with stop_on_signals() as stop:
        while True:
            found = _stamps(options.inputs)
            if found != seen:
                seen, began = found, time.monotonic()
                try:
                    inputs = read_inputs(options.inputs, options.target, wait=True)
                    live = inputs.live and not stop.is_set()
                    console.clear()  # of a terminal; elsewhere it does nothing
                    console.print(Text(f"{datetime.now():%Y-%m-%d %H:%M:%S}", style="dim"))
                    _publish(options, inputs, pause if live else None, console)
                except ConfigError:
                    if inputs and options.html:  # as it was last; it need not load itself again
                        write_page(options.html, inputs.sections(), inputs.waiting, None)
                    raise
                if not live:
                    return
                pause = max(seconds, 4 * (time.monotonic() - began))
            if stop.wait(pause):
                seen = None  # once more, for a page that no longer loads itself again


def _stamps(paths: Sequence[str]) -> list[tuple[int, int] | None]:
    """Of each input, what changes when it does."""
    stamps: list[tuple[int, int] | None] = []
    for path in map(Path, paths):
        file = path if path.is_file() else path / "metrics.jsonl"
        try:
            about = file.stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((about.st_mtime_ns, about.st_size))
    return stamps


def _wrote(what: str, console: Console) -> None:
    console.print(Text(f"wrote {what}"), soft_wrap=True)
    sys.stdout.flush()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
