# SPDX-License-Identifier: Apache-2.0
"""What reuse of prefixes costs in accuracy, as tables.

Invariant: they show what `geojax bench bicache` writes, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from geojax.bicache.store import Builder
from geojax.track.section import new_table


@dataclass(frozen=True)
class Cell:
    """A policy on one task at one share of the prefix."""

    task: str
    share: float
    policy: str
    every: int | None
    depth: int | None
    """Layers in which the prefix is shared; None where the policy shares nothing."""
    builder: Builder = "prefix"

    @property
    def name(self) -> str:
        parts = [self.task, f"{self.share}", self.policy]
        if self.every is not None:
            parts.append(f"every{self.every}")
        if self.depth is not None:
            parts += [f"depth{self.depth}", self.builder]
        return "-".join(parts)


@dataclass(frozen=True)
class Result:
    """Of a cell, beside no reuse."""

    cell: Cell
    accuracy: float
    error: float
    """Standard error."""
    loss: float
    """Accuracy without reuse less this one, paired."""
    bound: float
    """Upper, of the loss."""


def loss_tables(results: Sequence[Result]) -> list[Table]:
    """One a task and share; a star marks the depth that a table of depths gave."""
    return [
        _loss_table([r for r in results if (r.cell.task, r.cell.share) == key])
        for key in dict.fromkeys((r.cell.task, r.cell.share) for r in results)
    ]


def _loss_table(results: Sequence[Result]) -> Table:
    task, share = results[0].cell.task, results[0].cell.share
    at = next((r.cell.depth for r in results if r.cell.policy == "bicache-dual"), None)
    table = new_table(
        "policy",
        "depth",
        "accuracy",
        "loss",
        "at most",
    )
    table.title = f"{task}, prefix {share:.0%} of a request"
    table.title_justify = "left"
    for r in results:
        label = r.cell.policy if r.cell.every is None else f"{r.cell.policy}, every {r.cell.every}"
        table.add_row(
            label,
            "" if r.cell.depth is None else f"{r.cell.depth}{' *' if r.cell.depth == at else ''}",
            f"{r.accuracy:.1%} +- {r.error:.1%}",
            f"{r.loss:+.1%}",
            f"{r.bound:+.1%}",
        )
    return table
