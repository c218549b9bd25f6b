# SPDX-License-Identifier: Apache-2.0
"""A run without what starting and evaluating add to its clock.

Slices compile and evaluate at their own speed, so they begin the round after it at different times,
and the first ones wait in it. Here a round in which processes were started, as the first one, and
each that follows an evaluation, counts as the mean of all others. Invariant: accounts still add up,
and no round that is left is changed.
"""

import statistics
from collections.abc import Iterable
from dataclasses import replace

from geojax.config import require
from geojax.track.summary import PARTS, Run

_FIELDS = tuple(f"{part}_seconds" for part in PARTS)


def steady(run: Run, starts: Iterable[int] = (1,)) -> Run:
    """`starts`: rounds in which processes were started. ConfigError where no round is left to take
    the mean of, or a slice was not in all of them."""
    disturbed = {*starts} | {record["round"] + 1 for record in run.evals}
    usual = [r for r in run.rounds if r["round"] not in disturbed]
    require(
        usual,
        f"{run.folder}: each of its {len(run.rounds)} rounds follows a start or an "
        "evaluation; evaluate less often",
    )
    mean = statistics.fmean(r["round_seconds"] for r in usual)
    parts = {}
    for name in {r["slice"] for r in run.slices}:
        own = [r for r in run.slices if r["slice"] == name and r["round"] not in disturbed]
        require(
            len(own) == len(usual),
            f"{run.folder}: slice {name} was left out of {len(usual) - len(own)} rounds; only runs "
            "without failures are compared",
        )
        parts[name] = {field: statistics.fmean(r[field] for r in own) for field in _FIELDS}
    slices = [{**r, **parts[r["slice"]]} if r["round"] in disturbed else r for r in run.slices]
    rounds, seconds = [], {0: 0.0}
    for record in run.rounds:
        number = record["round"]
        took = mean if number in disturbed else record["round_seconds"]
        seconds[number] = seconds[number - 1] + took
        rounds.append({**record, "round_seconds": took, "seconds": seconds[number]})
    evals = tuple({**record, "seconds": seconds[record["round"]]} for record in run.evals)
    return replace(run, slices=tuple(slices), rounds=tuple(rounds), evals=evals)
