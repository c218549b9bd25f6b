# SPDX-License-Identifier: Apache-2.0
"""The engine's thread: tickets are admitted, run a quantum at a time, and leave.

Invariant: every ticket that was accepted ends exactly once, by an answer or an error: also where
its client is gone, its time is over, memory is short, or this thread dies. Nothing is computed for
a ticket that is gone, from the next border of a quantum on.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

import numpy as np
from jaxtyping import Int32

from geojax.bicache.engine import Engine, Slot
from geojax.bicache.pages import NoPagesError, QuotaError
from geojax.config import ConfigError
from geojax.serve.errors import ApiError
from geojax.serve.metrics import Metrics
from geojax.serve.options import Pace
from geojax.serve.prefix import segments_of
from geojax.serve.quantum import Quantum
from geojax.serve.ticket import Ticket, View
from geojax.serve.waiting import Waiting

log = logging.getLogger("geojax.serve")
State = Literal["warming", "ready", "draining", "dead", "stopped"]
Warm = Callable[[Callable[[str], None]], None]
"""A warm-up, which says how far it is."""
_GATHER_SECONDS, _GAP_SECONDS = 0.02, 0.001
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
        self._running: dict[Ticket, Slot] = {}
        self._growing: list[Ticket] = []
        self.arriving = 0
        """Requests that are being read."""
        self._wake = threading.Condition()
        self._quantum = Quantum(pace.quantum_seconds, max(engine.policy.every, 16))
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._main, name="geojax engine", daemon=True)
        self._warm: Warm | None = None
        self._mean_seconds = 1.0
        """Of a ticket, from its admission to its end, of late."""
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

    def drain(self) -> None:
        """Accept nothing more; what was accepted is answered."""
        with self._wake:
            if self.state in ("warming", "ready"):
                self.state = "draining"
            self._wake.notify()

    def stop(self, seconds: float = 10.0) -> None:
        """End the thread at the next border; who is left is told."""
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
            return not (self.waiting or self._running or self._growing)

    @property
    def running(self) -> int:
        return len(self._running) + len(self._growing)

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
        return min(rounds * self._mean_seconds, 60.0)

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
                left = [*self.waiting, *self._running, *self._growing]
                for ticket in list(self.waiting):
                    self.waiting.drop(ticket)
                self._running.clear()
                self._growing.clear()
            error = self._not_ready()
            for ticket in left:
                self._end(ticket, error=error)

    def _say_warmed(self, text: str) -> None:
        self.warmed = text
        if self.state != "warming":
            raise _NotWantedError

    def _cycle(self) -> bool:
        """One quantum, or a wait for somebody; False: it is time to end."""
        with self._wake:
            while self.state != "stopped" and not (self.waiting or self._running or self._growing):
                if self.state == "draining":
                    return False
                self._wake.wait(timeout=1.0)
            if self.state == "stopped":
                return False
        if not (self._running or self._growing):
            self._gather()
        self._busy_since = time.monotonic()
        self._drop_gone()
        self._admit()
        if self._running:
            self._run()
        elif self.waiting or self._growing:
            time.sleep(0.001)  # whoever is next is blocked for a moment
        self._busy_since = None
        return True

    def _gather(self) -> None:
        """Wait a moment for those that come together: begun together, they refresh together."""
        end, before = time.monotonic() + _GATHER_SECONDS, -1
        while time.monotonic() < end and len(self.waiting) < self.pace.rows:
            if not self.arriving and len(self.waiting) == before:
                return
            before = len(self.waiting)
            time.sleep(_GAP_SECONDS)

    def _drop_gone(self) -> None:
        now = time.monotonic()
        with self._wake:
            every = [*self.waiting, *self._running, *self._growing]
        for ticket in every:
            late = now > ticket.deadline
            if ticket.gone or late:
                error = ApiError(504, "the request's time is over", "deadline_exceeded")
                self._leave(ticket)
                self._end(ticket, error=None if ticket.gone else error)

    def _leave(self, ticket: Ticket) -> None:
        """Out of wherever it is; its memory goes back."""
        slot = self._running.pop(ticket, None)
        if slot:
            self.engine.leave(slot)
        elif ticket in self._growing:
            self._growing.remove(ticket)
        else:
            with self._wake:
                self.waiting.drop(ticket)

    def _admit(self) -> None:
        """As many as there are rows and memory for, those that grow first."""
        began, skipped = time.monotonic(), set[str]()
        while len(self._running) < self.pace.rows:
            now = time.monotonic()
            if self._running and now - began > self.pace.quantum_seconds:
                return  # building prefixes is time of those that run
            with self._wake:
                growing = bool(self._growing)
                ticket = self._growing[0] if growing else self.waiting.next(now, skipped)
            if ticket is None:
                return
            try:
                slot = self._enter(ticket, alone=not self._running)
            except QuotaError:
                if growing:
                    return
                skipped.add(ticket.tenant.name)
                continue
            except NoPagesError:
                ticket.blocked = now if ticket.blocked is None else ticket.blocked
                if growing or now - ticket.blocked > self.pace.patience_seconds:
                    return  # nobody passes it any more
                skipped.add(ticket.tenant.name)
                continue
            except ConfigError as error:
                self._leave(ticket)
                self._end(ticket, error=ApiError(400, str(error)))
                continue
            ticket.blocked = None
            with self._wake:
                if growing:
                    self._growing.remove(ticket)
                    self.waiting.charge(ticket)
                else:
                    self.waiting.take(ticket)
                self._running[ticket] = slot

    def _enter(self, ticket: Ticket, alone: bool) -> Slot:
        """Its slot; a prefix that memory is too small for is left out."""
        engine, ask = self.engine, ticket.ask
        new = ticket.segments is None
        if ticket.segments is None:
            request = ticket.request(engine.sampler.mask_id)
            ticket.segments = (
                ()
                if ask.exact
                else segments_of(engine, request, ticket.tenant.salt, ask.prefix_ends)
            )
        built = engine.store.counts.built_rows
        try:
            slot = engine.admit(ticket.job(engine.sampler.mask_id))
        except (ConfigError, NoPagesError) as error:
            fatal = isinstance(error, ConfigError) or alone
            if not (fatal and ticket.segments):
                if new:
                    ticket.segments = None  # more may be stored when it is asked again
                raise
            ticket.segments = ()
            slot = engine.admit(ticket.job(engine.sampler.mask_id))
        if ticket.admitted is None:
            shared = sum(entry.rows for entry in slot.chain)
            ticket.cached = shared - (engine.store.counts.built_rows - built)
            ticket.admitted = time.monotonic()
            self.metrics.on_admitted(ticket)
        ticket.depth = slot.depth if slot.chain else 0
        return slot

    def _run(self) -> None:
        tickets = list(self._running)
        slots = [self._running[ticket] for ticket in tickets]
        shape = self.engine.shape(slots)
        before = [int(slot.canvas.steps[0]) for slot in slots]
        began = time.monotonic()
        try:
            full = len(tickets) >= self.pace.rows
            steps = self._quantum.steps(shape, full, any(t.ask.watched for t in tickets))
            self.engine.run(slots, steps)
        except NoPagesError:
            # A prefix that stopped being shared found no memory of its own.
            error = ApiError(503, "memory is short; try again", "no_memory", retry_seconds=1)
            for ticket in tickets:
                self._leave(ticket)
                self._end(ticket, error=error)
            return
        took = [int(s.canvas.steps[0]) - b for s, b in zip(slots, before, strict=True)]
        self._quantum.learn(shape, max(took), time.monotonic() - began)
        self.metrics.on_quantum(slots, took, time.monotonic() - began)
        for ticket, slot in zip(tickets, slots, strict=True):
            self._show(ticket, slot)

    def _show(self, ticket: Ticket, slot: Slot) -> None:
        """What is certain now; a slot that is done leaves."""
        old, steps = ticket.view, ticket.steps + int(slot.canvas.steps[0])
        if slot.broken:
            self._leave(ticket)
            message = "the model's logits are not finite; this answer cannot be given"
            self._end(ticket, error=ApiError(500, message, "broken_answer"))
            return
        there, ended = old.tokens[: old.before], False
        if slot.done:
            answer = self.engine.result(slot)
            new, ended = answer.new, answer.ended
        else:
            new = self._certain(slot)
        tokens = np.concatenate([there, new]).astype(np.int32)
        if ticket.first is None and len(tokens):
            ticket.first = time.monotonic()
        begin, end = int(slot.rules.begin[0]), int(slot.rules.end[0])
        canvas = slot.canvas.tokens[0, begin:end]
        if not slot.done:
            ticket.view = old._replace(tokens=tokens, canvas=canvas, steps=steps)
            self._ring(ticket)
            return
        self._leave(ticket)
        ticket.steps = steps
        view = View(tokens, canvas, old.before, steps)
        over = ended or len(tokens) >= ticket.ask.tokens or len(ticket.ask.suffix) > 0
        if over:
            self._end(ticket, view, finish="stop" if ended else "length")
            return
        ticket.view = view._replace(canvas=canvas[:0], before=len(tokens))
        with self._wake:
            self._growing.append(ticket)
        self._ring(ticket)

    def _certain(self, slot: Slot) -> Int32[np.ndarray, " n"]:
        """New tokens before the first mask, or before the end that was already found."""
        begin, end = int(slot.rules.begin[0]), int(slot.rules.end[0])
        row = slot.canvas.tokens[0, begin:end]
        stops = row == self.engine.sampler.mask_id
        if slot.rules.ends[0]:
            stops |= np.isin(row, self.engine.sampler.end_ids)
        return row[: int(stops.argmax())] if stops.any() else row

    def _end(
        self,
        ticket: Ticket,
        view: View | None = None,
        finish: str | None = None,
        error: ApiError | None = None,
    ) -> None:
        if finish is None and error is None:
            finish = "abort"
        if ticket.admitted is not None:
            self._mean_seconds += 0.1 * (time.monotonic() - ticket.admitted - self._mean_seconds)
        ticket.view = (view or ticket.view)._replace(finish=finish, error=error)
        self._ring(ticket)

    def _ring(self, ticket: Ticket) -> None:
        try:
            ticket.wake()
        except RuntimeError:  # its event loop has ended
            ticket.gone = True
