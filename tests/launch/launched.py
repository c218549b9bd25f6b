# SPDX-License-Identifier: Apache-2.0
"""Runs that are started as a user starts them, watched by tests."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from geojax.track.metrics import read_records

PATIENCE_SECONDS = 600


def hashes(folder: Path) -> list[str]:
    """Of the shared parameters, by round."""
    return [r["hash"] for r in read_records(folder / "metrics.jsonl") if r["kind"] == "round"]


class Launch:
    """One launcher, and what it says."""

    def __init__(self, folder: Path, *args: str, devices: int = 1):
        flags = f"--xla_force_host_platform_device_count={devices}"
        environment = os.environ | {
            "GEOJAX_CACHE": str(folder.parent / "cache"),
            "XLA_FLAGS": f"{flags} --xla_backend_optimization_level=0",
            "JAX_PLATFORMS": "cpu",
        }
        # XLA on CPU gives other bits under another affinity.
        core = min(os.sched_getaffinity(0))
        pinned = (
            f"import os, sys; os.sched_setaffinity(0, {{{core}}}); "
            "os.execv(sys.executable, [sys.executable, '-m', 'geojax', *sys.argv[1:]])"
        )
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", pinned, *args],
            cwd=folder.parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever became of it, nothing is left behind."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE_SECONDS)

    def _read(self) -> None:
        with self.process.stdout, self.folder.with_suffix(".log").open("a") as log:
            for line in self.process.stdout:
                self.lines.append(line)
                print(f"{time.time():.1f} {line}", end="", file=log, flush=True)

    def said(self) -> str:
        return "".join(self.lines)

    def pid(self, name: str) -> int:
        return int(re.findall(rf"^{name} starts as process (\d+)", self.said(), re.M)[-1])

    @property
    def round(self) -> int:
        path = self.folder / "journal.jsonl"
        return path.read_bytes().count(b'"kind": "round"') if path.exists() else 0

    def until_round(self, number: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.round < number:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def finish(self, code: int = 0) -> None:
        found = self.process.wait(PATIENCE_SECONDS)
        self.reader.join()
        assert found == code, self.said()
