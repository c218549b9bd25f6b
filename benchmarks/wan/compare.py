# SPDX-License-Identifier: Apache-2.0
"""Methods over the same links and processors, by the wall clock, seed by seed.

Resumable: a finished run is kept, an unfinished one goes on. The target follows the rule of
`geojax bench geomesh`: 1.02 times the worst final perplexity of one seed. Invariant: the runs of a
seed share calibration, first parameters and data, and follow each other, so that differences
between methods are taken in pairs.
"""

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.wan.calibrate import Aim, Calibration, calibrated, lines
from benchmarks.wan.network import require_tools
from benchmarks.wan.predict import Rounds, mean_of, measured, predict, prediction_table
from benchmarks.wan.preset import LAB_WAN, SHARES, method, quotas, round_tokens
from benchmarks.wan.session import Setting, finished, run
from benchmarks.wan.world import Weather, make_world, read_wan
from geojax.config import RunConfig, require, with_seed
from geojax.configs.geomesh import PUBLISHED_SYNC_SHARE
from geojax.track.console import format_seconds, format_share
from geojax.track.environment import usable_cores
from geojax.track.metrics import to_json, write_atomically
from geojax.track.summary import (
    UNITS,
    Run,
    Summary,
    check_accounting,
    common_target,
    load_run,
    summarise,
)

METHODS = ("diloco", "balancing-only", "signs-only", "geomesh", "geomesh-overlap")
EACH_STEP = "data-parallel"
EACH_STEP_STEPS = 50
"""Measured of data parallelism; its hours are extrapolated, and it has no perplexity."""
QUICK_ROUNDS = 6
TIME_SAVED, STRAGGLER_LESS, WAN_LESS, WAN_IDLE_OVERLAPPED = 0.70, 8.0, 5.6, 0.02
"""Asked of GeoMesh beside DiLoCo, as published, over four slices and whole runs: time to target,
and both idles' factors; and of GeoMesh with overlap, the share of the run."""
EVALUATE_TOKENS = 200_000
"""Between evaluations, of about 30,000 a round of equal work."""


def add_command(commands) -> None:
    parser = commands.add_parser("compare", help="methods by seeds, in pairs, by the wall clock")
    parser.add_argument("--out", type=Path, default=Path("runs/wan-compare"), help="folder")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="diloco among them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--wan", default=LAB_WAN, help="WAN by name, or a CSV file")
    parser.add_argument("--cores", type=float, help="of all slices; unset: 0.8 of what there is")
    parser.add_argument("--sync-share", type=float, default=PUBLISHED_SYNC_SHARE)
    parser.add_argument("--round-seconds", type=float, default=2.0, help="inner steps, at least")
    parser.add_argument("--each-step", action="store_true", help="data parallelism, 50 steps")
    parser.add_argument("--quick", action="store_true", help="2 slices, 6 rounds, 1 seed")
    parser.set_defaults(function=_compare)


def _compare(options: argparse.Namespace, console: Console) -> None:
    require_tools()
    require(options.seeds >= 1, f"--seeds {options.seeds} must be at least 1")
    require("diloco" in options.methods, "--methods: diloco is what others are compared with")
    slices = (0, len(SHARES) - 1) if options.quick else tuple(range(len(SHARES)))
    aim = Aim(
        options.wan,
        tuple(SHARES[i] for i in slices),
        0.8 * len(usable_cores()) if options.cores is None else options.cores,
        slices,
        options.sync_share,
        options.round_seconds,
    )
    folder, seeds = options.out.resolve(), 1 if options.quick else options.seeds
    configs = planned(aim, options.methods, options.each_step, options.quick)
    console.print(
        f"cost: a calibration first, then {seeds * len(configs)} runs one after another; how long "
        "follows from it"
    )
    calibration = calibrated(aim, folder, console)
    for line in lines(calibration, configs["diloco"]):
        console.print(line, soft_wrap=True)
    said = {name: predict(calibration, config) for name, config in configs.items()}
    seconds = {name: calibration.start_seconds + r.seconds for name, r in said.items()}
    each = ", ".join(f"{name} {format_seconds(s)}" for name, s in seconds.items())
    console.print(
        f"cost: {format_seconds(seeds * sum(seconds.values()))} in all; a run: {each}",
        soft_wrap=True,
    )
    setting = Setting(aim.wan, Weather(calibration.rate_scale), calibration.cores)
    for seed in range(seeds):
        for name, config in configs.items():
            place, seeded = folder / f"{name}-seed{seed}", with_seed(config, seed)
            if finished(seeded, place):
                console.print(f"{place} is finished already; delete it to train again")
                continue
            console.print(f"{name}, seed {seed}")
            for line in run(seeded, place, setting, console).lines():
                console.print("  " + line, soft_wrap=True)
    _report(folder, said, seeds, calibration, console, options.quick)


