# SPDX-License-Identifier: Apache-2.0
"""SIGKILL and SIGSTOP at random moments, each in a run of its own, beside runs without.

Resumable: a moment's result is a file, and what has one is not run again; a run that was cut short
begins anew, for its moment is over. Invariant: a disturbed run is compared with the undisturbed one
of its seed and of the slices that it ended with.
"""

import argparse
import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.wan.common import add_options, prepared, write_report
from benchmarks.wan.moments import SIGNALS, Disturber, Moment, draw_moments
from benchmarks.wan.network import require_tools
from benchmarks.wan.outcomes import (
    TABLE_WIDTH,
    Outcome,
    noise,
    problems,
    read_outcome,
    rows,
    table,
)
from benchmarks.wan.session import Setting, finished, run
from benchmarks.wan.verdict import (
    hash_problem,
    merged_shares,
    read_finals,
    read_history,
    sample_problem,
    time_lost,
)
from geojax.config import ConfigError, RunConfig, RunError, require, with_seed
from geojax.geomesh.clock import traffic
from geojax.track.environment import machine
from geojax.track.metrics import read_records, to_json, write_atomically
from geojax.track.summary import check_accounting, load_run

JOIN_SECONDS = 120.0
"""`grpc.join_seconds`: at a run's end a slice that is away for good is awaited for so long."""


def add_command(commands) -> None:
    parser = commands.add_parser("failures", help="SIGKILL and SIGSTOP at random moments")
    parser.add_argument("--moments", type=int, default=20, help="of each signal, a run each")
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=SIGNALS)
    parser.add_argument("--seeds", type=int, default=3, help="of the runs, in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--hang-seconds", type=float, default=40.0, help="from STOP to CONT")
    parser.set_defaults(function=_failures)
    add_options(parser, rounds=60, rate_scale=0.01)


def _failures(options: argparse.Namespace, console: Console) -> None:
    require_tools()
    require(
        0 < options.hang_seconds < math.inf,
        f"--hang-seconds {options.hang_seconds} must be above 0 and finite",
    )
    config, setting = prepared(options)
    names = [s.name for s in config.slices]
    require(
        len(names) > 2,
        f"--slices {len(names)}: of two slices neither goes on without the other; use 3 or 4",
    )
    config = replace(config, grpc=replace(config.grpc, join_seconds=JOIN_SECONDS))
    moments = [
        moment
        for number in dict.fromkeys(options.signals)
        for moment in draw_moments(
            names, number, options.moments, options.rounds, options.seeds, options.seed
        )
    ]
    require(moments, "--moments 0: nothing is asked for")
    folder = options.out.resolve()
    kept = ("rounds", "slices", "wan", "rate_scale", "seeds", "seed", "hang_seconds")
    claim(folder, {name: getattr(options, name) for name in kept} | {"cores": setting.cores})
    undisturbed = needed(moments)
    missing = [m for m in moments if read_outcome(folder, m) is None]
    console.print(
        f"cost: {len(undisturbed)} runs without a failure and {len(moments)} with one, "
        f"{len(missing)} of these to go, each of about {options.rounds} rounds and a start, one "
        f"after another; up to {options.hang_seconds + JOIN_SECONDS:.0f} s more where a slice "
        "hangs or stays away",
        soft_wrap=True,
    )
    losses = {}
    for absent, seed in undisturbed:
        place = folder / f"undisturbed-{f'without-{absent}' if absent else 'all'}-seed{seed}"
        calm = without(with_seed(config, seed), absent)
        if not finished(calm, place):
            console.print(f"undisturbed, {f'without {absent}' if absent else 'all'}, seed {seed}")
            run(calm, place, setting, console)
        losses[absent, seed] = load_run(place).evals[-1]["loss"]
    for moment in missing:
        console.print(
            f"{moment.folder}: SIG{moment.signal} to {moment.name}, {moment.phase}, "
            f"{'comes back' if moment.returns else 'stays away'}"
        )
        outcome = _disturbed(config, moment, folder, setting, options.hang_seconds, console)
        for line in problems([outcome]):
            console.print(line, soft_wrap=True, markup=False)
    outcomes = [found for m in moments if (found := read_outcome(folder, m))]
    report(folder, outcomes, losses, console)


