# SPDX-License-Identifier: Apache-2.0
"""GeoMesh against DiLoCo and against its own halves: the demo, the longer benchmark, the tuning.

All train for real; time is modelled in the published setting (configs/geomesh.py). The target
perplexity follows a rule fixed beforehand: 1.02 times the worst final perplexity of the methods of
one seed. Settings were chosen by `tune`, on held-out sequences that no reported figure looks at.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from geojax.bench.jobs import run_all
from geojax.bench.published import PUBLISHED_HOURS
from geojax.config import OptimizerConfig, OuterConfig, RunConfig, require, with_seed
from geojax.configs import BASELINES, METHODS, demo
from geojax.track.console import format_share
from geojax.track.environment import made_by
from geojax.track.metrics import to_json, write_atomically
from geojax.track.report import report
from geojax.track.section import new_table
from geojax.track.summary import UNITS, Summary, common_target, load_run, summarise

DEMO_METHODS = ("geomesh", "diloco", "balancing-only", "signs-only")
BENCH_METHODS = (*DEMO_METHODS, "fp16", "int8", "diloco-lion", "geomesh-adamw")
TUNE_FIRST = 256
"""First held-out sequence of tuning; reported figures end before it."""


def run_demo(folder: Path, jobs: int, json_path: Path | None) -> None:
    """Train the demo's four methods and compare them: table, pictures, `report.json`."""
    console = Console(highlight=False)
    console.print(
        f"Training {len(DEMO_METHODS)} methods, {jobs} at a time: real text, real convergence; "
        "time as modelled for four GPUs in four regions."
    )
    configs = {folder / name: METHODS[name](demo()) for name in DEMO_METHODS}
    run_all(configs, jobs, console)
    report(list(configs), folder, json_path or folder / "report.json", None)


def run_bench(
    folder: Path,
    jobs: int,
    seeds: int,
    json_path: Path | None,
    methods: Sequence[str] = BENCH_METHODS,
) -> None:
    """Methods and controls over several seeds: means, spreads, and differences by seed.

    DiLoCo, which the others are compared to, is always among them. ConfigError for an unknown one.
    """
    require(seeds >= 1, f"seeds {seeds} must be at least 1")
    known = METHODS | BASELINES
    for name in methods:
        require(name in known, f"no method {name!r} to compare; use some of {list(known)}")
    methods = list(dict.fromkeys((*methods, "diloco")))
    console = Console(highlight=False)
    configs = {
        folder / f"{name}-seed{seed}": with_seed(known[name](demo()), seed)
        for seed in range(seeds)
        for name in methods
    }
    run_all(configs, jobs, console)
    results = {name: [] for name in methods}
    for seed in range(seeds):
        runs = {name: load_run(folder / f"{name}-seed{seed}") for name in methods}
        target = common_target(list(runs.values()))
        for name, run in runs.items():
            results[name].append(summarise(run, target))
    rows = {name: _against(found, results["diloco"]) for name, found in results.items()}
    console.print(bench_table(rows))
    console.print(bench_note(seeds))
    content = {
        "summary": rows,
        "results": [asdict(s) for found in results.values() for s in found],
    }
    _write(json_path or folder / "report.json", list(configs), content, console)


def tune(methods: Sequence[str], folder: Path, jobs: int, json_path: Path | None) -> None:
    """Try at most 12 settings a method on held-out text of its own; the best one comes first."""
    require(methods, f"name at least one method to tune, of {list(METHODS)}")
    console = Console(highlight=False)
    configs = {}
    known = [m for m in METHODS if m != "data-parallel"]  # its outer optimizer is not SGD
    for method in methods:
        require(method in known, f"no method {method!r} to tune; use one of {known}")
        for name, config in _settings(METHODS[method](demo())):
            shown = replace(config.eval, first=TUNE_FIRST)
            configs[folder / method / name] = replace(config, eval=shown)
    run_all(configs, jobs, console)
    results = []
    for method in methods:
        runs = [load_run(path) for path in configs if path.parent.name == method]
        for run in sorted(runs, key=lambda r: r.final_perplexity):
            results.append(asdict(summarise(run, None)) | {"setting": run.name})
    console.print(tune_table(results))
    _write(json_path or folder / "report.json", list(configs), {"results": results}, console)


