# SPDX-License-Identifier: Apache-2.0
"""Where the seconds of a slice go, where it is a process of its own.

Invariant: what a slice does is a part of a round (geojax.geomesh.timeline), or busy: starting,
compiling, evaluating, saving. Only its own seconds are counted here; waits follow from those of all
slices.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from geojax.geomesh.clock import modelled_part
from geojax.geomesh.timeline import Part
from geojax.geomesh.worker import Worker


@dataclass
class Accounts:
    """Of the round that is open."""

    outer_seconds: float = 0.0
    """Taking the last result in, and making this round's message."""
    busy_seconds: float = 0.0
    behind_steps: int = 0
    """Of this round, given to the slice while the message before was under way."""
    behind_seconds: float = 0.0
    """What these took by then."""

    @contextmanager
    def outer(self) -> Generator[None]:
        """What is done in here is of the outer step."""
        started = time.perf_counter()
        yield
        self.outer_seconds += time.perf_counter() - started

    @contextmanager
    def busy(self) -> Generator[None]:
        """What is done in here is no part of a round."""
        started = time.perf_counter()
        yield
        self.busy_seconds += time.perf_counter() - started

    def close(
        self,
        worker: Worker,
        ahead_steps: int,
        sending_seconds: float,
        modelled_seconds: float | None,
    ) -> Part:
        """The round is over: the slice's part in it, after which it has done, or does before it
        waits, `ahead_steps` of the next one. `modelled_seconds`: of an exchange, where time is
        modelled."""
        ahead_seconds = worker.progress.compute_seconds if ahead_steps else 0.0
        part = Part(
            worker.ended.compute_seconds - self.behind_seconds,
            ahead_seconds,
            self.outer_seconds,
            sending_seconds,
        )
        if modelled_seconds is not None:
            part = modelled_part(worker.work, self.behind_steps, ahead_steps, modelled_seconds)
        self.outer_seconds = self.busy_seconds = 0.0
        self.behind_steps, self.behind_seconds = ahead_steps, ahead_seconds
        return part

    def drop(self) -> None:
        """The work that the slice holds is lost."""
        self.outer_seconds = self.behind_seconds = 0.0
        self.behind_steps = 0