def planned(aim: Aim, methods: Sequence[str], each_step: bool, quick: bool) -> dict[str, RunConfig]:
    """All runs of a seed, by method. ConfigError where one cannot be: nothing has run yet."""
    tokens = None
    if quick:
        tokens = QUICK_ROUNDS * round_tokens(method("diloco", slices=aim.slices), aim.shares)
    configs = {name: _config(name, tokens, aim.slices, quick) for name in methods}
    if each_step:
        configs[EACH_STEP] = _each_step(aim)
    first = configs["diloco"]
    quotas(first, aim.shares, aim.cores)
    places = [(s.name, s.region) for s in first.slices]
    make_world(read_wan(aim.wan), places, places[0][1], Weather())
    return configs


def _config(name: str, tokens: int | None, slices: Sequence[int], quick: bool) -> RunConfig:
    config = method(name, tokens, slices)
    shown = replace(config.eval, every_tokens=EVALUATE_TOKENS)
    if quick:
        shown = replace(shown, every_tokens=0, sequences=32)
    return replace(config, eval=shown)


def _each_step(aim: Aim) -> RunConfig:
    first = method(EACH_STEP, slices=aim.slices)
    config = method(EACH_STEP, EACH_STEP_STEPS * round_tokens(first, aim.shares), aim.slices)
    return replace(config, eval=replace(config.eval, every_tokens=0, sequences=32))


def _report(
    folder: Path,
    said: Mapping[str, Rounds],
    seeds: int,
    calibration: Calibration,
    console: Console,
    quick: bool,
) -> None:
    names = tuple(said)
    compared = [name for name in names if name != EACH_STEP]
    results: dict[str, list[Summary]] = {name: [] for name in compared}
    for seed in range(seeds):
        runs = {name: load_run(folder / f"{name}-seed{seed}") for name in compared}
        target = common_target(list(runs.values()))
        for name, found in runs.items():
            check_accounting(found)
            require_whole(found)
            results[name].append(summarise(found, target))
    rows = {name: against(found, results["diloco"]) for name, found in results.items()}
    if EACH_STEP in names:
        rows[EACH_STEP] = _extrapolated(folder, seeds, results["diloco"])
    console.print(table(rows))
    asked = [] if quick else verdicts(rows)
    for line in asked:
        console.print(line, soft_wrap=True)
    machine = load_run(folder / "diloco-seed0").start
    console.print(
        f"Means over {seeds} seeds ± standard deviation; differences to DiLoCo seed by seed. "
        f"Measured clock, without starts and evaluations; {machine['machine']}."
        + (
            f" {EACH_STEP}: {EACH_STEP_STEPS} steps measured, the rest extrapolated."
            if EACH_STEP in names
            else ""
        ),
        soft_wrap=True,
    )
    pairs = {
        name: (
            predicted,
            mean_of([measured(load_run(folder / f"{name}-seed{s}")) for s in range(seeds)]),
        )
        for name, predicted in said.items()
    }
    console.print("\nPredicted from the calibration / measured, mean over seeds:")
    console.print(prediction_table(pairs))
    paths = [folder / f"{name}-seed{seed}" / "lab.json" for name in names for seed in range(seeds)]
    labs = {p.parent.name: json.loads(p.read_text()) for p in paths if p.exists()}
    content = {
        "clock": "measured",
        "machine": machine["machine"],
        "versions": machine["versions"],
        "units": UNITS,
        "calibration": asdict(calibration),
        "summary": rows,
        "asked": asked,
        "predicted": {name: asdict(predicted) for name, (predicted, _) in pairs.items()},
        "measured": {name: asdict(found) for name, (_, found) in pairs.items()},
        "results": [asdict(s) for found in results.values() for s in found],
        "traffic": {name: lab["traffic"] for name, lab in labs.items()},
    }
    path = folder / "report.json"
    write_atomically(path, json.dumps(to_json(content), indent=2, allow_nan=False) + "\n")
    console.print(f"wrote {path}")


def require_whole(run: Run) -> None:
    """ConfigError where a slice was left out of a round: only runs without failures compare."""
    for name in {r["slice"] for r in run.slices}:
        missed = len(run.rounds) - sum(r["slice"] == name for r in run.slices)
        require(
            not missed,
            f"{run.folder}: slice {name} was left out of {missed} rounds, and only runs without "
            "failures are compared; delete it, and give the command to train it again",
        )


