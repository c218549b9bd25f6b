# SPDX-License-Identifier: Apache-2.0
"""What came of moments (benchmarks/wan/moments.py), each alone and all together in one table.

Invariant: a run in which the process stayed away is compared with undisturbed runs without it, one
in which it came back with those of all slices, and one in which it should have and did not with
none.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.wan.moments import PHASES, SIGNALS, VICTIMS, Moment
from geojax.config import ConfigError, require

TABLE_WIDTH = 112
"""Characters."""


@dataclass(frozen=True)
class Outcome:
    """Of one moment."""

    moment: Moment
    round: int | None
    """That was open when the signal came; None: it never came."""
    in_phase: bool
    """Whether the signal was seen to come in the moment's phase."""
    problem: str
    """Why the run did not complete; empty: it did."""
    hash_problem: str
    sample_problem: str
    returned: bool
    """Whether the process was in the last round; of a coordinator: true."""
    final_loss: float | None
    """Nats a token, held out."""
    lost_seconds: float | None


def read_outcome(folder: Path, moment: Moment) -> Outcome | None:
    """What is known of a moment. ConfigError where its file is of another one."""
    path = folder / moment.folder / "result.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        outcome = Outcome(**found | {"moment": Moment(**found["moment"])})
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result ({error}); delete it") from error
    require(
        outcome.moment == moment,
        f"{path} is of another moment than this command draws; choose another --out, or delete it",
    )
    return outcome


def problems(outcomes: Iterable[Outcome]) -> list[str]:
    """All that went wrong, in words, a line each."""
    lines = []
    for o in outcomes:
        m, found = o.moment, [o.problem, o.hash_problem, o.sample_problem]
        if o.round is None:
            found.append("its moment did not come")
        elif not o.in_phase:
            found.append(f"the signal came in round {o.round}, but not seen to be in its phase")
        if not o.problem and m.returns and not o.returned:
            found.append(f"{m.name} was not back in the last round")
        lines += [f"{m.folder} ({m.name}, {m.phase}): {text}" for text in found if text]
    return lines


def rows(
    outcomes: Sequence[Outcome], losses: Mapping[tuple[str, int], float]
) -> dict[str, dict[str, Any]]:
    """By signal, process and phase, and of each signal together."""
    found = {}
    for number in SIGNALS:
        mine = [o for o in outcomes if o.moment.signal == number]
        for victim in VICTIMS:
            for phase in PHASES:
                cell = [o for o in mine if (o.moment.victim, o.moment.phase) == (victim, phase)]
                if cell:
                    found[f"{number}, {victim}, {phase}"] = row(cell, losses)
        if mine:
            found[f"{number}, all"] = row(mine, losses)
    return found


def row(outcomes: Sequence[Outcome], losses: Mapping[tuple[str, int], float]) -> dict[str, Any]:
    """Of these moments together; `losses`: of undisturbed runs, by absent slice and seed."""
    whole = [o for o in outcomes if not o.problem]
    lost = [o.lost_seconds for o in whole if o.lost_seconds is not None]
    over: dict[bool, list[float]] = {True: [], False: []}
    for o in whole:
        m = o.moment
        # One that was to come back, and did not in time, ended with a slice less: no comparison.
        if o.final_loss is not None and o.round is not None and o.returned == m.returns:
            absent = "" if m.returns else m.name
            over[m.returns].append(o.final_loss - losses[absent, m.seed])
    return {
        "moments": len(outcomes),
        "in_phase": sum(o.in_phase for o in outcomes),
        "completed": len(whole),
        "hashes_equal": sum(not o.hash_problem for o in whole),
        "samples_right": sum(not o.sample_problem for o in whole),
        "returned": sum(o.returned for o in whole if o.moment.returns),
        "to_return": sum(o.moment.returns for o in outcomes),
        "loss_over_all": _spread(over[True]),
        "loss_over_fewer": _spread(over[False]),
        "lost_seconds_median": statistics.median(lost) if lost else None,
        "lost_seconds_worst": max(lost, default=None),
    }


def noise(losses: Mapping[tuple[str, int], float]) -> dict[str, float | None]:
    """Standard deviation of undisturbed final losses over seeds: with all slices, and without one,
    there pooled over which one is absent. None where there is one seed."""
    groups: dict[str, list[float]] = {}
    for (absent, _), loss in losses.items():
        groups.setdefault(absent, []).append(loss)
    found: dict[str, float | None] = {}
    for name, chosen in (("all", [""]), ("fewer", [a for a in groups if a])):
        rows = [groups[a] for a in chosen if len(groups.get(a, ())) > 1]
        freedom = sum(len(r) - 1 for r in rows)
        squares = sum(statistics.variance(r) * (len(r) - 1) for r in rows)
        found[name] = math.sqrt(squares / freedom) if freedom else None
    return found


def _spread(values: Sequence[float]) -> dict[str, float | int] | None:
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return {"mean": statistics.mean(values), "deviation": deviation, "runs": len(values)}


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Signal, process and phase a line."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    shown.add_column("\nmoments", no_wrap=True)
    for heading in (
        "\nruns",
        "in\nphase",
        "com-\npleted",
        "hashes\nequal",
        "samples\nright",
        "came\nback",
        "loss over\nall slices",
        "loss over\none fewer",
        "s lost,\nmedian",
        "\nworst",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, r in rows.items():
        counts = ("moments", "in_phase", "completed", "hashes_equal", "samples_right")
        shown.add_row(
            name,
            *(str(r[key]) for key in counts),
            f"{r['returned']}/{r['to_return']}",
            *(_loss(r[key]) for key in ("loss_over_all", "loss_over_fewer")),
            *(
                "-" if (v := r[f"lost_seconds_{k}"]) is None else f"{v:.1f}"
                for k in ("median", "worst")
            ),
        )
    return shown


def _loss(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "-"
    text = f"{spread['mean']:+.3f}"
    return text + (f"±{spread['deviation']:.3f}" if math.isfinite(spread["deviation"]) else "")
