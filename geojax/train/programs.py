# SPDX-License-Identifier: Apache-2.0
"""The programs of one task on one set of devices, compiled in the background."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from geojax.meshes.strategy import Strategy
from geojax.train.losses import Losses
from geojax.train.program import Program, Task


class Programs:
    """The programs of one task on one set of devices, compiled at most once each.

    The least recently asked for is dropped where there are more than `limit`: by the order of
    calls alone, so that all processes of a cluster know of the same. What is still being compiled
    then is known of to its end.
    """

    def __init__(self, task: Task, devices: Sequence[jax.Device], steps: int, limit: int = 8):
        """`steps`: length of the chunks that programs are compiled for."""
        self.task, self.devices, self.steps, self._limit = task, tuple(devices), steps, limit
        self._programs: OrderedDict[Strategy, Future[Program]] = OrderedDict()
        self._running: dict[Strategy, Future[Program]] = {}
        self._losses = Losses()
        self._lock = threading.Lock()
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compile")

    def get(self, strategy: Strategy) -> Program:
        """The compiled program; waits where it is being compiled, raises what compiling raised."""
        return self.prefetch(strategy).result()

    def prefetch(self, strategy: Strategy) -> "Future[Program]":
        """Compile in the background, beside whatever runs; what failed is tried again."""
        with self._lock:
            self._running = {s: f for s, f in self._running.items() if not f.done()}
            found = self._programs.get(strategy) or self._running.get(strategy)
            if found is None or (found.done() and found.exception()):
                found = self._running[strategy] = self._compiler.submit(self._compile, strategy)
            self._programs[strategy] = found
            self._programs.move_to_end(strategy)
            while len(self._programs) > self._limit:
                self._programs.popitem(last=False)
            return found

    def forget(self, strategy: Strategy) -> None:
        """Ask anew, next time."""
        with self._lock:
            self._programs.pop(strategy, None)

    def found(self) -> dict[Strategy, Exception | bool]:
        """Of all that were asked for: whether it is compiled, or what compiling raised."""
        with self._lock:
            programs = dict(self._programs)
        found: dict[Strategy, Exception | bool] = {}
        for strategy, future in programs.items():
            error = future.exception() if future.done() else None
            found[strategy] = error if isinstance(error, Exception) else future.done()
        return found

    @property
    def busy(self) -> bool:
        """Whether something is being compiled."""
        with self._lock:
            return not all(future.done() for future in self._running.values())

    def close(self) -> None:
        """Drop what waits to be compiled."""
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def _compile(self, strategy: Strategy) -> Program:
        program = Program(self.task, strategy, self.devices, losses=self._losses)
        program.compile_all(self.steps)
        return program
