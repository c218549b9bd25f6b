# SPDX-License-Identifier: Apache-2.0
"""What the runs of one model and one seed came to, from their folders.

Invariant: only what has ended is looked at, and what is missing is named; CONA's own run sets the
targets, as the loss that it has at fixed shares of its time, so every time is one over CONA's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from geojax.bench.cona_curves import (
    Curve,
    best_fixed,
    curve_of,
    fixed_curve,
    from_evals,
    hindsight,
    loss_at,
    noise_curve,
    over_oracle,
    seconds_to,
    targets,
    tokens_for_equal_loss,
)
from geojax.bench.cona_methods import TUNE_SHARE, Setting, predicted_legs
from geojax.config import CheckpointConfig
from geojax.track.chain import scores
from geojax.track.metrics import Record, read_records
from geojax.track.summary import Run, check_accounting, load_run

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Of CONA's time, at which targets are."""
EARLY = 0.05
"""Share of the run that neither oracle nor switches are counted in."""
_RUNS = {"warm-up by hand": "warm-up", "goodput, dp alone": "goodput-dp", "predicted": "predicted"}
SAME = 0.03
"""Share of the tokens by which two chains may come to a batch apart, and still agree."""
_STAY_ROUNDS = 2  # a strategy that goes earlier was on trial


class Reached(NamedTuple):
    """How long a method takes to a target, over CONA's time to it."""

    ratio: float
    reached: bool
    """False: it ended before, and `ratio` is of its whole run."""


Interval = tuple[float | None, float, float | None]
"""Noise in sequences: value, low, high."""


class Change(NamedTuple):
    """A batch of the chain that was taken or predicted."""

    batch: int
    crossing: float
    """Noise from which on it is the best."""
    predicted: float | None
    """Share of the tokens at which the predicted chain comes to it; None: never."""
    taken: float | None
    noise: Interval | None
    """As CONA knew it when it came to it."""
    noise_then: Interval | None
    """As CONA knew it where the predicted chain comes to it."""
    why: str
    """As recorded by the run."""
    differs: str
    """How the two chains differ, and what made them; empty: by less than SAME."""


@dataclass(frozen=True)
class Figures:
    """Of one model and one seed."""

    model: str
    seed: int
    ratios: dict[str, list[Reached]]
    """By method, at each of SHARES."""
    final_perplexity: dict[str, float]
    """By method."""
    fixed_final_perplexity: dict[str, float]
    """By batch, of the fastest strategy of each."""
    equal_loss: dict[str, tuple[float, float]]
    """By batch, tokens to one loss over those of the smallest batch: measured, and by the noise."""
    equal_loss_shorter: dict[str, tuple[float, float]]
    """The same of runs by TUNE_SHARE of the tokens."""
    seconds: dict[str, float]
    """Of the whole run, by method."""
    oracle: str
    """Of the greedy run, the predicted chain and all fixed strategies the run with the lowest loss
    when CONA's ends; empty while one of them is missing."""
    over_oracle: list[float]
    """Perplexity over the oracle's, less 1, at each evaluation after EARLY."""
    over_all: list[float]
    """And over the lowest that any of those runs has at that moment."""
    switches: int
    """After EARLY of the tokens, to strategies that stayed."""
    trials: int
    """Strategies that did not stay, over the whole run."""
    switch_share: float
    """Of the run's time."""
    changes: list[Change]
    missing: list[str]
    """Parts that have not ended."""


class Outcome(NamedTuple):
    """Figures, and the runs that they are of."""

    figures: Figures
    cona: Run
    curves: dict[str, Curve]
    """By method; of fixed strategies, those that baselines choose."""


