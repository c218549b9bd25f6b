# SPDX-License-Identifier: Apache-2.0
"""Trouble for a run in a lab: a slice that becomes slower, and processes that die or hang.

Moments are rounds and shares of a round, drawn from a seed. What trouble costs is taken from the
run itself: a round under way when it came, over the median of rounds that nothing disturbed.
"""

import argparse
import json
import os
import random
import signal
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from benchmarks.wan.network import require_tools
from benchmarks.wan.preset import LAB_WAN, SHARES, method, quotas, round_tokens
from benchmarks.wan.session import Setting, Situation, finished, run
from benchmarks.wan.world import Weather
from geojax.config import RunConfig, require
from geojax.launch.local import COORDINATOR
from geojax.track.console import format_share
from geojax.track.environment import usable_cores
from geojax.track.metrics import to_json, write_atomically
from geojax.track.summary import Run, check_accounting, load_run

REPLAN = 0.03
"""`balance.replan` of the run that follows a change."""
FIRST_ROUND = 3
"""Before which there is no trouble: something must be there to compare with."""
SIGNALS = ("KILL", "STOP")


@dataclass(frozen=True)
class Event:
    """A signal to a process."""

    round: int
    """In which it comes."""
    share: float
    """Of a usual round, after this one's begin."""
    name: str
    signal: str


def add_commands(commands) -> None:
    slow = commands.add_parser("throttle", help="halve a slice's quota, with and without replan")
    slow.add_argument("--slice", default="h100", help="which")
    slow.add_argument("--at-round", type=int, default=8, help="after which it happens")
    slow.add_argument("--factor", type=float, default=0.5, help="of its quota, from then on")
    slow.set_defaults(function=_throttle)
    broken = commands.add_parser("failures", help="SIGKILL and SIGSTOP at random moments")
    broken.add_argument("--events", type=int, default=4, help="in the run")
    broken.add_argument("--seed", type=int, default=0, help="of the moments")
    broken.add_argument("--signals", nargs="+", choices=SIGNALS, default=SIGNALS)
    broken.add_argument("--hang-seconds", type=float, default=40.0, help="from STOP to CONT")
    broken.set_defaults(function=_failures)
    for parser, rounds in ((slow, 24), (broken, 40)):
        name = parser.prog.split()[-1]
        parser.add_argument("--out", type=Path, default=Path(f"runs/wan-{name}"), help="folder")
        parser.add_argument("--rounds", type=int, default=rounds, help="about as many")
        parser.add_argument("--slices", type=int, default=4, help="the demo's first ones")
        parser.add_argument("--wan", default=LAB_WAN, help="WAN by name, or a CSV file")
        parser.add_argument("--rate-scale", type=float, default=0.002, help="of all rates")
        parser.add_argument("--cores", type=float, help="of all; unset: 0.8 of what there is")


def _throttle(options: argparse.Namespace, console: Console) -> None:
    require_tools()
    config, setting = _prepared(options)
    names = [s.name for s in config.slices]
    require(options.slice in names, f"--slice {options.slice!r}: use one of {', '.join(names)}")
    require(0 < options.factor < 1, f"--factor {options.factor} must lie in (0, 1)")
    folder, found = options.out.resolve(), {}

    def slow(situation: Situation) -> None:
        child = situation.children[options.slice]
        if situation.round >= options.at_round and child.factor == 1.0:
            child.factor = options.factor
            situation.lab.limit(child.node, child.factor)
            console.print(f"  {options.slice}: quota x {options.factor:g}")

    for name, replan in (("replan", REPLAN), ("no-replan", None)):
        place = folder / name
        changed = replace(config, balance=replace(config.balance, replan=replan))
        if not finished(changed, place):
            run(changed, place, setting, console, slow)
        found[name] = load_run(place)
        check_accounting(found[name])
    idle = {name: idle_by_round(r) for name, r in found.items()}
    changes = {name: [s["round"] for s in r.switches] for name, r in found.items()}
    longest = max(map(len, idle.values()))
    console.print(f"straggler idle by round; {options.slice} throttled after {options.at_round}")
    for i in range(longest):
        row = "  ".join(
            f"{name} {format_share(shares[i]) if i < len(shares) else '-':>6}"
            + (" (new plan)" if i in changes[name] else "")
            for name, shares in idle.items()
        )
        console.print(f"  round {i + 1:>3}: {row}")
    _write(
        folder,
        {
            "slice": options.slice,
            "at_round": options.at_round,
            "factor": options.factor,
            "straggler_idle": idle,
            "new_plans_after": changes,
            "machine": found["replan"].start["machine"],
        },
        console,
    )


def idle_by_round(run: Run) -> list[float]:
    """The longest straggler wait as a share of each round."""
    longest = dict.fromkeys((r["round"] for r in run.rounds), 0.0)
    for record in run.slices:
        number = record["round"]
        longest[number] = max(longest[number], record["straggler_seconds"])
    return [longest[r["round"]] / (r["round_seconds"] or 1.0) for r in run.rounds]


