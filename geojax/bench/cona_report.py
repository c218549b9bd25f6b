# SPDX-License-Identifier: Apache-2.0
"""The experiment on CONA as tables, pictures and `report.json`, of whatever has ended.

Invariant: table, pictures and JSON show the same figures; what was asked for beforehand stands
beside what was found, and a part that is missing is named.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from geojax.bench.cona_methods import Setting
from geojax.bench.cona_outcome import SHARES, Change, Outcome, Reached, outcome
from geojax.bench.cona_plots import plot_methods
from geojax.track.console import format_share
from geojax.track.metrics import to_json, write_atomically
from geojax.track.plots import plot_chain

LATE = 0.3
"""Share of CONA's run from which on targets count."""
SHOWN = (0.3, 0.5, 0.7, 0.9, 1.0)
UNITS = {
    "ratios": "time to the target over CONA's, for each of shares; reached false: of a whole run "
    "that did not get there",
    "shares": "of CONA's time; a target is the loss that CONA has there",
    "over_oracle": "perplexity over the oracle's at the same time, less 1, at each evaluation",
    "switches": "to strategies that stayed, after 5 % of the tokens",
    "switch_share": "of CONA's time",
    "changes": "crossing and noise in sequences; predicted and taken as shares of the tokens",
    "times": "modelled clock: published models on A100s; convergence: real training",
}


@dataclass(frozen=True)
class Demand:
    """Something that was asked for before there were figures."""

    text: str
    of: Callable[[Outcome], float | None]
    """None where it cannot be said yet."""
    limit: float
    at_least: bool
    """Whether the figure must be at least the limit, or at most."""
    form: Callable[[float], str]

    def worst(self, found: Iterable[Outcome]) -> float | None:
        values = [v for o in found if (v := self.of(o)) is not None]
        if not values:
            return None
        return min(values) if self.at_least else max(values)

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def _late(o: Outcome, name: str) -> list[Reached] | None:
    ratios = o.ratios.get(name)
    return ratios and [r for r, s in zip(ratios, SHARES, strict=True) if s >= LATE]


def _times(value: float) -> str:
    return f"{value:.2f}x"


def _slower(name: str) -> Callable[[Outcome], float | None]:
    """By how much CONA is slower than that method to any late target, as a share; the other's whole
    run counts where it did not get there."""

    def of(o: Outcome) -> float | None:
        late = _late(o, name)
        return max(1 / r.ratio - 1 for r in late) if late else None

    return of


def _gain(o: Outcome) -> float | None:
    late = _late(o, "shortest iteration")
    return min(r.ratio for r in late) if late else None


DEMANDS = (
    Demand("faster than the shortest iteration, every late target", _gain, 1.4, True, _times),
    Demand(
        "slower than the best fixed in hindsight, any late target",
        _slower("best fixed in hindsight"),
        0.03,
        False,
        format_share,
    ),
    Demand(
        "slower than the best fixed of each late target",
        _slower("best fixed, each target"),
        0.03,
        False,
        format_share,
    ),
    Demand(
        "perplexity over the oracle's, any time after 5 %",
        lambda o: max(o.over) if o.over else None,
        0.026,
        False,
        format_share,
    ),
    Demand("switches after 5 %", lambda o: o.switches, 2, True, "{:.0f}".format),
    Demand(
        "share of the run spent on switching", lambda o: o.switch_share, 0.02, False, format_share
    ),
)


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
        console.print(method_table(found[base.name]))
        console.print(demand_table(found[base.name]))
        first = found[base.name][0]
        console.print(change_table(first))
        for name in missing(found[base.name], seeds):
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


def missing(found: Sequence[Outcome], seeds: Sequence[int]) -> list[str]:
    """Parts of a model that have not ended."""
    there = {o.seed for o in found}
    gone = [f"seed {s}, all" for s in seeds if s not in there]
    return gone + [f"seed {o.seed}, {name}" for o in found for name in o.missing]