def outcome(base: Setting, folder: Path, seed: int) -> Outcome | None:
    """None while CONA's own run has not ended."""
    cona = _ended(folder / "cona")
    if cona is None:
        return None
    missing: list[str] = []
    fixed: dict[int, Curve] = {}
    runs: dict[int, Run] = {}
    for option in base.options:
        run = _ended(folder / f"gb{option.batch}")
        if run is None:
            missing.append(f"gb{option.batch}")
        else:
            runs[option.batch] = run
            fixed[option.batch] = fixed_curve(run, option, base.config.data.seq_len)
    curves = {"CONA": curve_of(cona, "CONA")}
    goals = targets(curves["CONA"], SHARES)
    best = None
    if not missing:
        quick = min(base.options, key=lambda o: o.seconds)
        wide = max(base.options, key=lambda o: o.batch / o.seconds)
        best = hindsight(list(fixed.values()), goals[-1])
        curves["shortest iteration"] = fixed[quick.batch]
        curves["highest throughput"] = fixed[wide.batch]
        curves["best fixed in hindsight"] = best
    for method, name in _RUNS.items():
        run = _ended(folder / name)
        if run is None:
            missing.append(name)
        else:
            curves[method] = curve_of(run, method)
    greedy = greedy_evals(folder / "greedy")
    if greedy is None:
        missing.append("greedy")
    else:
        curves["greedy oracle"] = from_evals("greedy oracle", greedy)
    ratios = {name: _ratios(curve, curves["CONA"], goals) for name, curve in curves.items()}
    if best:
        firsts = [best_fixed(list(fixed.values()), goal) for goal in goals]
        ratios["best fixed, each target"] = [
            _ratios(first or best, curves["CONA"], [goal])[0]
            for first, goal in zip(firsts, goals, strict=True)
        ]
    own, oracle = curves["CONA"], None
    others = [curves[n] for n in ("greedy oracle", "predicted") if n in curves]
    if best and len(others) == 2:
        others = [*others, *fixed.values()]
        oracle = min(others, key=lambda c: loss_at(c, own.end))
    stays, trials = _stays(cona)
    early, whole = EARLY * cona.rounds[-1]["tokens"], base.total_samples
    batch = next((b for b, c in fixed.items() if c is best), None)
    noise = noise_curve(runs[batch]) if batch else None
    legs = predicted_legs(base, noise) if noise else []
    finals = {b: curve.losses[-1] for b, curve in fixed.items()}
    shorter = _tuned_losses(folder.parent / "tune")
    shorter = {b: loss for b, loss in shorter.items() if finals and b >= min(finals)}
    equal = equal_shorter = {}
    if noise and (slope := _slope(shorter, finals)):
        equal = tokens_for_equal_loss(finals, slope, noise, whole)
        equal_shorter = tokens_for_equal_loss(shorter, slope, noise, round(TUNE_SHARE * whole))
    planned: dict[int, float] = {}
    for leg in legs:
        planned.setdefault(leg.option.batch, leg.begin_sample / whole)
    figures = Figures(
        base.name,
        seed,
        ratios,
        {name: curve.final_perplexity for name, curve in curves.items()},
        {str(batch): curve.final_perplexity for batch, curve in fixed.items()},
        {str(batch): pair for batch, pair in equal.items()},
        {str(batch): pair for batch, pair in sorted(equal_shorter.items())},
        {name: curve.end for name, curve in curves.items()},
        oracle.name if oracle else "",
        over_oracle(own, [oracle], EARLY) if oracle else [],
        over_oracle(own, others, EARLY) if oracle else [],
        sum(stay[0]["tokens"] > early for stay in stays[1:]),
        trials,
        sum(r["switch_seconds"] for r in (*cona.switches, *cona.refused)) / cona.seconds,
        _changes(base, cona, stays, planned),
        missing,
    )
    return Outcome(figures, cona, curves)


def _tuned_losses(folder: Path) -> dict[int, float]:
    """The least by batch that the search for learning rates came to; of other held-out sequences
    than the runs compared, by TUNE_SHARE of their tokens."""
    found: dict[int, float] = {}
    for path in folder.glob("gb*-rate*"):
        run, batch = _ended(path), int(path.name.removeprefix("gb").split("-")[0])
        if run:
            found[batch] = min(run.evals[-1]["loss"], found.get(batch, math.inf))
    return found


def _slope(shorter: Mapping[int, float], finals: Mapping[int, float]) -> float | None:
    """By how much e times as many tokens lower the loss of the smallest batch, from the shorter run
    to the longer one; None where one of them is not there, or it does not fall."""
    if not finals or (first := min(finals)) not in shorter:
        return None
    slope = (shorter[first] - finals[first]) / math.log(1 / TUNE_SHARE)
    return slope if slope > 0 else None


def greedy_evals(folder: Path) -> list[dict[str, Any]] | None:
    """Evaluations of the greedy oracle, once it has ended."""
    if not (folder / "checkpoints").is_dir():
        return None
    from geojax.train.checkpoint import Checkpoints

    with Checkpoints(folder / "checkpoints", CheckpointConfig(), reads_only=True) as checkpoints:
        place = {} if checkpoints.empty else checkpoints.meta()["place"]
    return place["evals"] if place.get("ended") else None


def _ended(folder: Path) -> Run | None:
    path = folder / "metrics.jsonl"
    if not path.exists() or not any(r["kind"] == "end" for r in read_records(path)):
        return None
    run = load_run(folder)
    check_accounting(run)
    return run


