# SPDX-License-Identifier: Apache-2.0
"""Stages of a measurement that has to end in time.

Invariant: before every piece of work the clock is asked, and a piece that would outlast its stage
is left out by name; whatever fails is recorded by name, and the rest goes on. Nothing here imports
JAX.
"""

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Clock = Callable[[], float]
"""Seconds, from any start."""
Content = dict[str, Any]
"""What a stage found, for JSON: `Stage.content`, and when it is over seconds for what was done."""
_TEXT = 500  # characters of an error that are kept


@dataclass
class Stage:
    """One stage, in the process that runs it."""

    seconds: float
    """That it may take."""
    save: Callable[[Content], None]
    """Called after every piece."""
    clock: Clock = time.monotonic
    result: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """By piece."""
    left_out: list[str] = field(default_factory=list)
    """Pieces that were not done, and why where it was not the time."""
    skipped: str | None = None
    """Why the stage did nothing."""
    doing: str = "starting"
    """The piece at hand; empty at the end."""

    def __post_init__(self):
        self.ends = self.clock() + self.seconds

    @property
    def left_seconds(self) -> float:
        return self.ends - self.clock()

    def each[T](self, pieces: Iterable[T], share: float = 1.0) -> Iterator[T]:
        """`pieces` as long as they end within `share` of the time that is left now, each taken to
        last as long as the longest before it; others are left out."""
        ends, longest = self.clock() + share * self.left_seconds, 0.0
        for piece in pieces:
            started = self.clock()
            if started >= ends or started + longest > ends:
                self.left_out.append(named(piece))
                continue
            yield piece
            longest = max(longest, self.clock() - started)

    @contextmanager
    def trying(self, piece: object) -> Generator[None]:
        """Record what `piece` raises, as text alone: frames would hold arrays."""
        self.doing = named(piece)
        self.save(self.content())
        try:
            yield
        except Exception as error:
            self.errors[named(piece)] = _short(f"{type(error).__name__}: {error}")
        self.doing = "between pieces"
        self.save(self.content())

    def content(self) -> Content:
        return {
            "skipped": self.skipped,
            "errors": self.errors,
            "left_out": self.left_out,
            "result": self.result,
            "doing": self.doing,
        }


def run_stage(stage: Stage, work: Callable[[Stage], None]) -> None:
    """All of a stage, in its process."""
    with stage.trying("the stage as a whole"):
        work(stage)
    stage.doing = ""
    stage.save(stage.content())


def run_child(command: Sequence[str], env: Mapping[str, str], limit_seconds: float) -> Content:
    """What a stage found in a process of its own: `command` and the path where it saves.

    It is ended after `limit_seconds`. However it ends, what it had saved counts.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        part, log = Path(folder) / "part.json", Path(folder) / "stderr"
        with log.open("w") as stderr:
            child = subprocess.Popen([*command, str(part)], env=dict(env), stderr=stderr)
            try:
                code = child.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                child.kill()
                child.wait()
        content = json.loads(part.read_text()) if part.exists() else Stage(0, print).content()
        said = log.read_text(errors="replace").strip()
    doing = content.pop("doing")
    if code is None:
        content["errors"][doing] = f"ended after {limit_seconds:.0f} s, its stage's limit"
    elif code or doing:
        content["errors"][doing] = _short(f"the process ended with {code}: {said[-_TEXT:]}")
    return content | {"seconds": round(time.monotonic() - started, 1)}


def run_stages(
    shares: Mapping[str, float],
    ends: float,
    run: Callable[[str, float], Content],
    done: Callable[[str, Content], None],
    clock: Clock = time.monotonic,
) -> None:
    """Run all stages in order, to be over when the clock says `ends`; `done` hears of each.

    `run(name, seconds)` is one of them. What a stage leaves of its share of the time the later ones
    have, and where it takes more they have less; one without time left is skipped.
    """
    left = sum(shares.values())
    for name, share in shares.items():
        seconds = (ends - clock()) * share / left
        left -= share
        if seconds <= 0:
            done(name, _nothing() | {"skipped": "no time was left"})
            continue
        try:
            content = run(name, seconds)
        except Exception as error:
            text = _short(f"{type(error).__name__}: {error}")
            content = _nothing() | {"errors": {"the stage as a whole": text}}
        done(name, content)


def named(piece: object) -> str:
    """A piece of work in a list; a tuple by its items."""
    return ", ".join(map(str, piece)) if type(piece) is tuple else str(piece)


def _nothing() -> Content:
    """Of a stage that did not run."""
    return {"skipped": None, "errors": {}, "left_out": [], "result": {}, "seconds": 0.0}


def _short(text: str) -> str:
    return text if len(text) <= _TEXT else text[:_TEXT] + " ..."
