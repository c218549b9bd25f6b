# SPDX-License-Identifier: Apache-2.0
"""Moments at which a signal comes to one process of a run, and who sends it when they come.

A moment is in a phase, which is seen from outside: a slice does inner steps until bytes of its
message leave it, exchanges from then until its round is over, and checkpoints while there is a
folder that Orbax has not yet renamed into place. For the coordinator the first slice's phase
counts. Invariant: moments are drawn from a seed, in turns in which every kind of process is hit
once in every phase; fewer moments are the first ones of more.
"""

import os
import random
import signal
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console

from benchmarks.wan import network
from benchmarks.wan.common import LEAST_ROUNDS
from benchmarks.wan.session import Situation
from geojax.config import RunError, require
from geojax.launch.local import COORDINATOR

SIGNALS = ("KILL", "STOP")
FIRST, ANOTHER = "first slice", "another slice"
VICTIMS = (FIRST, ANOTHER, COORDINATOR)
INNER, EXCHANGE, CHECKPOINT = "inner steps", "exchange", "checkpoint"
PHASES = (INNER, EXCHANGE, CHECKPOINT)
FIRST_ROUND = 3
"""Before which there is no trouble: something must be there to compare with."""
PATIENCE_SECONDS = 600.0
"""Without the end of a round, after which a run counts as hung."""
_MOST_SENT = 0.5  # of its message, when an exchange is hit; a short one is over soon after
_BEGUN = 0.02  # share of its message that a slice has sent when it exchanges; pings are less


@dataclass(frozen=True)
class Moment:
    """A signal to a process of a run of its own."""

    number: int
    """Among those of the signal, from 0."""
    signal: str
    victim: str
    """One of VICTIMS."""
    name: str
    """Of the process."""
    phase: str
    round: int
    """In which it comes, at the earliest."""
    share: float
    """Of the phase."""
    returns: bool
    """Whether the process is started again, or goes on; a coordinator always does."""
    seed: int
    """Of the run."""

    @property
    def folder(self) -> str:
        return f"{self.signal.lower()}-{self.number:02}"


