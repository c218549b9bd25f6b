# SPDX-License-Identifier: Apache-2.0
"""A plan of a whole run as tables, a picture, and JSON.

Invariant: all of them show the same figures, of the modelled clock, and say so.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from geojax.meshes.timing import StepCase
from geojax.plan.chain_report import columns
from geojax.plan.changes import Effect
from geojax.plan.whole import Search, Timed, Whole
from geojax.simulate.outcome import UNITS
from geojax.track.console import format_bytes, format_count, format_seconds, format_share
from geojax.track.summary import Run

_GANTT_ROUNDS = 3
_VARIANTS = {"plain": False, "overlapped": True}
_SMALL = 5e-4
"""Share of the hours below which a change is not in the table."""


def print_whole(whole: Whole, overlap: bool, notes: Sequence[str], console: Console) -> None:
    """Slices, where their time goes, exchanges, and the run with and without overlap."""
    setting = whole.setting
    config, cluster = setting.config, whole.cluster
    gpus = sum(site.cluster.gpus for site in cluster.sites)
    console.print(
        Text(
            f"{config.name} on {cluster.name}: {setting.slices} slices, {gpus} GPUs; "
            f"{format_count(setting.traffic.params)} parameters, sequences of "
            f"{config.data.seq_len}, {format_count(config.train.total_tokens)} tokens",
            style="bold",
        )
    )
    balance = config.balance
    steps = f"{balance.inner_steps} inner steps of the slowest slice"
    if balance.sync_share:
        steps = f"inner steps until the exchange is {balance.sync_share:.0%} of a round"
    console.print(
        Text(
            f"{balance.mode} work, {steps}, {config.train.optimizer.name}; exchange of "
            f"{config.exchange.codec}"
        )
    )
    console.print()
    tables = (_slices(whole), _time(whole, overlap), _exchanges(whole), _runs(whole, overlap))
    for table in tables:
        console.print(table)
        console.print()
    for line in notes:
        console.print(Text(line))


def print_effects(found: Sequence[Effect], hours: float, console: Console) -> None:
    """What would help, most hours saved first; `hours`: the plan's."""
    planned = [e for e in found if e.hours is not None]
    shown = [e for e in planned if abs(e.saved_hours or 0) >= _SMALL * hours]
    priced = any(e.extra_cost is not None for e in shown)
    table = columns("what would help", "hours", "saved", *(["extra cost"] if priced else []))
    for e in shown:
        assert e.hours is not None
        assert e.saved_hours is not None
        cells = [_hours(e.hours), f"{e.saved_hours / hours:+.1%}"]
        if priced:
            cells.append("?" if e.extra_cost is None else _money(e.extra_cost, "+"))
        table.add_row(Text(e.name), *cells)
    console.print()
    console.print(table)
    if small := [e.name for e in planned if e not in shown]:
        console.print(Text(f"Within {_SMALL:.2%} of the plan: {'; '.join(small)}."))
    for e in found:
        if e.problem:
            console.print(Text(f"Not possible: {e.name}: {e.problem}."))


def plan_notes(whole: Whole, how: str, source: str, memory: str) -> list[str]:
    """What the figures rest on, and what the config does not do by itself."""
    config, setting = whole.setting.config, whole.setting
    lines = [
        f"Times: {source}; nothing was trained. Hours are to the same tokens: what batches, longer "
        "rounds and late results do to learning is not in them.",
        f"{memory[0].upper()}{memory[1:]}.",
    ]
    reasons = Counter(c.extrapolated for c in whole.chosen if c.extrapolated)
    lines += [f"Step times are extrapolations: {reason}." for reason, _ in reasons.most_common(1)]
    if setting.pattern != config.exchange.resolve_schedule(setting.slices):
        fix = f"set exchange.schedule to {setting.pattern}"
        if setting.pattern == "hub":
            fix = "`geojax train` has no hubs yet"
        lines.append(f"Exchange by {setting.pattern} ({how}) is not what the config does: {fix}.")
    for work, gpus in zip(whole.work, (s.cluster.gpus for s in whole.cluster.sites), strict=True):
        if work.batch not in config.balance.batch_sizes:
            lines.append(
                f"{work.name}: batch {work.batch} is one of balance.batch_sizes rounded down to "
                f"{gpus} GPUs; add it there to train by it."
            )
    if whole.cost() is None:
        lines.append("No cost: give every slice a price_per_gpu_hour, or its kind one in [prices].")
    return lines


def gantt_runs(whole: Whole) -> list[Run]:
    """The first rounds of the plan, and with overlap, as plots of runs read them."""
    return [_as_run(name, whole, whole.timed(overlap)) for name, overlap in _VARIANTS.items()]