def against(found: Sequence[Summary], baseline: Sequence[Summary]) -> dict[str, Any]:
    """Means and deviations over seeds, and those of the differences in pairs."""
    hours = [(s.hours_to_target, b.hours_to_target) for s, b in zip(found, baseline, strict=True)]
    reached = [(mine, theirs) for mine, theirs in hours if mine is not None and theirs]
    whole = len(reached) == len(hours)
    return {
        "minutes_to_target": spread([60 * mine for mine, _ in reached]) if whole else None,
        "time_saved": spread([1 - mine / theirs for mine, theirs in reached]) if whole else None,
        "final_perplexity": spread([s.final_perplexity for s in found]),
        "straggler_idle": spread([s.straggler_idle for s in found]),
        "wan_idle": spread([s.wan_idle for s in found]),
        "minutes_same_tokens": spread(
            [60 * s.hours * b.tokens / s.tokens for s, b in zip(found, baseline, strict=True)]
        ),
    }


def verdicts(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What was asked of the methods that ran, what came, and whether that is met."""
    lines = []

    def say(what: str, value: float, form: str, met: bool) -> None:
        lines.append(f"{what}: {form.format(value)}, {'met' if met else 'NOT met'}")

    base, mine = rows["diloco"], rows.get("geomesh")
    if mine:
        saved = mine["time_saved"]
        if saved is None:
            lines.append("geomesh, time to target: a run did not reach it, NOT met")
        else:
            what = f"geomesh, time to target below diloco's (asked: {TIME_SAVED:.0%} or more)"
            say(what, saved["mean"], "{:.2%}", saved["mean"] >= TIME_SAVED)
        for kind, factor in (("straggler_idle", STRAGGLER_LESS), ("wan_idle", WAN_LESS)):
            own, theirs = mine[kind]["mean"], base[kind]["mean"]
            what = f"geomesh, {kind.replace('_', ' ')} below diloco's (asked: {factor}x or more)"
            if not own and not theirs:
                lines.append(f"{what}: none in either")
                continue
            less = theirs / own if own else math.inf
            say(what, less, "{:.1f}x", less >= factor)
    if over := rows.get("geomesh-overlap"):
        idle = over["wan_idle"]["mean"]
        what = f"geomesh-overlap, wan idle (asked: under {WAN_IDLE_OVERLAPPED:.0%} of the run)"
        say(what, idle, "{:.1%}", idle < WAN_IDLE_OVERLAPPED)
    return lines


def _extrapolated(folder: Path, seeds: int, baseline: Sequence[Summary]) -> dict[str, object]:
    """Of the steps that were measured; perplexity is not known."""
    runs = [load_run(folder / f"{EACH_STEP}-seed{seed}") for seed in range(seeds)]
    minutes, shares = [], []
    for found, other in zip(runs, baseline, strict=True):
        minutes.append(found.seconds / found.rounds[-1]["tokens"] * other.tokens / 60)
        shares.append(max(parts["wan"] for parts in found.shares().values()))
    return {"minutes_same_tokens": spread(minutes), "wan_idle": spread(shares)}


def spread(values: Sequence[float]) -> dict[str, float]:
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return {"mean": statistics.mean(values), "deviation": deviation}


def table(rows: Mapping[str, Mapping[str, object]]) -> Table:
    """A method a line; a dash where something was not reached, or is not known."""
    columns = {
        "minutes_to_target": ("minutes\nto target", "{:.1f}"),
        "time_saved": ("time\nsaved", "percent"),
        "final_perplexity": ("final\nperplexity", "{:.2f}"),
        "straggler_idle": ("straggler\nidle", "share"),
        "wan_idle": ("WAN\nidle", "share"),
        "minutes_same_tokens": ("minutes for\nsame tokens", "{:.1f}"),
    }
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    shown.add_column("\nmethod", no_wrap=True)
    for heading, _ in columns.values():
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        shown.add_row(name, *(_cell(row.get(key), form) for key, (_, form) in columns.items()))
    return shown


def _cell(value: object, form: str) -> str:
    if not isinstance(value, dict):
        return "-"
    mean, deviation = value["mean"], value["deviation"]
    if form == "share":
        return format_share(mean)
    factor, form = (100, "{:.1f}") if form == "percent" else (1, form)
    text = form.format(factor * mean)
    if math.isfinite(deviation):
        text += f"±{form.format(factor * deviation)}"
    return text + ("%" if factor == 100 else "")
