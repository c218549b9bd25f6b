# SPDX-License-Identifier: Apache-2.0
"""The experiment on CONA as tables, pictures and `report.json`, of whatever has ended.

Invariant: table, pictures and JSON show the same figures; what was asked for beforehand stands
beside what was found, and a part that is missing is named.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from geojax.bench.cona_methods import TUNE_SHARE, Setting, tuned_rates
from geojax.bench.cona_outcome import SHARES, Figures, Outcome, outcome
from geojax.bench.cona_plots import plot_methods
from geojax.bench.cona_tables import (
    DEMANDS,
    change_table,
    demand_table,
    fixed_table,
    method_table,
)
from geojax.track.environment import made_by
from geojax.track.metrics import to_json, write_atomically
from geojax.track.plots import plot_chain

UNITS = {
    "ratios": "time to the target over CONA's, for each of shares; reached false: of a whole run "
    "that did not get there",
    "shares": "of CONA's time; a target is the loss that CONA has there",
    "oracle": "of the greedy run, the predicted chain and all fixed strategies the one with the "
    "lowest loss when CONA's run ends",
    "over_oracle": "perplexity over the oracle's at the same time, less 1, at each evaluation",
    "over_all": "over the lowest of all those runs at that moment",
    "equal_loss": "by batch, tokens to one loss over those of the smallest batch: measured, and by "
    "the noise",
    "equal_loss_shorter": f"the same of runs by {TUNE_SHARE:.0%} of the tokens",
    "switches": "to strategies that stayed, after 5 % of the tokens",
    "switch_share": "of CONA's time",
    "changes": "crossing and noise in sequences; predicted and taken as shares of the tokens",
    "times": "modelled clock: published models on A100s; convergence: real training",
}


def report(
    folder: Path,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    json_path: Path | None,
    console: Console,
) -> None:
    """Print what there is of these models and seeds; pictures and figures go into `folder`."""
    found: dict[str, list[Outcome]] = {}
    for base in settings:
        each = [outcome(base, folder / base.name / f"seed{s}", s) for s in seeds]
        found[base.name] = [o for o in each if o]
        if not found[base.name]:
            console.print(f"{base.name}: no run by CONA has ended yet")
            continue
        first, figures = found[base.name][0], [o.figures for o in found[base.name]]
        console.print(method_table(figures))
        console.print(demand_table(figures))
        console.print(fixed_table(figures, tuned_rates(base)))
        console.print(change_table(first.figures))
        for name in missing(figures, seeds):
            console.print(f"missing: {name}")
        plot_methods(first.curves, folder / f"{base.name}-perplexity.png", base)
        plot_chain(first.cona, folder / f"{base.name}-chain.png")
    every = [o for outcomes in found.values() for o in outcomes]
    if not every:
        return
    path = json_path or folder / "report.json"
    text = json.dumps(to_json(_content(settings, found)), indent=2, allow_nan=False)
    write_atomically(path, text + "\n")
    console.print(f"wrote {path}, pictures beside it", soft_wrap=True)


def missing(found: Sequence[Figures], seeds: Sequence[int]) -> list[str]:
    """Parts of a model that have not ended."""
    there = {o.seed for o in found}
    gone = [f"seed {s}, all" for s in seeds if s not in there]
    return gone + [f"seed {o.seed}, {name}" for o in found for name in o.missing]


def _content(settings: Sequence[Setting], found: dict[str, list[Outcome]]) -> dict[str, Any]:
    starts = [o.cona.start for outcomes in found.values() for o in outcomes]
    return made_by("modelled", sorted({start["machine"] for start in starts})) | {
        "versions": starts[0]["versions"],
        "units": UNITS,
        "shares": SHARES,
        "demands": {
            name: {d.text: d.worst(o.figures for o in outcomes) for d in DEMANDS}
            for name, outcomes in found.items()
        },
        "schedules": {base.name: asdict(base.config.train.schedule) for base in settings},
        "strategies": {
            base.name: [{"name": o.name, "step_seconds": o.seconds} for o in base.options]
            for base in settings
        },
        "rates": {
            base.name: {"base": base.config.train.optimizer.learning_rate, "factors": table}
            for base in settings
            if base.config.scaling and (table := base.config.scaling.table)
        },
        "results": [_result(o.figures) for outcomes in found.values() for o in outcomes],
    }


def _result(found: Figures) -> dict[str, Any]:
    ratios = {name: [r._asdict() for r in each] for name, each in found.ratios.items()}
    changes = [change._asdict() for change in found.changes]
    return asdict(replace(found, ratios={}, changes=[])) | {"ratios": ratios, "changes": changes}
