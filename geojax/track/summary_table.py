# SPDX-License-Identifier: Apache-2.0
"""Summaries of runs side by side as a table, and how it is to be read."""

from collections.abc import Sequence

from rich.table import Table

from geojax.track.console import format_bytes, format_seconds, format_share
from geojax.track.section import new_table
from geojax.track.summary import Summary


def summary_table(
    names: Sequence[str], summaries: Sequence[Summary], slowest_hours: float | None
) -> Table:
    """A line a run; speed-ups are over a run that took `slowest_hours` to the target."""
    table = new_table()
    table.add_column("\nrun", overflow="fold")
    table.add_column("to\ntarget", justify="right", max_width=7)  # "not reached" on two lines
    for heading in (
        "\nspeed-up",
        "final\nperplexity",
        "straggler\nidle",
        "WAN\nidle",
        "payload\na round",
        "vs\nfp32",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, summary in zip(names, summaries, strict=True):
        hours, ratio = summary.hours_to_target, summary.payload_ratio
        table.add_row(
            name,
            "not reached" if hours is None else format_seconds(hours * 3600),
            f"{slowest_hours / hours:.2f}x" if hours and slowest_hours else "-",
            f"{summary.final_perplexity:.2f}",
            format_share(summary.straggler_idle),
            format_share(summary.wan_idle),
            format_bytes(summary.bytes_per_round),
            "-" if ratio is None else f"{ratio:.1f}x",
        )
    return table


def slowest(names: Sequence[str], summaries: Sequence[Summary]) -> tuple[float, str] | None:
    """Hours and name of the last to reach the target; None where none does."""
    pairs = zip((s.hours_to_target for s in summaries), names, strict=True)
    return max(((hours, name) for hours, name in pairs if hours is not None), default=None)


def target_notes(
    target: float | None, rule: str, last: tuple[float, str] | None, several: bool
) -> list[str]:
    """How a table of summaries is to be read, but for what its times are of."""
    notes = []
    if target is not None:
        notes.append(f"Target perplexity {target:.4g}" + (f": {rule}." if rule else "."))
    if last and several:
        notes.append(f"Speed-up: over {last[1]}, the slowest to reach the target.")
    return [*notes, "Idle: share of the run's time, of the slice that waited most."]
