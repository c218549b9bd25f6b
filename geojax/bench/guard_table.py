# SPDX-License-Identifier: Apache-2.0
"""What a guard saves, as a table.

Invariant: it shows what `geojax bench guard` writes, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from geojax.track.section import new_table

LEFT_OUT = "fill"
"""The task that depths and bounds were made without."""


@dataclass(frozen=True)
class Watch:
    """Of requests of one task under one depth."""

    task: str
    share: float
    depth: int
    requests: int
    right: float
    """Share of right answers, the prefix refreshed and not shared."""
    unguarded: float
    guarded: float
    recovered: float | None
    """Of answers that only sharing makes wrong, how many the guard makes right; None: of none."""
    retreats: int
    extra: float
    """Row-layers of probes over all others."""


def watch_table(found: Sequence[Watch]) -> Table:
    """A line a task and share."""
    table = new_table(
        "task",
        "prefix",
        "not shared",
        "shared",
        "guarded",
        "recovered",
        "retreats",
        "extra rows",
    )
    for w in found:
        table.add_row(
            w.task,
            f"{w.share:.0%}",
            f"{w.right:.1%}",
            f"{w.unguarded:.1%}",
            f"{w.guarded:.1%}",
            "" if w.recovered is None else f"{w.recovered:.1%}",
            f"{w.retreats} of {w.requests}",
            f"{w.extra:.1%}",
        )
    return table


def alarm_line(found: Sequence[Watch]) -> str:
    """How often requests stopped sharing that had no need to."""
    alarms = sum(w.retreats for w in found if w.task != LEFT_OUT)
    others = sum(w.requests for w in found if w.task != LEFT_OUT)
    return f"false alarms: {alarms} of {others}, {alarms / max(others, 1):.1%}"
