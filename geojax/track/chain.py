# SPDX-License-Identifier: Apache-2.0
"""The chain of strategies that a run took, and why, from its records alone.

Invariant: what is shown of a decision is what the decision, computed again from its recorded
inputs, comes to; one that comes out otherwise is named.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter
from rich import box
from rich.table import Table

from geojax.cona.decision import replay
from geojax.config import ConaConfig, ScalingConfig
from geojax.track.console import format_count, format_seconds, format_share
from geojax.track.metrics import Record, read_records
from geojax.track.summary import Run


@dataclass(frozen=True)
class Stay:
    """A part of the run under one strategy."""

    strategy: str
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
    found: list[Stay] = []
    begin = 0
    rounds: list[Record] = []

    def close() -> None:
        why = reasons.get(rounds[0]["round"] - 1, "") if found else ""
        noise = [(r.get("noise") or {}).get("value") for r in (rounds[0], rounds[-1])]
        found.append(
            Stay(
                rounds[0]["strategy"],
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


def chain_table(run: Run) -> Table:
    """Strategies in order, with the reason of each."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
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
    switches, refused, decisions = run.switches, run.refused, _records(run, "decision")
    notes = []
    if switches:
        seconds = sum(r["switch_seconds"] for r in (*switches, *refused))
        kinds = [r["decision"] for r in switches]
        counted = ", ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds))
        share = format_share(seconds / run.seconds if run.seconds else 0.0)
        notes.append(f"Switches: {counted}; {format_seconds(seconds)}, {share} of the run.")
    notes += [f"Left out: {r['strategy']}: {r['why']}" for r in refused]
    if decisions:
        same = _replayed(run, decisions)
        wrong = [r["round"] for r, agrees in zip(decisions, same, strict=True) if not agrees]
        agree = "all the same" if not wrong else f"those of rounds {wrong} come out otherwise"
        notes.append(
            f"Decisions: {len(decisions)}, each computed again from its recorded inputs: {agree}."
        )
    return notes


def _replayed(run: Run, decisions: Sequence[Record]) -> list[bool]:
    cona = TypeAdapter(ConaConfig).validate_json(json.dumps(run.start["cona"]))
    scaling = run.start["scaling"] and TypeAdapter(ScalingConfig).validate_json(
        json.dumps(run.start["scaling"])
    )
    rule = scaling.rate_rule() if scaling else None
    return [recorded == again for recorded, again in replay(decisions, cona, rule)]


def _records(run: Run, kind: str) -> list[Record]:
    last = run.rounds[-1]["round"]
    path = Path(run.folder) / "metrics.jsonl"
    return [r for r in read_records(path) if r["kind"] == kind and r["round"] <= last]
