# SPDX-License-Identifier: Apache-2.0
"""The experiment on CONA as tables, and what was asked for before there were figures.

Invariant: they show figures that `report.json` holds, and nothing else.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from geojax.bench.cona_methods import TUNE_SHARE
from geojax.bench.cona_outcome import SHARES, Change, Figures, Reached
from geojax.track.console import format_share
from geojax.track.section import new_table

LATE = 0.3
"""Share of CONA's run from which on targets count."""
LEAST_GAIN = 1.4
"""Over the shortest iteration, as published."""
MOST_OVER_ORACLE = 0.026
"""In perplexity, as published."""
SHOWN = (0.3, 0.5, 0.7, 0.9, 1.0)


@dataclass(frozen=True)
class Demand:
    """Something that was asked for before there were figures."""

    text: str
    of: Callable[[Figures], float | None]
    """None where it cannot be said yet."""
    limit: float
    at_least: bool
    """Whether the figure must be at least the limit, or at most."""
    form: Callable[[float], str]

    def worst(self, found: Iterable[Figures]) -> float | None:
        values = [v for o in found if (v := self.of(o)) is not None]
        if not values:
            return None
        return min(values) if self.at_least else max(values)

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def _late(o: Figures, name: str) -> list[Reached] | None:
    ratios = o.ratios.get(name)
    return ratios and [r for r, s in zip(ratios, SHARES, strict=True) if s >= LATE]


def _times(value: float) -> str:
    return f"{value:.2f}x"


def _slower(name: str) -> Callable[[Figures], float | None]:
    """By how much CONA is slower than that method to any late target, as a share; the other's whole
    run counts where it did not get there."""

    def of(o: Figures) -> float | None:
        late = _late(o, name)
        return max(1 / r.ratio - 1 for r in late) if late else None

    return of


def _gain(o: Figures) -> float | None:
    late = _late(o, "shortest iteration")
    return min(r.ratio for r in late) if late else None


DEMANDS = (
    Demand(
        "faster than the shortest iteration, every late target", _gain, LEAST_GAIN, True, _times
    ),
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
        lambda o: max(o.over_oracle, default=None),
        MOST_OVER_ORACLE,
        False,
        format_share,
    ),
    Demand(
        "perplexity over the best of all at that moment, any time after 5 %",
        lambda o: max(o.over_all, default=None),
        MOST_OVER_ORACLE,
        False,
        format_share,
    ),
    Demand("switches after 5 %", lambda o: o.switches, 2, True, "{:.0f}".format),
    Demand(
        "share of the run spent on switching", lambda o: o.switch_share, 0.02, False, format_share
    ),
)


def method_table(found: Sequence[Figures]) -> Table:
    """Times to targets over CONA's, mean and deviation over seeds; > where a run ended before."""
    table = new_table()
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
        ended = [o for o in have if name in o.seconds]
        if ended:
            finals = [o.final_perplexity[name] for o in ended]
            whole = [o.seconds[name] / o.seconds["CONA"] for o in ended]
            cells += [_mean(finals, ".2f"), _mean(whole, ".2f")]
        table.add_row(name, *cells)
    return table


def spread(values: Sequence[Reached]) -> str:
    sign = "" if all(v.reached for v in values) else ">"
    return sign + _mean([v.ratio for v in values], ".2f")


def _mean(values: Sequence[float], form: str) -> str:
    text = format(statistics.mean(values), form)
    return text + (f"±{statistics.stdev(values):{form}}" if len(values) > 1 else "")


def demand_table(found: Sequence[Figures]) -> Table:
    """What was asked for, and the worst of all seeds."""
    table = new_table()
    table.title = f"{found[0].model}: asked for beforehand (modelled clock)"
    for heading in ("asked for", "limit", "worst", ""):
        table.add_column(heading, justify="right" if heading in ("limit", "worst") else "left")
    for demand in DEMANDS:
        value = demand.worst(found)
        limit = ("at least " if demand.at_least else "at most ") + demand.form(demand.limit)
        shown = "?" if value is None else demand.form(value)
        state = "" if value is None else "met" if demand.met(value) else "missed"
        table.add_row(demand.text, limit, shown, state)
    return table


def fixed_table(found: Sequence[Figures], rates: Mapping[int, float]) -> Table:
    """What the same tokens came to at each batch, and by how much more of them an equal loss takes
    than at the smallest, also in the shorter runs that tuned; `rates`: learning rate by batch, as
    tuned."""
    table = new_table()
    table.title = f"{found[0].model}: fixed batches, equal tokens"
    shorter = f"in {TUNE_SHARE:.0%} of tokens"
    headings = ("batch", "learning rate", "final perplexity", "tokens to equal loss", "by noise")
    for heading in (*headings, shorter, "by noise"):
        table.add_column(heading, justify="right")
    every = {int(batch) for o in found for batch in o.fixed_final_perplexity}
    for batch in sorted(every):
        finals = [o.fixed_final_perplexity.get(str(batch)) for o in found]
        rate = f"{rates[batch]:.3g}" if batch in rates else "-"
        cells = [_mean([f for f in finals if f is not None], ".2f")]
        for equal in ([o.equal_loss for o in found], [o.equal_loss_shorter for o in found]):
            pairs = [pair for e in equal if (pair := e.get(str(batch)))]
            each = zip(*pairs, strict=True) if pairs else ()
            cells += [_mean(values, ".2f") for values in each] or ["-", "-"]
        table.add_row(str(batch), rate, *cells)
    return table


def change_table(found: Figures) -> Table:
    """The chain that would have been predicted from the noise of the best fixed run, and the one
    that was taken, by batch."""
    table = new_table()
    table.title = (
        f"{found.model}, seed {found.seed}: predicted and taken chain, from share of tokens "
        "(modelled clock)"
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
