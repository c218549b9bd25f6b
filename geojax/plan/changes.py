# SPDX-License-Identifier: Apache-2.0
"""What would help a planned run most: the same planner asked again under one change at a time.

Invariant: no figure here is a rule of thumb; an effect is the difference of two plans, to the same
number of tokens. Links have no price, and a kind of GPU has one only where the file gives it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from geojax.config import ConfigError, ExchangeConfig, RunConfig
from geojax.meshes.hardware import GPUS, Gpu
from geojax.meshes.timing import StepCase
from geojax.meshes.wan import Wan
from geojax.plan.cluster import ClusterFile, Site
from geojax.plan.whole import Search, Whole, plan_whole
from geojax.simulate.setting import How


@dataclass(frozen=True)
class Change:
    """Another run to plan: the one at hand with one thing changed."""

    name: str
    config: RunConfig
    cluster: ClusterFile
    overlap: bool


@dataclass(frozen=True)
class Effect:
    """What a change comes to; figures are None where it cannot be planned, for `problem`."""

    name: str
    hours: float | None = None
    saved_hours: float | None = None
    cost: float | None = None
    """Of the changed run; None where a slice has no price."""
    extra_cost: float | None = None
    """Over the plan's; below 0 where it is cheaper."""
    problem: str = ""


def effects(
    whole: Whole, config: RunConfig, how: How, overlap: bool, search: Search
) -> list[Effect]:
    """Of each change to `whole`, the plan of `config`, most hours saved first; those that cannot be
    planned last."""
    hours, cost = whole.timed(overlap).outcome.hours, whole.cost(overlap)
    found = []
    for change in changes(whole, config, overlap, search):
        try:
            other = plan_whole(change.config, change.cluster, how, search)
        except ConfigError as error:
            found.append(Effect(change.name, problem=str(error)))
            continue
        then, price = other.timed(change.overlap).outcome.hours, other.cost(change.overlap)
        extra = None if price is None or cost is None else price - cost
        found.append(Effect(change.name, then, hours - then, price, extra))
    return sorted(found, key=lambda e: (e.hours is None, e.hours or 0.0))


def changes(whole: Whole, config: RunConfig, overlap: bool, search: Search) -> Iterator[Change]:
    """Links, overlap, codec and division of work; then each slice with more, with faster GPUs, and
    left out."""
    cluster = whole.cluster
    for name, wan in _links(cluster.wan):
        yield Change(name, config, replace(cluster, wan=wan), overlap)
    if not overlap:
        yield Change("exchanges beside the next steps", config, cluster, True)
    if config.exchange.codec != "sign":
        signs = ExchangeConfig("sign", schedule=config.exchange.schedule)
        name = f"signs in place of {config.exchange.codec}"
        yield Change(name, replace(config, exchange=signs), cluster, overlap)
    if config.balance.mode == "equal":
        adaptive = replace(config, balance=replace(config.balance, mode="adaptive"))
        yield Change("each slice its own work", adaptive, cluster, overlap)
    for index, site in enumerate(cluster.sites):
        nodes = site.cluster.nodes + 1
        more = replace(site, cluster=replace(site.cluster, nodes=nodes))
        yield Change(f"{site.name}: one more node", config, _swap(cluster, index, [more]), overlap)
        if faster := next_kind(whole, index, search):
            name = f"{site.name}: {faster.gpu} in place of {site.gpu}"
            yield Change(name, config, _swap(cluster, index, [faster]), overlap)
        if len(cluster.sites) > 2:
            left = _swap(cluster, index, [])
            slices = tuple(s for s in config.slices if s.name != site.name)
            yield Change(f"without {site.name}", replace(config, slices=slices), left, overlap)


def next_kind(whole: Whole, index: int, search: Search) -> Site | None:
    """Slice `index` on the kind of GPU that is the next faster one at its strategies, by the timing
    model; None where it has the fastest."""
    site, job = whole.cluster.sites[index], whole.jobs[index]
    strategies = [c.strategy for c in search.best(job)]

    def speed(gpu: Gpu) -> float:
        cluster = replace(job.cluster, gpu=gpu)
        cases = [StepCase(job.model, job.seq_len, s, cluster) for s in strategies]
        seconds = search.timing.seconds_of(cases)
        return max(s.global_batch / t for s, t in zip(strategies, seconds, strict=True))

    kinds = {**GPUS, **whole.cluster.own}
    speeds = {name: speed(gpu) for name, gpu in kinds.items()}
    faster = {name: s for name, s in speeds.items() if s > speeds[site.gpu]}
    if not faster:
        return None
    kind = min(faster, key=faster.__getitem__)
    cluster = replace(job.cluster, gpu=kinds[kind])
    return replace(
        site, gpu=kind, cluster=cluster, price_per_gpu_hour=whole.cluster.prices.get(kind)
    )


def _links(wan: Wan) -> Iterator[tuple[str, Wan]]:
    pairs = list(combinations(range(len(wan.regions)), 2))
    if not pairs:
        return
    yield "all links: twice the bandwidth", _scaled(wan, pairs, 2, 1)
    if any(wan.rtt_seconds[i][j] for i, j in pairs):
        yield "all links: half the latency", _scaled(wan, pairs, 1, 0.5)
    for i, j in pairs if len(pairs) > 1 else ():
        name = f"{wan.regions[i]} - {wan.regions[j]}: twice the bandwidth"
        yield name, _scaled(wan, [(i, j)], 2, 1)


def _scaled(wan: Wan, pairs: Sequence[tuple[int, int]], rate: float, rtt: float) -> Wan:
    """With the links of `pairs` of regions so many times as fast, and their round trips as long."""
    both = {*pairs, *((j, i) for i, j in pairs)}

    def times(rows: tuple[tuple[float, ...], ...], factor: float) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(value * factor if (i, j) in both else value for j, value in enumerate(row))
            for i, row in enumerate(rows)
        )

    return replace(
        wan,
        bits_per_second=times(wan.bits_per_second, rate),
        rtt_seconds=times(wan.rtt_seconds, rtt),
    )


def _swap(cluster: ClusterFile, index: int, sites: Sequence[Site]) -> ClusterFile:
    """With `sites` in the place of one."""
    before, after = cluster.sites[:index], cluster.sites[index + 1 :]
    return replace(cluster, sites=(*before, *sites, *after))
