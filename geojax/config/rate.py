# SPDX-License-Identifier: Apache-2.0
"""The rule by which the learning rate follows the batch; `geojax.cona.rules` applies it."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

Rule = Literal["table", "linear", "sqrt", "adascale"]


@dataclass(frozen=True)
class RateRule:
    """Learning rate by batch, as a factor over the config's; ValueError on a contradiction."""

    kind: Rule
    base_batch: int
    """Batch at which the config's learning rate was tuned."""
    cap: bool = False
    """Linear and sqrt: stop growing where the batch reaches the noise scale."""
    table: tuple[tuple[int, float], ...] = ()
    """(batch, tuned factor), by batch."""

    def __post_init__(self):
        if self.kind not in get_args(Rule):
            raise ValueError(f"rate rule {self.kind!r} is none of {', '.join(get_args(Rule))}")
        if self.base_batch < 1:
            raise ValueError(
                f"rate rule's base_batch {self.base_batch} must be at least 1; give the batch at "
                "which the learning rate was tuned"
            )
        if self.cap and self.kind not in ("linear", "sqrt"):
            raise ValueError(
                f"cap has no meaning under rate rule {self.kind!r}; leave it out, or use linear or "
                "sqrt"
            )
        if self.table and self.kind != "table":
            raise ValueError(
                f"rate rule {self.kind!r} reads no table, given {self.table}; leave it out, or use "
                "rule 'table'"
            )
        if self.kind == "table":
            _check_table(self.table)


def _check_table(table: tuple[tuple[int, float], ...]) -> None:
    if not table:
        raise ValueError("rate rule 'table' has table (); give (batch, factor) of each tuned batch")
    for batch, factor in table:
        if batch < 1:
            raise ValueError(f"rate table's batch {batch} must be at least 1; correct the entry")
        if not 0 < factor < math.inf:
            raise ValueError(
                f"rate table's factor {factor} at batch {batch} must be above 0 and finite; give "
                "the tuned learning rate over the config's"
            )
    for (before, _), (after, _) in pairwise(table):
        if after <= before:
            raise ValueError(
                f"rate table's batches must increase, and {after} follows {before}; sort the "
                "entries and leave one of each batch"
            )