def draw_moments(
    slices: Sequence[str], number: str, count: int, rounds: int, seeds: int, seed: int
) -> list[Moment]:
    """`count` moments of signal `number`, for runs of about `rounds` rounds. ConfigError."""
    require(count >= 0, f"--moments {count} must be at least 0")
    require(seeds >= 1, f"--seeds {seeds} must be at least 1")
    assert rounds >= LEAST_ROUNDS
    rng = random.Random(f"{seed} {number}")
    cells: list[tuple[str, str]] = []
    found = []
    for index in range(count):
        if not cells:
            cells = list(product(VICTIMS, PHASES))
            rng.shuffle(cells)
        victim, phase = cells.pop()
        name = {FIRST: slices[0], COORDINATOR: COORDINATOR}.get(victim) or rng.choice(slices[1:])
        begin, share = rng.randint(FIRST_ROUND, rounds // 3), rng.random()
        # By turns in every cell, so that either happens to each kind in each phase.
        turn = index // len(VICTIMS) // len(PHASES) + VICTIMS.index(victim) + PHASES.index(phase)
        returns = victim == COORDINATOR or turn % 2 == 0
        found.append(
            Moment(index, number, victim, name, phase, begin, share, returns, index % seeds)
        )
    return found


@dataclass(frozen=True)
class Sight:
    """What is seen of a slice from outside."""

    round: int
    """That is open."""
    open_seconds: float
    """Since then."""
    sent: float
    """Share of its message that has left since then, to all others together."""
    saving: bool
    """Whether a checkpoint is being written."""


def phase_of(sight: Sight) -> str:
    if sight.saving:
        return CHECKPOINT
    return EXCHANGE if sight.sent >= _BEGUN else INNER


def is_due(moment: Moment, sight: Sight, usual_seconds: float) -> bool:
    """Whether the moment has come; `usual_seconds`: of the slice's inner steps."""
    if sight.round < moment.round or phase_of(sight) != moment.phase:
        return False
    if moment.phase == INNER:
        return sight.open_seconds >= moment.share * usual_seconds
    return moment.phase == CHECKPOINT or sight.sent >= moment.share * _MOST_SENT


@dataclass(frozen=True)
class Sent:
    """A signal that was sent."""

    round: int
    """That was open."""
    at_seconds: float
    """Of the session."""
    sight: Sight


class Disturber:
    """Sends one moment's signal when it has come; ends what hangs after a while, if it returns."""

    def __init__(
        self,
        moment: Moment,
        slices: Sequence[str],
        message_bytes: int,
        hang_seconds: float,
        console: Console,
    ):
        """`message_bytes`: of a slice to all others together."""
        self._console = console
        self._moment, self._slices = moment, slices
        self._watched = slices[0] if moment.name == COORDINATOR else moment.name
        self._message_bytes, self._hang_seconds = message_bytes, hang_seconds
        self._round = -1
        self._opened = 0.0
        self._before_bytes = 0
        self._timed = False
        """Whether the open round's inner steps are over."""
        self._inner: list[float] = []
        self._moved = 0.0
        """When a round was last over."""
        self._last_closed = 0
        self._hanging: tuple[float, int] | None = None
        self.sent: Sent | None = None
        self.confirmed = False
        """Whether the phase that was seen went on when the signal had been sent."""

    def trouble(self, situation: Situation) -> None:
        """RunError where the run hangs."""
        self._wake(situation.now)
        self._require_progress(situation)
        if self.sent:
            self._confirm(situation)
            return
        child = situation.children[self._moment.name]
        sight = self._look(situation)
        known = self._inner[1:]  # the first round holds what happens once
        usual = statistics.median(known) if known else 0.0
        if sight is None or child.code is not None or not is_due(self._moment, sight, usual):
            return
        assert child.process, "it is seen"
        child.away = not self._moment.returns
        _send(child.process.pid, signal.Signals[f"SIG{self._moment.signal}"])
        if self._moment.signal == "STOP" and self._moment.returns:
            self._hanging = situation.now + self._hang_seconds, child.process.pid
        self.sent = Sent(sight.round, situation.now, sight)
        self._console.print(
            f"  SIG{self._moment.signal} to {self._moment.name} in round {sight.round}"
        )

    def _look(self, situation: Situation) -> Sight | None:
        """None where the slice is not there, or its round began unseen."""
        child = situation.children[self._watched]
        if child.process is None or child.code is not None:
            self._round = -1
            return None
        nodes = [c.node.index for n, c in situation.children.items() if n in self._slices]
        size = network.sent_bytes(child.process.pid, nodes)
        if situation.round != self._round:
            self._round, self._opened = situation.round, situation.now
            self._before_bytes = size
            self._timed = False
        sent = max(size - self._before_bytes, 0) / self._message_bytes
        seconds = situation.now - self._opened
        if sent >= _BEGUN and not self._timed:
            self._timed = True
            self._inner.append(seconds)
        folder = situation.lab.folder.parent / "slices" / self._watched / "checkpoints"
        return Sight(situation.round + 1, seconds, sent, is_saving(folder))

    def _confirm(self, situation: Situation) -> None:
        assert self.sent
        if self.confirmed or situation.now - self.sent.at_seconds > 1.0:
            return
        if self._moment.phase != CHECKPOINT:
            self.confirmed = situation.round + 1 == self.sent.round
        elif self._moment.name == COORDINATOR:  # slices go on
            self.confirmed = True
        else:
            folder = situation.lab.folder.parent / "slices" / self._watched / "checkpoints"
            self.confirmed = is_saving(folder)

    def _require_progress(self, situation: Situation) -> None:
        if situation.round != self._last_closed:
            self._last_closed, self._moved = situation.round, situation.now
        if situation.now - self._moved > PATIENCE_SECONDS:
            raise RunError(f"no round has ended for {PATIENCE_SECONDS:.0f} s")

    def _wake(self, now: float) -> None:
        if self._hanging and self._hanging[0] <= now:
            _send(self._hanging[1], signal.SIGCONT)
            self._hanging = None


def is_saving(folder: Path) -> bool:
    """Whether a checkpoint in it is begun and not whole."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return any("checkpoint-tmp" in entry.name for entry in entries)
    return False


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