def whole_content(
    whole: Whole, found: Sequence[Effect], overlap: bool, search: Search
) -> dict[str, Any]:
    """Everything, for JSON."""
    setting, cluster = whole.setting, whole.cluster
    config = setting.config
    slices = []
    for index, (site, job, c) in enumerate(
        zip(cluster.sites, whole.jobs, whole.chosen, strict=True)
    ):
        work = whole.work[index]
        slices.append(
            asdict(site)
            | asdict(work)
            | {
                "memory_bytes": c.memory_bytes,
                "memory_counted": c.exact,
                "usable_bytes": job.usable_bytes,
                "mfu": c.mfu,
                "extrapolated": c.extrapolated,
                "step_parts_seconds": search.timing.breakdown(
                    StepCase(job.model, job.seq_len, c.strategy, job.cluster)
                ),
                "tokens_per_second": _tokens_per_second(whole, index, overlap),
                "shares": whole.plain.shares(index),
                "shares_overlapped": whole.overlapped.shares(index),
                "sent_bytes": int(setting.exchange().sent_bytes[index]),
                "cost": _cost(whole, index, overlap),
            }
        )
    return {
        "config": config.name,
        "cluster": cluster.name,
        "model": asdict(config.model),
        "seq_len": config.data.seq_len,
        "total_tokens": config.train.total_tokens,
        "units": UNITS | {"cost": "in the currency of the file's prices", "shares": "of the run"},
        "slices": slices,
        "links": asdict(cluster.wan),
        "exchanges": {
            pattern: {
                "exchange_seconds": took.seconds,
                "sent_bytes": took.sent_bytes.tolist(),
                "wan_bytes": took.wan_bytes.tolist(),
            }
            for pattern, took in whole.exchanges().items()
        },
        "results": [
            asdict(whole.timed(variant).outcome)
            | {
                "wan": cluster.name,
                "tokens_per_second": whole.tokens_per_second(variant),
                "cost": whole.cost(variant),
            }
            for variant in _VARIANTS.values()
        ],
        "changes_overlapped": overlap,
        "changes": [asdict(e) for e in found],
    }


def _slices(whole: Whole) -> Table:
    table = columns(
        "\nslice", "\non", "\nstrategy", "batch\nx steps", "step\nmodelled", "GB\na GPU"
    )
    rows = zip(whole.cluster.sites, whole.work, whole.chosen, strict=True)
    for site, work, c in rows:
        table.add_row(
            Text(site.name),
            Text(str(site)),
            work.strategy.replace(f"-gb{work.batch}", ""),
            f"{work.batch} x {work.inner_steps}",
            format_seconds(work.seconds_per_step),
            f"{c.memory_bytes / 1e9:.1f}{'*' if c.exact else ''}",
        )
    return table


def _time(whole: Whole, overlap: bool) -> Table:
    """Where each slice's time goes, under the variant that is planned."""
    headings = ("tokens/s", "compute", "straggler\nwait", "WAN\nwait", "sent\na round", "cost")
    table = columns("\nslice", *(h if "\n" in h else f"\n{h}" for h in headings))
    sent = whole.setting.exchange().sent_bytes
    for index, site in enumerate(whole.cluster.sites):
        shares, cost = whole.timed(overlap).shares(index), _cost(whole, index, overlap)
        table.add_row(
            Text(site.name),
            f"{_tokens_per_second(whole, index, overlap):,.0f}",
            *(format_share(share) for share in shares.values()),
            format_bytes(sent[index]),
            "-" if cost is None else _money(cost),
        )
    return table


def _exchanges(whole: Whole) -> Table:
    table = columns("\nexchange", "\nmodelled", "sent\nmean", "sent\nmost")
    for pattern, took in whole.exchanges().items():
        table.add_row(
            f"{pattern}{', taken' if pattern == whole.setting.pattern else ''}",
            f"{took.seconds:.3g} s",
            format_bytes(took.sent_bytes.mean()),
            format_bytes(took.sent_bytes.max()),
        )
    return table


def _runs(whole: Whole, taken: bool) -> Table:
    headings = ("\nround", "straggler\nidle", "WAN\nidle", "\ntokens/s", "\nhours", "\ncost")
    table = columns("\nthe run", *headings)
    for name, overlap in _VARIANTS.items():
        o, cost = whole.timed(overlap).outcome, whole.cost(overlap)
        table.add_row(
            f"{name}{', taken' if overlap == taken else ''}",
            format_seconds(o.round_seconds),
            format_share(o.straggler_idle),
            format_share(o.wan_idle),
            f"{whole.tokens_per_second(overlap):,.0f}",
            _hours(o.hours),
            "-" if cost is None else _money(cost),
        )
    return table


def _as_run(name: str, whole: Whole, timed: Timed) -> Run:
    slices, rounds = [], []
    begins = [0.0] * len(whole.work)
    end = 0.0
    for number, found in enumerate(timed.rounds[:_GANTT_ROUNDS], 1):
        for index, work in enumerate(whole.work):
            spent = {
                "compute_seconds": found.compute[index],
                "straggler_seconds": found.straggler[index],
                "wan_seconds": found.wan[index],
                "outer_seconds": 0.0,
            }
            slices.append(
                {"round": number, "slice": work.name, "begin_seconds": begins[index]} | spent
            )
            begins[index] += sum(spent.values())
        rounds.append({"round": number, "seconds": found.end, "round_seconds": found.end - end})
        end = found.end
    start = {"method": name, "clock": "modelled", "seed": 0}
    return Run(name, Path(), start, tuple(slices), tuple(rounds), (), None)


def _tokens_per_second(whole: Whole, index: int, overlap: bool) -> float:
    """What a slice brings to the run, waits counted."""
    tokens = whole.work[index].sequences * whole.setting.config.data.seq_len
    return tokens / whole.timed(overlap).outcome.round_seconds


def _cost(whole: Whole, index: int, overlap: bool) -> float | None:
    site, hours = whole.cluster.sites[index], whole.timed(overlap).outcome.hours
    price = site.price_per_gpu_hour
    return None if price is None else hours * site.cluster.gpus * price


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.3g}"


def _money(cost: float, sign: str = "") -> str:
    return f"{cost:{sign},.{0 if abs(cost) >= 100 else 2}f}"
