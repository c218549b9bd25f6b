# SPDX-License-Identifier: Apache-2.0
"""Ending a process that hangs, so that whatever started it can start it again.

Invariant: only silence counts. The limit follows the run's own pace, and time in which this process
could not run at all (stopped, or starved of its core) is not held against it. A call that never
gives Python's lock back is not seen: the watching thread cannot run either.
"""

import faulthandler
import os
import threading
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from geojax.config import WatchdogConfig

EXIT_CODE = os.EX_SOFTWARE
"""Of a process that ends itself, unsaved, for a hang of its own or of others: start it again. (One
that was asked to stop, and has saved, ends with EX_TEMPFAIL.)"""
_RECENT = 100
"""Intervals from which the slowest is taken."""
_WRITE_SECONDS = 10.0
"""Time for writing the stacks; a dead disk or pipe must not keep the process."""


class Watchdog:
    """Watches from a thread while its `with` block runs; without `limit.enabled`, does nothing.

    On a hang the stacks of all threads go to stderr and to `folder`/hang-TIME-PID.txt, and the
    process ends with EXIT_CODE, without any clean-up.
    """

    def __init__(self, limit: WatchdogConfig, folder: Path):
        self._limit = limit
        self._folder = folder
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._intervals: deque[float] = deque(maxlen=_RECENT)
        self._beaten = False
        self._pauses = 0
        self._last = 0.0
        self._what = "the start"

    def __enter__(self) -> Self:
        self._last = time.monotonic()
        if self._limit.enabled:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def beat(self, what: str) -> None:
        """A sign of life: `what` has just been done."""
        with self._lock:
            now = time.monotonic()
            if self._beaten and not self._pauses:  # the time to the first has compilation in it
                self._intervals.append(now - self._last)
            self._last, self._what, self._beaten = now, what, True

    @contextmanager
    def pause(self) -> Generator[None]:
        """No silence is counted inside: for phases of unknown length. Pauses can nest."""
        with self._lock:
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                self._last = time.monotonic()

    def _limit_seconds(self) -> float:
        if not self._intervals:
            return self._limit.first_seconds
        return max(self._limit.minimum_seconds, self._limit.factor * max(self._intervals))

    def _watch(self) -> None:
        poll = min(self._limit.minimum_seconds / 20, 5.0)
        before = time.monotonic()
        while not self._stop.wait(poll):
            with self._lock:
                now = time.monotonic()
                late = now - before - poll
                if late > poll + 0.5:
                    self._last = min(self._last + late, now)
                silence, limit = now - self._last, self._limit_seconds()
                hangs = silence > limit and not self._pauses
            if hangs:
                self._end(silence, limit)
            before = now

    def _end(self, silence: float, limit: float) -> None:
        rescue = threading.Timer(_WRITE_SECONDS, os._exit, (EXIT_CODE,))
        rescue.daemon = True
        rescue.start()
        text = (
            f"geojax: no sign of life for {silence:.1f} s since {self._what} (limit {limit:.1f} s)"
            f"; process {os.getpid()} ends with exit code {EXIT_CODE}\n"
        )
        stamp = time.strftime("%Y%m%dT%H%M%S")
        try:
            os.write(2, text.encode())
            faulthandler.dump_traceback(file=2, all_threads=True)
            with (self._folder / f"hang-{stamp}-{os.getpid()}.txt").open("w") as file:
                file.write(text)
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
                os.fsync(file.fileno())
        finally:
            os._exit(EXIT_CODE)