def method_table(found: Sequence[Outcome]) -> Table:
    """Times to targets over CONA's, mean and deviation over seeds; > where a run ended before."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.title = (
        f"{found[0].model}: time to CONA's loss at shares of its time, over CONA's "
        f"(modelled clock; {len(found)} of {len({o.seed for o in found})} seeds)"
    )
    table.add_column("method", no_wrap=True)
    for heading in (*(f"{s:.0%}" for s in SHOWN), "final\nperplexity", "whole\nrun"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in dict.fromkeys(name for o in found for name in o.ratios):
        have = [o for o in found if name in o.ratios]
        cells = [spread([o.ratios[name][SHARES.index(s)] for o in have]) for s in SHOWN]
        curves = [(o.curves[name], o.curves["CONA"]) for o in have if name in o.curves]
        if curves:
            finals = [c.final_perplexity for c, _ in curves]
            cells += [_mean(finals, ".2f"), _mean([c.end / own.end for c, own in curves], ".2f")]
        table.add_row(name, *cells)
    return table


def spread(values: Sequence[Reached]) -> str:
    sign = "" if all(v.reached for v in values) else ">"
    return sign + _mean([v.ratio for v in values], ".2f")


def _mean(values: Sequence[float], form: str) -> str:
    text = format(statistics.mean(values), form)
    return text + (f"±{statistics.stdev(values):{form}}" if len(values) > 1 else "")


def demand_table(found: Sequence[Outcome]) -> Table:
    """What was asked for, and the worst of all seeds."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("asked for", "limit", "worst", ""):
        table.add_column(heading, justify="right" if heading in ("limit", "worst") else "left")
    for demand in DEMANDS:
        value = demand.worst(found)
        limit = ("at least " if demand.at_least else "at most ") + demand.form(demand.limit)
        shown = "?" if value is None else demand.form(value)
        state = "" if value is None else "met" if demand.met(value) else "missed"
        table.add_row(demand.text, limit, shown, state)
    return table


def change_table(found: Outcome) -> Table:
    """The chain that would have been predicted from the noise of the best fixed run, and the one
    that was taken, by batch."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.title = (
        f"{found.model}, seed {found.seed}: predicted and taken chain, from share of tokens"
    )
    headings = ("batch", "best from", "predicted", "noise then", "taken", "noise then")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("differs")
    for change in found.changes:
        table.add_row(*_change_cells(change))
    table.caption = (
        f"Noise as CONA knew it, in sequences. Trials that did not stay: {found.trials}. "
        f"Switching: {found.switch_share:.2%} of the run."
    )
    return table


def _change_cells(change: Change) -> list[str]:
    predicted, taken = (
        "-" if s is None else format_share(s) for s in (change.predicted, change.taken)
    )
    then, now = (
        "" if n is None else "{} ({}-{})".format(*("?" if x is None else f"{x:.0f}" for x in n))
        for n in (change.noise_then, change.noise)
    )
    crossing = "never" if math.isinf(change.crossing) else f"{change.crossing:.1f}"
    return [str(change.batch), crossing, predicted, then, taken, now, change.differs]


def _content(settings: Sequence[Setting], found: dict[str, list[Outcome]]) -> dict[str, Any]:
    starts = [o.cona.start for outcomes in found.values() for o in outcomes]
    return {
        "clock": "modelled",
        "machine": sorted({start["machine"] for start in starts}),
        "versions": starts[0]["versions"],
        "units": UNITS,
        "shares": SHARES,
        "demands": {
            name: {d.text: d.worst(outcomes) for d in DEMANDS} for name, outcomes in found.items()
        },
        "strategies": {
            base.name: [{"name": o.name, "step_seconds": o.seconds} for o in base.options]
            for base in settings
        },
        "rates": {
            base.name: {"base": base.config.train.optimizer.learning_rate, "factors": table}
            for base in settings
            if base.config.scaling and (table := base.config.scaling.table)
        },
        "results": [_result(o) for outcomes in found.values() for o in outcomes],
    }


def _result(o: Outcome) -> dict[str, Any]:
    return {
        "model": o.model,
        "seed": o.seed,
        "ratios": {n: [r._asdict() for r in ratios] for n, ratios in o.ratios.items()},
        "final_perplexity": {n: c.final_perplexity for n, c in o.curves.items()},
        "fixed_final_perplexity": {str(b): c.final_perplexity for b, c in o.fixed.items()},
        "seconds": {n: c.end for n, c in o.curves.items()},
        "over_oracle": o.over,
        "switches": o.switches,
        "trials": o.trials,
        "switch_share": o.switch_share,
        "changes": [c._asdict() for c in o.changes],
        "missing": o.missing,
    }