def claim(folder: Path, plan: Mapping[str, Any]) -> None:
    """The folder is of this plan from now on. ConfigError where it is of another."""
    path, text = folder / "plan.json", json.dumps(to_json(dict(plan)), indent=2) + "\n"
    if path.exists():
        require(
            path.read_text() == text,
            f"{path} is of other settings; choose another --out, or delete {folder}",
        )
        return
    require(
        not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
        f"{folder} is, or holds, something else; choose another --out",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror}") from error


def needed(moments: Iterable[Moment]) -> list[tuple[str, int]]:
    """Undisturbed runs that these are compared with: the slice that is absent, if any, and seed."""
    pairs = {("" if m.returns else m.name, m.seed) for m in moments}
    return sorted(pairs)


def without(config: RunConfig, absent: str) -> RunConfig:
    return replace(config, slices=tuple(s for s in config.slices if s.name != absent))


def _disturbed(
    config: RunConfig,
    moment: Moment,
    folder: Path,
    setting: Setting,
    hang_seconds: float,
    console: Console,
) -> Outcome:
    """Run it, and write its result."""
    place, config = folder / moment.folder, with_seed(config, moment.seed)
    if place.exists():  # an earlier command was ended while it ran
        shutil.rmtree(place)
    names = [s.name for s in config.slices]
    message_bytes = (len(names) - 1) * traffic(config).payload_bytes
    disturber, problem = Disturber(moment, names, message_bytes, hang_seconds, console), ""
    try:
        run(config, place, setting, console, disturber.trouble)
    except RunError as error:
        problem = str(error)
    outcome = judge(config, moment, place, disturber, problem)
    text = json.dumps(to_json(asdict(outcome)), indent=2) + "\n"
    write_atomically(place / "result.json", text)
    return outcome


def judge(
    config: RunConfig, moment: Moment, place: Path, disturber: Disturber, problem: str
) -> Outcome:
    """What a run's files say; `problem`: why it ended early, or empty."""
    sent = disturber.sent.round if disturber.sent else None
    nothing = Outcome(moment, sent, disturber.confirmed, problem, "", "", False, None, None)
    if problem:
        return nothing
    names = [s.name for s in config.slices]
    try:
        found = load_run(place)
        check_accounting(found)
    except ConfigError as error:
        return replace(nothing, problem=f"the run's records are wrong: {error}")
    if found.end is None or found.rounds[-1]["tokens"] < config.train.total_tokens:
        return replace(nothing, problem="the run's records have no end")
    history = read_history(place)
    last = [names[i] for i in history.rounds[-1]["merged"]]
    closed = json.loads((place / "lab.json").read_text())["closed_seconds"]
    return replace(
        nothing,
        hash_problem=hash_problem(read_finals(place, names), history.round, last),
        sample_problem=sample_problem(
            merged_shares(config, history), read_records(place / "metrics.jsonl")
        ),
        returned=moment.name not in names or moment.name in last,
        final_loss=found.evals[-1]["loss"],
        lost_seconds=time_lost(closed, sent) if sent else None,
    )


def report(
    folder: Path,
    outcomes: Sequence[Outcome],
    losses: Mapping[tuple[str, int], float],
    console: Console,
) -> None:
    """Print the table, and write it."""
    found, spread = rows(outcomes, losses), noise(losses)
    console.print(table(found), width=max(console.width, TABLE_WIDTH), crop=False, soft_wrap=True)
    known = ", ".join(
        f"{'of all slices' if name == 'all' else 'of one fewer'} "
        + ("unknown (one seed)" if value is None else f"{value:.3f}")
        for name, value in spread.items()
    )
    console.print(
        "Loss: final, nats a token, over the undisturbed run of the same seed, mean ± standard "
        f"deviation. Standard deviation of undisturbed runs over seeds: {known}. Measured clock; "
        f"{machine()}.",
        soft_wrap=True,
    )
    wrong = problems(outcomes)
    for line in wrong:
        console.print(line, soft_wrap=True, markup=False)
    content = {
        "clock": "measured",
        "machine": machine(),
        "loss": "nats a token, held out",
        "undisturbed": [{"absent": a, "seed": s, "loss": x} for (a, s), x in losses.items()],
        "noise": spread,
        "summary": found,
        "problems": wrong,
        "results": [asdict(o) for o in outcomes],
    }
    write_report(folder, content, console)
