# SPDX-License-Identifier: Apache-2.0
"""What `geojax bench throughput` shows of what it measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from geojax.track.section import Target, new_table

BLOCK = 32
"""Tokens of an answer."""
STEPS = 16
"""Of denoising."""


@dataclass(frozen=True)
class Row:
    """A policy at one batch and share."""

    batch: int
    share: float
    policy: str
    every: int | None
    """Steps from one refresh to the next."""
    ratio: float
    """Of throughput over no reuse: the median over rounds."""
    low: float
    high: float
    predicted: float
    """By counting multiplications."""
    padded: float
    """By counting those of the rows that are computed, which fill the shapes' buckets."""

    @property
    def label(self) -> str:
        return self.policy if self.every is None else f"{self.policy}, every {self.every}"


@dataclass(frozen=True)
class Point:
    """All policies at one batch and share."""

    batch: int
    share: float
    length: int
    depth: int
    """Layers that a prefix is shared in."""
    rounds: int
    plain_seconds: float
    """Of one batch of requests without reuse, the median."""
    build_seconds: float
    """Of the prefix."""
    saved_seconds: float
    """By one refresh of one request whose prefix is shared, over one of its own."""
    machine: str
    rows: tuple[Row, ...]

    def ratio(self, policy: str, every: int | None) -> float:
        return next(r.ratio for r in self.rows if (r.policy, r.every) == (policy, every))

    @property
    def row_cost_ratio(self) -> float:
        """What a row of a step over the block alone takes, over one of a step over all rows, by
        policy dual: one step like those of `refresh`, every 1, and all others over the block. The
        head is in both."""
        whole = self.plain_seconds / STEPS
        first = whole / self.ratio("refresh", 1)
        block = (self.plain_seconds / self.ratio("dual", None) - first) / (STEPS - 1)
        return block / BLOCK / (whole / self.length)


def table(point: Point) -> Table:
    """Policies over no reuse."""
    found = new_table("policy", "over no reuse", "rounds", "predicted", "of it", "padded", "of it")
    found.title = f"batch {point.batch}, prefix {point.share:.0%} of {point.length} tokens"
    found.title_justify = "left"
    for r in point.rows:
        found.add_row(
            r.label,
            f"{r.ratio:.2f}x",
            f"{r.low:.2f}-{r.high:.2f}",
            f"{r.predicted:.2f}x",
            f"{r.ratio / r.predicted:.2f}",
            f"{r.padded:.2f}x",
            f"{r.ratio / r.padded:.2f}",
        )
    return found


def summary(points: Sequence[Point]) -> Table:
    """All in one: over no reuse, and in percent of what the rows that run predict."""
    found = new_table("policy", *(f"batch {p.batch}\n{p.share:.0%}" for p in points))
    for rows in zip(*(p.rows for p in points), strict=True):
        cells = (f"{r.ratio:.2f} {100 * r.ratio / r.padded:.0f}" for r in rows)
        found.add_row(rows[0].label, *cells)
    return found


def notes(point: Point) -> list[str]:
    """What sharing between requests adds, and what it costs."""
    prefix, p = round(point.share * point.length), point
    tokens = p.batch * BLOCK / p.plain_seconds
    gains = [f"{p.ratio('bicache', k) / p.ratio('refresh', k):.2f}x at {k}" for k in (1, 4, 16)]
    lines = [
        f"No reuse: {p.plain_seconds:.2f} s, {tokens:.1f} tokens/s.",
        f"What sharing between requests adds, by steps between refreshes: {', '.join(gains)}.",
        f"bicache-dual over dual: {p.ratio('bicache-dual', None) / p.ratio('dual', None):.2f}x.",
        f"A row costs {p.row_cost_ratio:.1f} times as much in a step of {p.batch * BLOCK} rows "
        f"(dual) as in one of {p.batch * p.length}.",
    ]
    if p.saved_seconds <= 0:
        return [*lines, "A refresh takes no less where the prefix is shared."]
    pays = math.ceil(p.build_seconds / p.saved_seconds)
    built = f"{1e3 * p.build_seconds:.0f} ms to build ({p.depth * prefix} row-layers)"
    return [
        *lines,
        f"The prefix takes {built}; a refresh of one request saves {1e3 * p.saved_seconds:.0f} ms: "
        f"it pays from refresh {pays} on.",
    ]


def plot_throughput(points: Sequence[Point], target: Target) -> None:
    """Speed over no reuse by the prefix's share, a panel for each batch."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    batches = sorted({p.batch for p in points})
    figure = Figure(figsize=(5 * len(batches) + 1.6, 4.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for axes, batch in zip(panels, batches, strict=True):
        here = sorted((p for p in points if p.batch == batch), key=lambda p: p.share)
        for row in here[0].rows:
            line = [p.ratio(row.policy, row.every) for p in here]
            axes.plot([p.share for p in here], line, "o-", markersize=3.5, label=row.label)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set(title=f"batch {batch}", xlabel="share of the prefix", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(2))
        axes.yaxis.set_major_formatter("{x:g}x")
        axes.yaxis.set_minor_locator(NullLocator())
    panels[0].set(ylabel="throughput over no reuse (measured)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figure.savefig(target)
