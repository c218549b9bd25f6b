# SPDX-License-Identifier: Apache-2.0
"""A slice that becomes slower in the middle of a run, with new plans and without.

Invariant: both runs are the same until the quota changes, which it does at the end of the same
round; a finished run is kept.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from rich.console import Console

from benchmarks.wan import quota
from benchmarks.wan.common import add_options, prepared, write_report
from benchmarks.wan.network import require_tools
from benchmarks.wan.session import Situation, Trouble, finished, run
from geojax.config import require
from geojax.track.console import format_share
from geojax.track.summary import Run, check_accounting, load_run

BALANCED_IDLE, BALANCED_AFTER_ROUNDS = 0.05, 2
"""Asked: straggler idle is under that share again, after so many rounds that show the change."""
REPLAN = 0.03
"""`balance.replan` of the run that follows a change."""


def add_command(commands) -> None:
    parser = commands.add_parser("throttle", help="halve a slice's quota, with and without replan")
    parser.add_argument("--slice", default="h100", help="which")
    parser.add_argument("--at-round", type=int, default=8, help="after which it happens")
    parser.add_argument("--factor", type=float, default=0.5, help="of its quota, from then on")
    parser.set_defaults(function=_throttle)
    add_options(parser, rounds=24, rate_scale=0.002)


def _throttle(options: argparse.Namespace, console: Console) -> None:
    require_tools()
    config, setting = prepared(options)
    names = [s.name for s in config.slices]
    require(options.slice in names, f"--slice {options.slice!r}: use one of {', '.join(names)}")
    require(0 < options.factor < 1, f"--factor {options.factor} must lie in (0, 1)")
    require(
        1 <= options.at_round < options.rounds,
        f"--at-round {options.at_round} must lie in 1..{options.rounds - 1} with --rounds "
        f"{options.rounds}",
    )
    quota.check({options.slice: setting.cores[options.slice] * options.factor})
    folder, found = options.out.resolve(), {}
    slow = slower(options.slice, options.at_round, options.factor, console)
    for name, replan in (("replan", REPLAN), ("no-replan", None)):
        place = folder / name
        changed = replace(config, balance=replace(config.balance, replan=replan))
        if not finished(changed, place):
            run(changed, place, setting, console, slow)
        found[name] = load_run(place)
        check_accounting(found[name])
    idle = {name: idle_by_round(r) for name, r in found.items()}
    changes = {name: [s["round"] for s in r.switches] for name, r in found.items()}
    console.print(f"straggler idle by round; {options.slice} throttled after {options.at_round}")
    for line in lines(idle, changes):
        console.print(line, soft_wrap=True)
    asked = verdict(idle, options.at_round)
    console.print(asked, soft_wrap=True)
    write_report(
        folder,
        {
            "slice": options.slice,
            "at_round": options.at_round,
            "factor": options.factor,
            "straggler_idle": idle,
            "asked": asked,
            "new_plans_after": changes,
            "machine": found["replan"].start["machine"],
        },
        console,
    )


def slower(name: str, at_round: int, factor: float, console: Console) -> Trouble:
    """The slice's quota times `factor` from the end of that round on, in every session."""

    def slow(situation: Situation) -> None:
        child = situation.children[name]
        if situation.round >= at_round and child.factor != factor:
            child.factor = factor
            if child.limited:  # else when it listens
                situation.lab.limit(child.node, factor)
            console.print(f"  {name}: quota x {factor:g}")

    return slow


def idle_by_round(run: Run) -> list[float]:
    """The longest straggler wait as a share of each round."""
    longest = dict.fromkeys((r["round"] for r in run.rounds), 0.0)
    for record in run.slices:
        number = record["round"]
        longest[number] = max(longest[number], record["straggler_seconds"])
    return [longest[r["round"]] / (r["round_seconds"] or 1.0) for r in run.rounds]


def verdict(idle: Mapping[str, Sequence[float]], at_round: int) -> str:
    """Whether idle was under the bound once two rounds had shown the change: in the round after
    them, and in the median from it on, with that of the run without new plans beside it."""
    late = {name: shares[at_round + BALANCED_AFTER_ROUNDS :] for name, shares in idle.items()}
    if not all(late.values()):
        return "the runs were over before a new plan could show; use more --rounds"
    with_plans, without = (median(late[name]) for name in ("replan", "no-replan"))
    first = late["replan"][0]
    met = max(first, with_plans) < BALANCED_IDLE
    return (
        f"straggler idle in round {at_round + BALANCED_AFTER_ROUNDS + 1}, and median from it on "
        f"(asked: under {BALANCED_IDLE:.0%}): {format_share(first)}, {format_share(with_plans)}, "
        f"{'met' if met else 'NOT met'}; without new plans {format_share(without)}"
    )


def lines(
    idle: Mapping[str, Sequence[float]], changes: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """Rounds down, runs across; a run that is over has a dash."""
    for index in range(max(map(len, idle.values()))):
        cells = (
            f"{name} {format_share(shares[index]) if index < len(shares) else '-':>6}"
            + (" (new plan)" if index in changes[name] else "")
            for name, shares in idle.items()
        )
        yield f"  round {index + 1:>3}: {'  '.join(cells)}"
