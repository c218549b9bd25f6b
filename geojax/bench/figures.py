# SPDX-License-Identifier: Apache-2.0
"""Figures that claims are judged by, out of the files that the parts of `geojax bench paper` write.

Each is read from the content of one file: None where it is not in it.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from geojax.bench.cona_tables import LATE
from geojax.bench.published import PUBLISHED_HOURS


@dataclass(frozen=True)
class Figure:
    """A figure of ours, and its spread where there is one."""

    value: float
    low: float | None = None
    high: float | None = None
    basis: str = ""
    """What it was made from, and so what the spread is over."""


def _of_seeds(values: Iterable[float]) -> Figure | None:
    """Their mean, least and most."""
    found = list(values)
    if not found:
        return None
    if len(found) == 1:
        return Figure(found[0], basis="one seed")
    return Figure(
        statistics.mean(found), min(found), max(found), f"{len(found)} seeds, least to most"
    )


def _by_seed(content: Any, method: str) -> dict[int, Mapping[str, Any]]:
    return {r["seed"]: r for r in content["results"] if r["method"] == method}


def _pairs(content: Any, method: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Runs of DiLoCo and of `method`, by seed."""
    mine = _by_seed(content, method)
    return [(theirs, mine[s]) for s, theirs in _by_seed(content, "diloco").items() if s in mine]


def saved(content: Any) -> Figure | None:
    pairs = _pairs(content, "geomesh")
    if not all(a["hours_to_target"] and b["hours_to_target"] for a, b in pairs):
        return None
    return _of_seeds(1 - b["hours_to_target"] / a["hours_to_target"] for a, b in pairs)


def idle(kind: str) -> Callable[[Any], Figure | None]:
    return lambda content: _of_seeds(r[kind] for r in _by_seed(content, "geomesh").values())


def idle_ratio(kind: str) -> Callable[[Any], Figure | None]:
    return lambda content: _of_seeds(a[kind] / b[kind] for a, b in _pairs(content, "geomesh"))


def simulated_idle_ratio(content: Any) -> Figure:
    """Of the WAN; nothing is drawn by chance."""
    idle = content["idle"]
    return Figure(idle["diloco"][1] / idle["geomesh"][1])


def payload(content: Any) -> Figure | None:
    return _of_seeds(r["payload_ratio"] for r in _by_seed(content, "geomesh").values())


def hours(method: str) -> Callable[[Any], Figure | None]:
    """For the same tokens, on the scale of DiLoCo's published ones."""

    def find(content: Any) -> Figure | None:
        return _of_seeds(
            PUBLISHED_HOURS["diloco"] * (b["hours"] / b["tokens"]) / (a["hours"] / a["tokens"])
            for a, b in _pairs(content, method)
        )

    return find


def to_target(method: str) -> Callable[[Any], Figure | None]:
    def find(content: Any) -> Figure | None:
        hours = content["hours_by_size"]["150m"].get(method)
        return _of_seeds(hours * share for share in content["tokens_to_target"].get(method, ()))

    return find


def _late(result: Mapping[str, Any], name: str, shares: Sequence[float]) -> list[Any]:
    """Times over CONA's to the targets that count, each with whether it was reached."""
    pairs = zip(result["ratios"].get(name, ()), shares, strict=False)
    return [r for r, share in pairs if share >= LATE]


def of_models(model: str, measure: Callable[[Any, Sequence[float]], float | None]):
    """A figure of each seed's run of a model; of any, `model` being empty."""

    def find(content: Any) -> Figure | None:
        mine = [r for r in content["results"] if model in ("", r["model"])]
        found = (measure(r, content["shares"]) for r in mine)
        return _of_seeds(x for x in found if x is not None)

    return find


def least_gain(result: Mapping[str, Any], shares: Sequence[float]) -> float | None:
    """Over the shortest iteration; one that never came to a target took longer still."""
    return min((r["ratio"] for r in _late(result, "shortest iteration", shares)), default=None)


def most_over_oracle(result: Mapping[str, Any], shares: Sequence[float]) -> float | None:
    return max(result["over_oracle"], default=None)


def planner_over_best(result: Mapping[str, Any], shares: Sequence[float]) -> float | None:
    """The shortest iteration's time over that of the best of all other ways, at the late target
    where it is largest."""
    ways = [_late(result, n, shares) for n in result["ratios"] if n != "shortest iteration"]
    best = [
        min((r["ratio"] for r in column if r["reached"]), default=None)
        for column in zip(*(way for way in ways if way), strict=True)
    ]
    mine = _late(result, "shortest iteration", shares)
    found = [m["ratio"] / b for m, b in zip(mine, best, strict=False) if b is not None]
    return max(found, default=None)


def most(measure: Callable[[Any, Sequence[float]], float | None]):
    """The most that a run of any model comes to."""

    def find(content: Any) -> Figure | None:
        found = [measure(r, content["shares"]) for r in content["results"]]
        known = [x for x in found if x is not None]
        return Figure(max(known), basis=f"{len(known)} runs, the most") if known else None

    return find


def most_gain(result: Mapping[str, Any], shares: Sequence[float]) -> float | None:
    return max((r["ratio"] for r in _late(result, "shortest iteration", shares)), default=None)


def throughput(policy: str, every: int | None, share: float) -> Callable[[Any], Figure | None]:
    """At batch 1, as published."""

    def find(content: Any) -> Figure | None:
        for point in content["points"]:
            for row in point["rows"]:
                asked = (policy, every) == (row["policy"], row["every"])
                if asked and point["batch"] == 1 and point["share"] == share:
                    basis = f"{point['rounds']} rounds, least to most"
                    return Figure(row["ratio"] - 1, row["low"] - 1, row["high"] - 1, basis)
        return None

    return find


def loss(content: Any) -> Figure | None:
    """The largest loss of accuracy at the profiled depth, with its bound; where that is all layers
    the policy that shares all, and where it is none nothing is lost."""
    found = [
        r
        for r in content["results"]
        if r["cell"]["policy"] in ("bicache", "full")
        and r["cell"]["depth"] == content["depths"].get(str(r["cell"]["share"]))
    ]
    if not found:
        return None
    worst = max(found, key=lambda r: r["bound"])
    places = len({(r["cell"]["task"], r["cell"]["share"]) for r in found})
    basis = f"{places} tasks and shares, {content['examples']:,} requests each; one-sided 95 %"
    return Figure(worst["loss"], None, worst["bound"], basis)


def collapse(content: Any) -> Figure | None:
    """The largest loss of reuse in all layers against the same refreshes without sharing."""
    results = content["results"]
    plain = {
        (r["cell"]["task"], r["cell"]["share"]): r["accuracy"]
        for r in results
        if r["cell"]["policy"] == "refresh"
    }
    losses = [
        plain[r["cell"]["task"], r["cell"]["share"]] - r["accuracy"]
        for r in results
        if r["cell"]["policy"] == "full"
    ]
    basis = f"{len(losses)} tasks and shares, {content['examples']:,} requests each"
    return Figure(max(losses), basis=basis) if losses else None
