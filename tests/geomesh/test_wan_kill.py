# SPDX-License-Identifier: Apache-2.0
"""Real processes, without a model, that signals hit at random moments: the run goes on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("counting_replica.py")
PATIENCE_SECONDS = 120
SLICES = 4


class Fleet:
    """A coordinator and slices, each a process."""

    def __init__(self, folder: Path, rounds: int):
        self.folder, self.rounds, self.port = folder, rounds, 0
        self.processes: dict[str, subprocess.Popen] = {}
        self.start("coordinator")
        self.until(lambda: (folder / "address").exists() and self.address())
        self.port = int(self.address().rsplit(":", 1)[1])
        for index in range(SLICES):
            self.start(str(index))

    def address(self) -> str:
        return (self.folder / "address").read_text()

    def start(self, name: str) -> None:
        if name == "coordinator":
            args = [SLICES, self.port, self.folder]
        else:
            args = [name, SLICES, self.rounds, 0.5, self.address(), self.folder / f"{name}.log"]
        with (self.folder / f"{name}.err").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, str(PROGRAM), *map(str, args)], stdout=log, stderr=log
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait()

    def entries(self) -> list[dict]:
        path = self.folder / "journal.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    @property
    def round(self) -> int:
        numbers = [e["round"] for e in self.entries() if e["kind"] != "start"]
        return numbers[-1] if numbers else 0

    def until(self, reached) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)

    def said(self) -> str:
        paths = [*self.folder.glob("*.log"), *self.folder.glob("*.err")]
        return "\n".join(f"{p.name}: {p.read_text()[-2000:]}" for p in paths)

    def finish(self) -> list[dict]:
        for name, process in self.processes.items():
            self.until(lambda process=process: process.poll() is not None)
            assert process.returncode == 0, (name, self.said())
        return [json.loads((self.folder / f"{i}.json").read_text()) for i in range(SLICES)]


@contextmanager
def fleet_of(folder: Path, rounds: int) -> Generator[Fleet]:
    fleet = Fleet(folder, rounds)
    try:
        yield fleet
    finally:
        for process in fleet.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def assert_right(fleet: Fleet, results: list[dict]) -> None:
    assert len({r["digest"] for r in results}) == 1
    assert set(results[0]["counts"]) == {1}, fleet.said()
    chosen = [e for e in fleet.entries() if e["kind"] == "round"]
    assert all(len(e["merged"]) > SLICES / 2 for e in chosen)


def test_kills_and_stops_of_the_first_slice_and_the_coordinator(tmp_path):
    with fleet_of(tmp_path, rounds=60) as fleet:
        fleet.until(lambda: fleet.round >= 3)
        fleet.signal("0", signal.SIGKILL)
        left = fleet.round
        fleet.until(lambda: fleet.round >= left + 4)
        fleet.start("0")
        fleet.signal("2", signal.SIGSTOP)
        fleet.until(lambda: fleet.round >= left + 10)
        fleet.signal("coordinator", signal.SIGKILL)
        fleet.signal("2", signal.SIGCONT)
        os.sched_yield()
        fleet.start("coordinator")
        assert_right(fleet, fleet.finish())
        merged = [e["merged"] for e in fleet.entries() if e["kind"] == "round"]
        assert SLICES in map(len, merged[-25:])  # all are back
        assert any(0 not in m for m in merged)
        assert any(2 not in m for m in merged)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["0", "2", "coordinator"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_twenty_random_moments(tmp_path, victim, how):
    seed = random.randrange(2**32)
    print("seed", seed)  # shown where it fails
    rng = random.Random(seed)
    with fleet_of(tmp_path, rounds=300) as fleet:
        for _ in range(20):
            goal = fleet.round + rng.randint(1, 8)
            fleet.until(lambda goal=goal: fleet.round >= goal)
            time.sleep(rng.uniform(0, 0.2))
            fleet.signal(victim, how)
            time.sleep(rng.uniform(0.1, 2.5))
            if how == signal.SIGKILL:
                fleet.start(victim)
            else:
                fleet.signal(victim, signal.SIGCONT)
        assert fleet.round < 300
        assert_right(fleet, fleet.finish())
