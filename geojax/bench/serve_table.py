# SPDX-License-Identifier: Apache-2.0
"""What clients of a server saw, as a table and a picture.

Invariant: both are made of the figures that `geojax bench serve` writes, and of nothing else.
"""

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from geojax.track.section import Target, new_table

_SERIES = (
    ("ttft", "first text, ms"),
    ("tpot", "a token after it, ms"),
    ("itl", "between chunks, ms"),
    ("e2el", "whole answer, ms"),
)


def load_table(figures: Mapping[str, Any]) -> Table:
    """Times of requests that were answered; a dash where none has any."""
    table = new_table("", "mean", "median", "p90", "p99")
    for name, label in _SERIES:
        values = (figures[f"{key}_{name}_ms"] for key in ("mean", "median", "p90", "p99"))
        table.add_row(label, *("-" if not _finite(v) else f"{v:.1f}" for v in values))
    hits = figures["total_cached_tokens"] / max(figures["total_input_tokens"], 1)
    table.caption = (
        f"{figures['completed']} answered, {figures['failed']} not, in {figures['duration']:.1f} s "
        f"(measured): {figures['request_throughput']:.2f} requests/s, "
        f"{figures['output_throughput']:.1f} new tokens/s; {hits:.1%} of prompts' tokens from "
        "stored prefixes"
    )
    return table


def plot_load(figures: Mapping[str, Any], path: Target) -> None:
    """The share of answered requests that had their first text, and their end, by a time."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    figure.suptitle("Answered by a time (measured clock, at the client)")
    axes = figure.subplots()
    good = [r for r in figures["requests"] if r["status"] == 200 and not r["error"]]
    for key, label, colour in (
        ("first", "first text", "#0072B2"),
        ("whole", "whole answer", "#D55E00"),
    ):
        times = sorted(r[key] for r in good if _finite(r[key]))
        shares = [(i + 1) / len(times) for i in range(len(times))]
        axes.step([0.0, *times], [0.0, *shares], where="post", color=colour, label=label)
    axes.set(xlabel="seconds since it was sent", ylabel="share of requests", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