def _ratios(curve: Curve, cona: Curve, goals: Sequence[float]) -> list[Reached]:
    found = []
    for goal in goals:
        own, seconds = seconds_to(cona, goal), seconds_to(curve, goal)
        assert own, "targets are losses that CONA had, after its start"
        found.append(
            Reached((curve.end if seconds is None else seconds) / own, seconds is not None)
        )
    return found


def _stays(run: Run) -> tuple[list[list[Record]], int]:
    """Rounds of each strategy that stayed, a return from a trial being the same stay; and the
    number of trials that did not."""
    groups = [list(rounds) for _, rounds in groupby(run.rounds, key=lambda r: r["strategy"])]
    stays: list[list[Record]] = []
    for rounds in groups:
        if len(rounds) < _STAY_ROUNDS:
            continue
        if stays and stays[-1][-1]["strategy"] == rounds[0]["strategy"]:
            stays[-1] += rounds
        else:
            stays.append(rounds)
    return stays, sum(len(rounds) < _STAY_ROUNDS for rounds in groups)


def _changes(
    base: Setting, run: Run, stays: Sequence[Sequence[Record]], planned: dict[int, float]
) -> list[Change]:
    """Batches of either chain, by batch."""
    reasons = {r["round"]: r["why"] for r in run.switches}
    batches = {record["round"]: record["batch"] for record in run.slices}
    shares = {r["round"]: r["samples"] / base.total_samples for r in run.rounds}
    noises = {r["round"]: _interval(r["noise"]) for r in run.rounds}
    taken: dict[int, int] = {}  # the round before a batch is first in force
    for stay in stays:
        taken.setdefault(batches[stay[0]["round"]], stay[0]["round"] - 1)
    crossings = {option.batch: scale for scale, option in base.line}
    looks = _looks(run, shares)
    found = []
    for batch in sorted({*taken, *planned}):
        scale, before = crossings.get(batch, math.inf), taken.get(batch)
        share = None if before is None else shares.get(before, 0.0)
        due = planned.get(batch)
        then = None
        if due is not None:
            then = next((noises[n] for n, at in shares.items() if at >= due), None)
        now = None if before is None else noises.get(before)
        why = "" if before is None else reasons.get(before, "")
        if due is not None:
            differs = as_taken(due, share, why, looks.get(batch, []))
        elif math.isinf(scale):
            differs = "not predicted: never the best of all, and better than what was before it"
        elif any(larger > batch for larger in planned):
            differs = "not predicted: the best fixed run's noise was beyond it from the start"
        else:
            differs = "not predicted: the best fixed run's noise never came so far"
        found.append(Change(batch, scale, due, share, now, then, why, differs))
    return found


class Look(NamedTuple):
    """What a decision knew of a batch."""

    share: float
    """Of the tokens."""
    score: float
    """Of the batch's best strategy, over the present one's; `low`: the least over the noise."""
    low: float
    reason: str
    """As recorded, of what was decided."""


def _looks(run: Run, shares: dict[int, float]) -> dict[int, list[Look]]:
    """In order, by batch, of all decisions that knew the noise."""
    found: dict[int, list[Look]] = {}
    for record in run.decisions:
        for score in scores(replace(run, decisions=(record,))):
            look = Look(
                shares.get(record["round"], 0.0),
                score.score,
                score.low,
                record["decision"]["reason"],
            )
            found.setdefault(score.batch, []).append(look)
    return found


def as_taken(due: float, taken: float | None, why: str, looks: Sequence[Look]) -> str:
    """How a batch that was due at a share of the tokens was come to, in the words of the run's own
    decisions; empty where that was about then."""
    if taken is not None and abs(taken - due) <= SAME:
        return ""
    if taken is not None and taken < due:
        return f"earlier: {why}"
    word = "later" if taken is not None else "not taken"
    between = [x for x in looks if due <= x.share < (math.inf if taken is None else taken)]
    if not between:
        return f"{word}: CONA did not know the noise yet"
    better = [x for x in between if x.score > 1]
    if not better:
        return f"{word}: it scored no more than what was in force"
    last = better[-1]
    return (
        f"{word}: at {last.share:.0%} of the tokens it scored {last.score:.2f} times as much, "
        f"{last.low:.2f} at least: {last.reason}"
    )


def _interval(noise: Record | None) -> Interval | None:
    return (noise["value"], noise["low"], noise["high"]) if noise else None
