# SPDX-License-Identifier: Apache-2.0
"""The chain of strategies that a run took, and why, from its records alone.

Invariant: what is shown of a decision is what the decision, computed again from its recorded
inputs, comes to; one that comes out otherwise is named.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import TypeAdapter
from rich.table import Table

from geojax.cona.decision import Known, replay
from geojax.cona.score import score
from geojax.config import ConaConfig, ScalingConfig
from geojax.config.rate import RateRule
from geojax.track.console import format_count, format_seconds, format_share
from geojax.track.metrics import Record
from geojax.track.section import new_table
from geojax.track.summary import Run

_LARGE_NOISE = 1e18  # stands for the upper end of an interval that has none


@dataclass(frozen=True)
class Stay:
    """A part of the run under one strategy."""

    strategy: str
    batch: int
    begin_tokens: int
    end_tokens: int
    seconds: float
    """Of the run's clock, without the switch to it."""
    noise: tuple[float | None, float | None]
    """In sequences, at its first and last round."""
    why: str
    """It was switched to; empty for the first."""


def stays(run: Run) -> list[Stay]:
    """In order; one for a run that never changed its strategy."""
    reasons = {r["round"]: r["why"] for r in run.switches}
    batches = {r["round"]: r["batch"] for r in run.slices}
    found: list[Stay] = []
    begin = 0
    rounds: list[Record] = []

    def close() -> None:
        why = reasons.get(rounds[0]["round"] - 1, "") if found else ""
        noise = [(r.get("noise") or {}).get("value") for r in (rounds[0], rounds[-1])]
        found.append(
            Stay(
                rounds[0]["strategy"],
                batches[rounds[0]["round"]],
                begin,
                rounds[-1]["tokens"],
                sum(r["round_seconds"] for r in rounds),
                (noise[0], noise[1]),
                why,
            )
        )

    for record in run.rounds:
        if rounds and record["strategy"] != rounds[-1]["strategy"]:
            close()
            begin, rounds = rounds[-1]["tokens"], []
        rounds.append(record)
    close()
    return found


class Score(NamedTuple):
    """Of the best strategy of one batch, as one decision knew it, over the present one's."""

    tokens: int
    """Of the run, when it was decided."""
    batch: int
    strategy: str
    seconds: float
    """A step, expected."""
    timed: bool
    score: float
    """At the noise as it was measured; `low` and `high`: over its interval."""
    low: float
    high: float


def scores(run: Run) -> list[Score]:
    """Of every decision that knew the noise, by batch; empty where none was made."""
    rule = _rate_rule(run) if run.decisions else None
    return [score for record in run.decisions for score in _scores_of(record, rule)]


def _scores_of(record: Record, rule: RateRule | None) -> list[Score]:
    now = record["inputs"]
    if now["noise"] is None:
        return []
    options = [Known(*option) for option in now["options"]]
    value, low, high = now["noise"]
    noises = [low if value is None else value, low, _LARGE_NOISE if high is None else high]
    noises = [min(noise, _LARGE_NOISE) for noise in noises]

    def worths(option: Known) -> list[float]:
        return [score(option.seconds, option.batch, noise, rule) for noise in noises]

    present = worths(next(o for o in options if o.name == now["present"]))
    if not all(present):  # it makes no progress, and nothing can be said over it
        return []
    best: dict[int, tuple[list[float], Known]] = {}
    for option in options:
        found = worths(option)
        if option.batch not in best or found[0] > best[option.batch][0][0]:
            best[option.batch] = found, option
    scored = []
    for batch, (found, option) in sorted(best.items()):
        over = [a / b for a, b in zip(found, present, strict=True)]
        if all(over):
            ends = (min(over), max(over))
            of = (option.name, option.seconds, option.timed)
            scored.append(Score(record["tokens"], batch, *of, over[0], *ends))
    return scored


def score_table(run: Run) -> Table | None:
    """What the last decision that knew the noise thought of the best strategy of each batch."""
    every = scores(run)
    if not every:
        return None
    table = new_table("strategy", "batch", "a step", "score", "interval")
    for found in (s for s in every if s.tokens == every[-1].tokens):
        table.add_row(
            found.strategy,
            str(found.batch),
            format_seconds(found.seconds) + ("" if found.timed else " (predicted)"),
            f"{found.score:.3f}",
            f"{found.low:.3f}-{found.high:.3f}",
        )
    return table


def chain_table(run: Run) -> Table:
    """Strategies in order, with the reason of each."""
    table = new_table()
    for heading, right in (
        ("from", True),
        ("strategy", False),
        ("time", True),
        ("noise", True),
        ("why", False),
    ):
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != "why")
    for stay in stays(run):
        noise = "-".join("?" if n is None else f"{n:.3g}" for n in stay.noise)
        table.add_row(
            format_count(stay.begin_tokens),
            stay.strategy,
            format_seconds(stay.seconds),
            noise,
            stay.why,
        )
    return table


def chain_notes(run: Run) -> list[str]:
    """What switching cost, which strategies could not run, and whether a replay agrees."""
    switches, refused, decisions = run.switches, run.refused, run.decisions
    notes = []
    if switches:
        seconds = sum(r["switch_seconds"] for r in (*switches, *refused))
        kinds = [r["decision"] for r in switches]
        counted = ", ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds))
        share = format_share(seconds / run.seconds if run.seconds else 0.0)
        notes.append(f"Switches: {counted}; {format_seconds(seconds)}, {share} of the run.")
    notes += [f"Left out: {r['strategy']}: {r['why']}" for r in refused]
    if decisions:
        cona = TypeAdapter(ConaConfig).validate_json(json.dumps(run.start["cona"]))
        notes.append(agreement(decisions, replay(decisions, cona, _rate_rule(run))))
    return notes


def agreement(records: Sequence[Record], pairs: Sequence[tuple[object, object]]) -> str:
    """Whether decisions, as recorded and as computed again, are the same."""
    wrong = [
        record["round"]
        for record, (recorded, again) in zip(records, pairs, strict=True)
        if recorded != again
    ]
    agree = "all the same" if not wrong else f"those of rounds {wrong} come out otherwise"
    return f"Decisions: {len(records)}, each computed again from its recorded inputs: {agree}."


def _rate_rule(run: Run) -> RateRule | None:
    scaling = run.start["scaling"]
    if not scaling:
        return None
    return TypeAdapter(ScalingConfig).validate_json(json.dumps(scaling)).rate_rule()