def _write(path: Path, folders: Sequence[Path], content: dict, console: Console) -> None:
    """Figures as JSON, with what is needed to read them."""
    starts = [load_run(folder).start for folder in folders]
    machines = sorted({start["machine"] for start in starts})
    content = (
        made_by(starts[0]["clock"], machines)
        | {
            "versions": starts[0]["versions"],
            "seeds": sorted({start["seed"] for start in starts}),
            "units": UNITS,
        }
        | content
    )
    write_atomically(path, json.dumps(to_json(content), indent=2, allow_nan=False) + "\n")
    console.print(f"wrote {path}")


def _settings(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """3 inner rates x 4 outer optimizers around the method's own."""
    inner = config.train.optimizer
    rates = [1e-2, 1.4e-2, 2e-2] if inner.name == "adamw" else [2e-3, 3e-3, 4e-3]
    outers = [(1.0, 0.0), (1.0, 0.3), (1.0, 0.5), (0.7, 0.9)]
    for rate, (outer_rate, momentum) in product(rates, outers):
        outer = OptimizerConfig(
            name="sgd", learning_rate=outer_rate, momentum=momentum, nesterov=momentum > 0
        )
        yield (
            f"inner{rate:g}-outer{outer_rate:g}-momentum{momentum:g}",
            replace(
                config,
                train=replace(config.train, optimizer=replace(inner, learning_rate=rate)),
                outer=OuterConfig(outer),
            ),
        )


def _against(found: Sequence[Summary], baseline: Sequence[Summary]) -> dict[str, object]:
    """Means and standard deviations, and those of the seed-by-seed differences to `baseline`."""
    pairs = list(zip(found, baseline, strict=True))
    hours = [s.hours_to_target for s in found]
    reached = None not in hours
    faster = [
        1 - s.hours_to_target / b.hours_to_target
        for s, b in pairs
        if s.hours_to_target and b.hours_to_target
    ]
    ablation = [12.0 * (s.hours / s.tokens) / (b.hours / b.tokens) for s, b in pairs]
    return {
        "minutes_to_target": _spread([60 * h for h in hours if h]) if reached else None,
        "time_saved": _spread(faster) if len(faster) == len(found) else None,
        "final_perplexity": _spread([s.final_perplexity for s in found]),
        "perplexity_over_diloco": _spread(
            [s.final_perplexity / b.final_perplexity - 1 for s, b in pairs]
        ),
        "straggler_idle": statistics.mean(s.straggler_idle for s in found),
        "wan_idle": statistics.mean(s.wan_idle for s in found),
        "payload_ratio": statistics.mean(s.payload_ratio or 0.0 for s in found),
        "hours_same_tokens": statistics.mean(ablation),
        "published_hours": PUBLISHED_HOURS.get(found[0].method),
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return {"mean": statistics.mean(values), "deviation": deviation}


def bench_table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """A line a method, of the figures under `summary`."""
    table = new_table()
    headings = (
        "time\nsaved",
        "final\nperplexity",
        "over\nDiLoCo",
        "straggler\nidle",
        "WAN\nidle",
        "\nhours",
        "\npaper",
    )
    table.add_column("\nmethod", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(
            name,
            _percent(row["time_saved"]),
            _plus_minus(row["final_perplexity"], "{:.2f}"),
            _percent(row["perplexity_over_diloco"]),
            format_share(row["straggler_idle"]),
            format_share(row["wan_idle"]),
            f"{row['hours_same_tokens']:.1f}",
            "" if row["published_hours"] is None else f"{row['published_hours']:.1f}",
        )
    return table


def bench_note(seeds: int) -> str:
    return (
        f"Means over {seeds} seeds ± standard deviation. Time saved to the target perplexity, and "
        "perplexity over DiLoCo's, seed by seed. Times: modelled clock, 150M parameters. Hours: "
        "for the same tokens, scaled so that DiLoCo takes the published 12.0."
    )


def tune_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """A line a setting, the best of each method first."""
    table = Table("method", "setting", "perplexity", box=box.SIMPLE_HEAD)
    for result in results:
        perplexity = result["final_perplexity"]
        shown = math.inf if perplexity is None else perplexity
        table.add_row(result["method"], result["setting"], f"{shown:.3f}")
    return table


def _plus_minus(spread: Mapping[str, float | None] | None, form: str) -> str:
    if spread is None:
        return "not reached"
    text = form.format(spread["mean"])
    if spread["deviation"] is not None and math.isfinite(spread["deviation"]):
        text += "±" + form.format(spread["deviation"])
    return text


def _percent(spread: Mapping[str, float | None] | None) -> str:
    hundredths = spread and {k: None if v is None else 100 * v for k, v in spread.items()}
    return _plus_minus(hundredths, "{:.1f}") + ("%" if spread else "")
