# SPDX-License-Identifier: Apache-2.0
"""Speeds that change while a run goes on.

Invariant: a slice's speed is piecewise constant over time, above 0, and 1 until its first change;
work is measured in seconds at speed 1.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from geojax.config import require

_FORM = re.compile(r"(?P<slice>.+)@(?P<seconds>[^@=]+)=(?P<factor>[^@=]+)")


@dataclass(frozen=True)
class Change:
    """From `at_seconds` on, slice `slice` is `factor` times as fast as at first."""

    slice: str
    at_seconds: float
    factor: float


def parse_change(text: str, names: Sequence[str]) -> Change:
    """`h100@3600=0.5`: slice h100 at half its speed from 3600 seconds on. ConfigError otherwise."""
    example = f"{names[0]}@3600=0.5"
    found = _FORM.fullmatch(text)
    require(found, f"change {text!r} is not SLICE@SECONDS=FACTOR, such as {example}")
    assert found
    require(
        found["slice"] in names,
        f"change {text!r}: no slice {found['slice']!r}; use one of {list(names)[:8]}",
    )
    try:
        change = Change(found["slice"], float(found["seconds"]), float(found["factor"]))
    except ValueError:
        change = Change(found["slice"], math.nan, math.nan)
    require(
        0 <= change.at_seconds < math.inf and 0 < change.factor < math.inf,
        f"change {text!r}: seconds must be at least 0 and the factor above 0, such as {example}",
    )
    return change


class Speeds:
    """Of K slices, by index."""

    def __init__(self, names: Sequence[str], changes: Iterable[Change]):
        """ConfigError where a slice changes twice at one time."""
        self._times: list[list[float]] = [[] for _ in names]
        self._factors: list[list[float]] = [[1.0] for _ in names]
        for change in sorted(changes, key=lambda c: c.at_seconds):
            index = names.index(change.slice)
            require(
                change.at_seconds not in self._times[index],
                f"slice {change.slice} changes twice at {change.at_seconds} seconds; keep one",
            )
            self._times[index].append(change.at_seconds)
            self._factors[index].append(change.factor)

    def end(self, index: int, begin: float, work_seconds: float) -> float:
        """When `work_seconds` of work that begins at `begin` are done."""
        times, factors = self._times[index], self._factors[index]
        at = bisect_right(times, begin)
        for until, factor in zip(times[at:], factors[at:], strict=False):
            done = (until - begin) * factor
            if done >= work_seconds:
                break
            work_seconds -= done
            begin, at = until, at + 1
        return begin + work_seconds / factors[at]
