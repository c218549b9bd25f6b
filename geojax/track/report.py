# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: a table, pictures and `report.json`.

Invariant: every figure is computed from runs whose accounting holds, on one clock, against one
target perplexity; the table, the pictures and the JSON show the same figures.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from geojax.config import require
from geojax.track.chain import chain_notes, chain_table
from geojax.track.console import format_bytes, format_count, format_seconds, format_share
from geojax.track.metrics import to_json, write_atomically
from geojax.track.plots import plot_chain, plot_gantt, plot_idle, plot_perplexity
from geojax.track.summary import (
    UNITS,
    Run,
    Summary,
    check_accounting,
    common_target,
    labels,
    load_run,
    summarise,
)


def report(
    folders: Sequence[Path | str], out: Path | None, json_path: Path | None, target: float | None
) -> None:
    """Compare the runs in `folders` on standard output.

    Pictures go into the folder `out` and the figures into `json_path`, where given. Without a
    `target` perplexity it is 1.02 times the worst final one. Raises ConfigError for a folder that
    is not a run with results, for accounts that do not add up, and for runs of different clocks.
    """
    require(folders, "there is nothing to report; give at least one run folder")
    runs = [load_run(folder) for folder in folders]
    for run in runs:
        check_accounting(run)
    clocks = {run.start["clock"] for run in runs}
    require(
        len(clocks) == 1,
        f"runs have different clocks, {sorted(clocks)}, and their times do not compare; report "
        "each clock's runs apart",
    )
    require(target is None or target > 1, f"target perplexity {target} must be above 1")
    rule = "as given" if target is not None else "1.02 times the worst final perplexity"
    target = common_target(runs) if target is None else target
    names = labels(runs)
    summaries = [summarise(run, target) for run in runs]
    reached = [(s.hours_to_target, n) for s, n in zip(summaries, names, strict=True)]
    slowest = max((pair for pair in reached if pair[0] is not None), default=None)

    console = Console(highlight=False)
    console.print(_table(names, summaries, slowest[0] if slowest else None))
    notes = [f"Target perplexity {target:.4g}: {rule}.", _provenance(runs)]
    if slowest and len(runs) > 1:
        notes.append(f"Speed-up: over {slowest[1]}, the slowest to reach the target.")
    notes.append("Idle: share of the run's time, of the slice that waited most.")
    for run, name in zip(runs, names, strict=True):
        if run.end is None:
            notes.append(f"{name} has not ended: its figures are up to round {len(run.rounds)}.")
    for note in notes:
        console.print(Text(note))
    for run, name in zip(runs, names, strict=True):
        if _chained(run):
            console.print(Text(f"\n{name}: its chain of strategies", style="bold"))
            console.print(chain_table(run))
        for note in chain_notes(run):
            console.print(Text(f"{name}: {note}"))

    written = []
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        written += [out / f"{name}.png" for name in ("perplexity", "gantt", "idle")]
        plot_perplexity(runs, written[0], target)
        plot_gantt(runs, written[1])
        plot_idle(runs, written[2])
        for run, name in zip(runs, names, strict=True):
            if _chained(run):
                written.append(out / f"chain-{name.replace('/', '-')}.png")
                plot_chain(run, written[-1])
    if json_path is not None:
        packages = dict.fromkeys(package for run in runs for package in run.start["versions"])
        write_json(
            json_path,
            summaries,
            clock=clocks.pop(),
            target_perplexity=target,
            machine=_distinct(run.start["machine"] for run in runs),
            versions={
                package: _distinct(run.start["versions"].get(package, "none") for run in runs)
                for package in packages
            },
        )
        written.append(json_path)
    for path in written:
        console.print(Text(f"wrote {path}"), soft_wrap=True)


def _chained(run: Run) -> bool:
    """Whether it is of one cluster whose strategy changed."""
    return bool(run.switches) and {record["slice"] for record in run.slices} == {"all"}


def write_json(
    path: Path | str,
    results: Sequence[Summary],
    *,
    clock: str,
    target_perplexity: float | None,
    machine: str,
    versions: dict[str, str],
) -> None:
    """Write `results` with what is needed to read them; `machine` and `versions` made the runs."""
    content = {
        "generated": datetime.now(UTC).date().isoformat(),
        "versions": versions,
        "machine": machine,
        "clock": clock,
        "target_perplexity": target_perplexity,
        "units": UNITS,
        "results": [asdict(result) for result in results],
    }
    write_atomically(path, json.dumps(to_json(content), indent=2, allow_nan=False) + "\n")


def _table(
    names: Sequence[str], summaries: Sequence[Summary], slowest_hours: float | None
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("\nrun", overflow="fold")
    table.add_column("to\ntarget", justify="right", max_width=7)  # "not reached" on two lines
    for heading in (
        "\nspeed-up",
        "final\nperplexity",
        "straggler\nidle",
        "WAN\nidle",
        "payload\na round",
        "vs\nfp32",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, summary in zip(names, summaries, strict=True):
        hours, ratio = summary.hours_to_target, summary.payload_ratio
        table.add_row(
            Text(name),
            "not reached" if hours is None else format_seconds(hours * 3600),
            f"{slowest_hours / hours:.2f}x" if hours and slowest_hours else "-",
            f"{summary.final_perplexity:.2f}",
            format_share(summary.straggler_idle),
            format_share(summary.wan_idle),
            format_bytes(summary.bytes_per_round),
            "-" if ratio is None else f"{ratio:.1f}x",
        )
    return table


def _provenance(runs: Sequence[Run]) -> str:
    """Which clock the times are from, and what was really trained."""
    clock = runs[0].start["clock"]
    timed = _distinct(format_count(run.start["clocked_params"]) for run in runs)
    trained = _distinct(format_count(run.start["params"]) for run in runs)
    source = (
        f"hardware and WAN model, {timed} parameters"
        if clock == "modelled"
        else f"wall time on {_distinct(run.start['machine'] for run in runs)}"
    )
    return f"Times: {clock} clock ({source}); convergence: real training of {trained} parameters."


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