def _failures(options: argparse.Namespace, console: Console) -> None:
    require_tools()
    config, setting = _prepared(options)
    names = [COORDINATOR, *(s.name for s in config.slices)]
    events = draw_events(names, options.events, options.rounds, options.seed, options.signals)
    place = options.out.resolve() / f"seed{options.seed}"
    require(
        not place.exists(),
        f"{place} exists: failures are not gone on with; delete it, or choose another --seed",
    )
    disturber = Disturber(events, options.hang_seconds, console)
    run(config, place, setting, console, disturber.trouble)
    found = load_run(place)
    check_accounting(found)
    closed = json.loads((place / "lab.json").read_text())["closed_seconds"]
    lost = time_lost(closed, [e.round for e, _ in disturber.sent])
    for (event, at), seconds in zip(disturber.sent, lost, strict=True):
        console.print(
            f"  round {event.round:>3} at {at:6.1f} s: SIG{event.signal} to {event.name}, "
            f"{seconds:+.1f} s"
        )
    left_out = sum(len(r["left_out"]) for r in found.rounds)
    console.print(
        f"completed {len(found.rounds)} rounds, {len(disturber.sent)} of {len(events)} events; "
        f"lost {sum(lost):.1f} s in all; final perplexity {found.final_perplexity:.2f}, "
        f"{found.rounds[-1]['tokens']} tokens of {config.train.total_tokens}, "
        f"{left_out} messages left out",
        soft_wrap=True,
    )
    _write(
        place,
        {
            "events": [asdict(e) | {"at_seconds": at} for e, at in disturber.sent],
            "lost_seconds": lost,
            "hang_seconds": options.hang_seconds,
            "final_perplexity": found.final_perplexity,
            "tokens": found.rounds[-1]["tokens"],
            "machine": found.start["machine"],
        },
        console,
    )


def draw_events(
    names: Sequence[str], count: int, rounds: int, seed: int, signals: Sequence[str] = SIGNALS
) -> list[Event]:
    """In rounds of their own, every second one at most, so that each one's cost is its own."""
    free = list(range(FIRST_ROUND, rounds - 1, 2))
    require(
        1 <= count <= len(free),
        f"--events {count} must lie in 1..{len(free)} with --rounds {rounds}: no event is in the "
        f"first {FIRST_ROUND - 1} rounds or the last two, and none follows another at once",
    )
    rng = random.Random(seed)
    numbers = sorted(rng.sample(free, count))
    return [Event(n, rng.random(), rng.choice(names), rng.choice(signals)) for n in numbers]


class Disturber:
    """Sends the events' signals when their moments come; ends what hangs after a while."""

    def __init__(self, events: Sequence[Event], hang_seconds: float, console: Console):
        self._waiting = list(events)
        self._hang_seconds, self._console = hang_seconds, console
        self._hanging: list[tuple[float, int]] = []
        self.sent: list[tuple[Event, float]] = []
        """With the second of the session."""

    def trouble(self, situation: Situation) -> None:
        for until, pid in [x for x in self._hanging if x[0] <= situation.now]:
            self._hanging.remove((until, pid))
            _send(pid, signal.SIGCONT)
        if not self._waiting or situation.round + 1 < self._waiting[0].round:
            return
        event = self._waiting[0]
        lengths = round_seconds(situation.closed)
        usual = statistics.median(lengths) if lengths else 0.0
        if situation.closed and situation.now < situation.closed[-1] + event.share * usual:
            return
        child = situation.children[event.name]
        if child.process is None or child.code is not None:
            return  # it is not there at the moment
        self._waiting.pop(0)
        _send(child.process.pid, signal.Signals[f"SIG{event.signal}"])
        if event.signal == "STOP":
            self._hanging.append((situation.now + self._hang_seconds, child.process.pid))
        self.sent.append((replace(event, round=situation.round + 1), situation.now))
        self._console.print(f"  SIG{event.signal} to {event.name} in round {situation.round + 1}")


def round_seconds(closed: Sequence[float]) -> list[float]:
    """Of each round but the first, from when rounds were over."""
    return [after - before for before, after in pairwise(closed)]


def time_lost(closed: Sequence[float], disturbed: Sequence[int]) -> list[float]:
    """Seconds that each disturbed round, and the one after it, took over the usual; `closed` is
    when each was over, from round 1."""
    lengths = dict(enumerate(round_seconds(closed), 2))
    near = {n for number in disturbed for n in (number, number + 1)}
    usual = statistics.median([s for n, s in lengths.items() if n not in near] or lengths.values())
    return [
        sum(lengths[n] - usual for n in (number, number + 1) if n in lengths)
        for number in disturbed
    ]


def _prepared(options: argparse.Namespace) -> tuple[RunConfig, Setting]:
    require(2 <= options.slices <= len(SHARES), f"--slices must lie in 2..{len(SHARES)}")
    slices = tuple(range(options.slices))
    shares = SHARES[: options.slices]
    tokens = options.rounds * round_tokens(method("geomesh", slices=slices), shares)
    config = method("geomesh", tokens, slices)
    config = replace(
        config,
        eval=replace(config.eval, every_tokens=0, sequences=64),
        checkpoint=replace(config.checkpoint, every_rounds=5),
    )
    cores = options.cores or 0.8 * len(usable_cores())
    weather = Weather(options.rate_scale)
    return config, Setting(options.wan, weather, quotas(config, shares, cores))


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _write(folder: Path, content: Mapping[str, object], console: Console) -> None:
    path = folder / "report.json"
    write_atomically(path, json.dumps(to_json(content), indent=2) + "\n")
    console.print(f"wrote {path}")
