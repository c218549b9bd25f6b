# SPDX-License-Identifier: Apache-2.0
"""The engine's thread: tickets are admitted, run a quantum at a time, and leave.

Invariant: every ticket that was accepted ends exactly once, by an answer or an error: also where
its client is gone, its time is over, memory is short, or this thread dies. Nothing is computed for
a ticket that is gone, from the next border of a quantum on.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

from geojax.bicache.engine import Engine
from geojax.serve.errors import ApiError
from geojax.serve.metrics import Metrics
from geojax.serve.options import Pace
from geojax.serve.rows import Rows
from geojax.serve.ticket import Ticket
from geojax.serve.waiting import Waiting

log = logging.getLogger("geojax.serve")
State = Literal["warming", "ready", "draining", "dead", "stopped"]
Warm = Callable[[Callable[[str], None]], None]
"""A warm-up, which says how far it is."""
_GATHER_SECONDS, _GAP_SECONDS = 0.02, 0.001
_BACK_SHARE, _MOST_BACK_SECONDS = 0.05, 0.1
"""After answers, until their clients are not expected any more: of an answer's time; at most."""
_DEAD = "the engine has stopped; this server answers nothing any more"


class _NotWantedError(Exception):
    """The server stops before it is warm."""


class EngineLoop:
    """One engine, and those who wait for it."""

    def __init__(self, engine: Engine, pace: Pace, metrics: Metrics):
        self.engine, self.pace, self.metrics = engine, pace, metrics
        self.state: State = "warming"
        self.warmed = ""
        """How far the warm-up is."""
        self.waiting = Waiting(pace.queue, pace.aging_seconds)
        self.arriving = 0
        """Requests that are being read."""
        self._wake = threading.Condition()
        self._rows = Rows(engine, pace, metrics, self.waiting, self._wake)
        self._busy_since: float | None = None
        self._some_left = False
        """Whether a ticket left at the last border."""
        self._left, self._crowd = -math.inf, 0
        """When one last did, and how many had run together until then."""
        self._thread = threading.Thread(target=self._main, name="geojax engine", daemon=True)
        self._warm: Warm | None = None
        metrics.watch(self)

    # From any thread.

    def start(self, warm: Warm | None = None) -> None:
        """`warm` runs first, on the engine's thread, and says how far it is."""
        self._warm = warm
        self._thread.start()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """All of them, or none: ApiError 503 where nothing is accepted now, 429 where as many of
        this tenant wait as may."""
        with self._wake:
            if self.state != "ready":
                raise self._not_ready()
            name = tickets[0].tenant.name
            if self.waiting.room(name) < len(tickets):
                raise ApiError(
                    429,
                    f"{self.waiting.count(name)} answers of yours wait already, and "
                    f"{self.pace.queue} may; try again later",
                    "queue_full",
                    retry_seconds=self._seconds_ahead(name),
                )
            for ticket in tickets:
                self.waiting.add(ticket)
            self._wake.notify()

    def nudge(self) -> None:
        """Something changed: a ticket is gone."""
        with self._wake:
            self._wake.notify()

    def drain(self) -> bool:
        """Accept nothing more; what was accepted is answered. Whether something may have been: not
        where it was still warming up."""
        with self._wake:
            warmed = self.state != "warming"
            if self.state in ("warming", "ready"):
                self.state = "draining"
            self._wake.notify()
        return warmed

    def stop(self, seconds: float) -> None:
        """End the thread at the next border, and wait so long for it; who is left is told."""
        with self._wake:
            if self.state != "dead":
                self.state = "stopped"
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer."""
        with self._wake:
            return not (self.waiting or self._rows)

    @property
    def running(self) -> int:
        return len(self._rows)

    def stuck_for(self) -> float:
        """Seconds that the present call of the engine has taken."""
        began = self._busy_since
        return time.monotonic() - began if began is not None else 0.0

    @property
    def alive(self) -> bool:
        return self.state != "dead" and self._thread.is_alive()

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive()

    def _not_ready(self) -> ApiError:
        why = {
            "warming": "the server is warming up; try again soon",
            "draining": "the server is stopping and accepts nothing more",
            "stopped": "the server is stopping and accepts nothing more",
            "dead": _DEAD,
        }
        code = "engine_dead" if self.state == "dead" else "not_ready"
        return ApiError(503, why[self.state], code, retry_seconds=5)

    def _seconds_ahead(self, name: str) -> float:
        """About how long the tenant's queue takes."""
        rounds = 1 + self.waiting.count(name) / self.pace.rows
        return min(rounds * self._rows.mean_seconds, 60.0)

    # On the engine's thread.

    def _main(self) -> None:
        try:
            if self._warm:
                with suppress(_NotWantedError):
                    self._warm(self._say_warmed)
            with self._wake:
                if self.state == "warming":
                    self.state = "ready"
            while self._cycle():
                pass
        except BaseException:
            log.exception("the engine's thread died")
            with self._wake:
                self.state = "dead"
        finally:
            self._busy_since = None
            with self._wake:
                left = [*self.waiting, *self._rows]
                for ticket in list(self.waiting):
                    self.waiting.drop(ticket)
                self._rows.clear()
            error = self._not_ready()
            for ticket in left:
                ticket.end(error=error)

    def _say_warmed(self, text: str) -> None:
        self.warmed = text
        if self.state != "warming":
            raise _NotWantedError

    def _cycle(self) -> bool:
        """One quantum, or a wait for somebody; False: it is time to end."""
        with self._wake:
            while self.state != "stopped" and not (self.waiting or self._rows):
                if self.state == "draining":
                    return False
                self._wake.wait(timeout=1.0)
            if self.state == "stopped":
                return False
        if self._some_left or not self._rows:
            self._drop_gone()
            self._gather()
        self._busy_since = time.monotonic()
        self._drop_gone()
        self._rows.admit()
        running = len(self._rows)
        self._rows.run()
        self._some_left = len(self._rows) < running
        if self._some_left:
            self._left, self._crowd = time.monotonic(), running
        self._busy_since = None
        return True

    def _gather(self) -> None:
        """Wait a moment for those that come together: begun together, they refresh together.

        Clients whose answers have ended may be about to ask again: where half of the rows or more
        were theirs, they are given longer."""
        end, before = time.monotonic() + _GATHER_SECONDS, -1
        back = self._left + min(_BACK_SHARE * self._rows.mean_seconds, _MOST_BACK_SECONDS)
        if 2 * len(self._rows) > self._crowd or self.state != "ready":
            back = -math.inf
        while (here := len(self.waiting) + len(self._rows)) < self.pace.rows:
            now = time.monotonic()
            awaited = now < back and here < self._crowd
            more = now < end and (self.arriving or len(self.waiting) != before)
            if not (awaited or more):
                return
            before = len(self.waiting)
            time.sleep(_GAP_SECONDS)

    def _drop_gone(self) -> None:
        """Out of wherever they are."""
        now = time.monotonic()
        with self._wake:
            waiting, running = list(self.waiting), list(self._rows)
        for ticket in (*waiting, *running):
            late = now > ticket.deadline
            if not (ticket.gone or late):
                continue
            if ticket in running:
                self._rows.leave(ticket)
            else:
                with self._wake:
                    self.waiting.drop(ticket)
            error = ApiError(504, "the request's time is over", "deadline_exceeded")
            ticket.end(error=None if ticket.gone else error)
