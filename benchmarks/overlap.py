# SPDX-License-Identifier: Apache-2.0
"""What it does to perplexity and time that exchanges go on beside inner steps.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --methods geomesh --overlaps 0 0.5 --seeds 1 --tokens 200000

Methods of the demo's base (configs/geomesh.py) at several shares of a round, over seeds: training
is real, time is modelled. Differences are to the same method and seed without overlap, and the
target is 1.02 times the worst final perplexity of that method and seed. Finished runs are kept, so
the same command goes on where it was stopped.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from geojax.bench.jobs import run_all
from geojax.config import RunConfig, require, with_seed
from geojax.configs import METHODS, demo
from geojax.track.console import format_share
from geojax.track.metrics import to_json, write_atomically
from geojax.track.summary import (
    UNITS,
    Run,
    check_accounting,
    common_target,
    load_run,
    summarise,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["geomesh", "diloco"])
    parser.add_argument("--overlaps", nargs="+", type=float, default=[0, 0.125, 0.25, 0.5, 1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, help="of each run; unset: the demo's")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    parser.add_argument("--out", type=Path, default=Path("runs/overlap"), help="folder")
    options = parser.parse_args()
    require(options.seeds >= 1, f"--seeds {options.seeds} must be at least 1")
    require(0 in options.overlaps, "--overlaps: 0 is what the others are compared with")
    for name in options.methods:
        require(name in METHODS, f"no method {name!r}; use some of {', '.join(METHODS)}")
    console = Console(highlight=False)
    places = {
        (name, overlap, seed): options.out / f"{name}-overlap{overlap:g}-seed{seed}"
        for seed in range(options.seeds)
        for name in options.methods
        for overlap in options.overlaps
    }
    configs = {place: config(*key, options.tokens) for key, place in places.items()}
    run_all(configs, options.jobs, console)
    runs = {key: load_run(place) for key, place in places.items()}
    rows = []
    for name in options.methods:
        for overlap in options.overlaps:
            rows.append(row(runs, name, overlap, options.overlaps, options.seeds))
    console.print(table(rows))
    start = next(iter(runs.values())).start
    console.print(
        f"Means over {options.seeds} seeds ± standard deviation; differences to overlap 0 seed by "
        "seed. Steps: of the next round before the result is taken in, of the slices in turn. "
        f"Times: modelled clock, 150M parameters. Trained on {start['machine']}.",
        soft_wrap=True,
    )
    content = {
        "clock": "modelled",
        "machine": start["machine"],
        "versions": start["versions"],
        "units": UNITS,
        "rows": rows,
    }
    path = options.out / "report.json"
    write_atomically(path, json.dumps(to_json(content), indent=2, allow_nan=False) + "\n")
    console.print(f"wrote {path}")


def config(name: str, overlap: float, seed: int, tokens: int | None) -> RunConfig:
    """A method of the demo's with so much of a round beside each exchange."""
    made = with_seed(METHODS[name](demo()), seed)
    if tokens is not None:
        made = replace(made, train=replace(made.train, total_tokens=tokens))
    return replace(made, exchange=replace(made.exchange, overlap=overlap))


def row(
    runs: dict[tuple[str, float, int], Run],
    name: str,
    overlap: float,
    overlaps: Sequence[float],
    seeds: int,
) -> dict[str, object]:
    """A method at one overlap over its seeds, and against itself without."""
    found = []
    for seed in range(seeds):
        target = common_target([runs[name, other, seed] for other in overlaps])
        for run in (runs[name, overlap, seed], runs[name, 0, seed]):
            check_accounting(run)
            found.append(summarise(run, target))
    mine, base = found[::2], found[1::2]
    pairs = list(zip(mine, base, strict=True))
    saved = [
        1 - a.hours_to_target / b.hours_to_target
        for a, b in pairs
        if a.hours_to_target and b.hours_to_target
    ]
    return {
        "method": name,
        "overlap": overlap,
        "lag_steps": runs[name, overlap, 0].start["lag_steps"],
        "final_perplexity": spread([s.final_perplexity for s in mine]),
        "perplexity_change": spread(
            [a.final_perplexity / b.final_perplexity - 1 for a, b in pairs]
        ),
        "wan_idle": statistics.mean(s.wan_idle for s in mine),
        "straggler_idle": statistics.mean(s.straggler_idle for s in mine),
        "time_saved": spread([1 - a.hours / b.hours for a, b in pairs]),
        "time_to_target_saved": spread(saved) if len(saved) == seeds else None,
        "results": [asdict(s) for s in mine],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return {"mean": statistics.mean(values), "deviation": deviation}


def table(rows: Sequence[dict]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    shown.add_column("\nmethod", no_wrap=True)
    for heading in (
        "\noverlap",
        "\nsteps",
        "final\nperplexity",
        "change of\nperplexity",
        "WAN\nidle",
        "straggler\nidle",
        "time saved,\nsame tokens",
        "time saved,\nto target",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for r in rows:
        steps = list(dict.fromkeys(r["lag_steps"]))
        shown.add_row(
            r["method"],
            f"{r['overlap']:g}",
            " ".join(map(str, steps)),
            _plus_minus(r["final_perplexity"], 1, 2),
            _plus_minus(r["perplexity_change"], 100, 1) + " %",
            format_share(r["wan_idle"]),
            format_share(r["straggler_idle"]),
            _plus_minus(r["time_saved"], 100, 1) + " %",
            "-"
            if r["time_to_target_saved"] is None
            else _plus_minus(r["time_to_target_saved"], 100, 1) + " %",
        )
    return shown


def _plus_minus(spread: dict[str, float], factor: float, digits: int) -> str:
    text = f"{factor * spread['mean']:.{digits}f}"
    if math.isfinite(spread["deviation"]):
        text += f"±{factor * spread['deviation']:.{digits}f}"
    return text


if __name__ == "__main__":
    main()
