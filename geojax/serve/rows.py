# SPDX-License-Identifier: Apache-2.0
"""Tickets that run: each with its slot of the engine, or between two canvases.

Invariant: a ticket that leaves has given back its memory, however it ends; a ticket whose memory is
not free now is passed by others for a while, and then by nobody. Used by the engine's thread alone,
apart from what takes `lock`.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int32

from geojax.bicache.engine import Engine, Slot
from geojax.bicache.pages import CrowdedError, NoPagesError, QuotaError
from geojax.config import ConfigError
from geojax.serve.errors import ApiError
from geojax.serve.metrics import Metrics
from geojax.serve.options import Pace
from geojax.serve.prefix import segments_of
from geojax.serve.quantum import Quantum
from geojax.serve.ticket import Ticket, View
from geojax.serve.waiting import Waiting

log = logging.getLogger("geojax.serve")


class Rows:
    """Of one engine."""

    def __init__(
        self,
        engine: Engine,
        pace: Pace,
        metrics: Metrics,
        waiting: Waiting,
        lock: threading.Condition,
    ):
        """`lock` is held where tickets go from one place to another."""
        self.engine, self.pace, self.metrics = engine, pace, metrics
        self.mean_seconds = 1.0
        """Of a ticket, from its admission to its end, of late."""
        self._waiting, self._lock = waiting, lock
        self._running: dict[Ticket, Slot] = {}
        self._growing: list[Ticket] = []
        self._quantum = Quantum(pace.quantum_seconds, max(engine.policy.every, 16))

    def __len__(self) -> int:
        return len(self._running) + len(self._growing)

    def __iter__(self) -> Iterator[Ticket]:
        yield from self._running
        yield from self._growing

    def clear(self) -> None:
        """The engine is lost, and all that it held."""
        self._running.clear()
        self._growing.clear()

    def leave(self, ticket: Ticket) -> None:
        """Its memory goes back."""
        slot = self._running.get(ticket)
        if slot:
            self.engine.leave(slot)
        with self._lock:
            if slot:
                del self._running[ticket]
            else:
                self._growing.remove(ticket)

    def admit(self) -> None:
        """As many as there are rows and memory for, whoever is next: one that waits, or one that
        wants its next canvas."""
        began, skipped = time.monotonic(), set[str]()
        while len(self._running) < self.pace.rows:
            now = time.monotonic()
            if self._running and now - began > self.pace.quantum_seconds:
                return  # building prefixes is time of those that run
            with self._lock:
                ticket = self._waiting.next(now, skipped, self._growing)
            if ticket is None:
                return
            try:
                slot = self._enter(ticket, alone=not self._running)
            except QuotaError:
                skipped.add(ticket.tenant.name)
                continue
            except NoPagesError as error:
                if not self._running or isinstance(error, CrowdedError):
                    # Nobody's end will free a page for it.
                    self._take_away(ticket)
                    message = f"memory is short: {error}"
                    ticket.end(error=ApiError(503, message, "no_memory", retry_seconds=5))
                    continue
                ticket.blocked = now if ticket.blocked is None else ticket.blocked
                if now - ticket.blocked > self.pace.patience_seconds:
                    return  # nobody passes it any more
                skipped.add(ticket.tenant.name)
                continue
            except ConfigError as error:
                self._take_away(ticket)
                ticket.end(error=ApiError(400, str(error)))
                continue
            except Exception:
                self._tell([ticket])
                self._take_away(ticket)
                continue
            ticket.blocked = None
            with self._lock:
                if ticket in self._growing:
                    self._growing.remove(ticket)
                    self._waiting.charge(ticket)
                else:
                    self._waiting.take(ticket)
                self._running[ticket] = slot

    def _take_away(self, ticket: Ticket) -> None:
        """Out of those that have no row."""
        with self._lock:
            if ticket in self._growing:
                self._growing.remove(ticket)
            else:
                self._waiting.drop(ticket)

    def _enter(self, ticket: Ticket, alone: bool) -> Slot:
        """Its slot; a prefix that memory is too small for is left out."""
        engine, ask = self.engine, ticket.ask
        if ticket.segments is None:
            request = ticket.request(engine.sampler.mask_id)
            ticket.segments = (
                ()
                if ask.exact
                else segments_of(engine, request, ticket.tenant.salt, ask.prefix_ends)
            )
        built = engine.store.counts.built_rows
        try:
            try:
                slot = engine.admit(ticket.job(engine.sampler.mask_id))
            except (ConfigError, NoPagesError) as error:
                fatal = isinstance(error, ConfigError | CrowdedError) or alone
                if not (fatal and ticket.segments):
                    raise
                ticket.segments = ()
                slot = engine.admit(ticket.job(engine.sampler.mask_id))
        finally:
            ticket.built += engine.store.counts.built_rows - built
        if ticket.admitted is None:
            shared = sum(entry.rows for entry in slot.chain)
            ticket.cached = max(shared - ticket.built, 0)
            ticket.admitted = time.monotonic()
            self.metrics.on_admitted(ticket)
        return slot

    def run(self) -> None:
        """A quantum of all that have slots; a moment's wait where nobody has."""
        tickets = list(self._running)
        if not tickets:
            time.sleep(0.001)  # whoever is next is blocked for a moment
            return
        slots = [self._running[ticket] for ticket in tickets]
        shape = self.engine.shapes.of(slots)
        before = [int(slot.canvas.steps[0]) for slot in slots]
        began = time.monotonic()
        steps = self._quantum.steps(shape, any(t.ask.watched for t in tickets))
        try:
            self.engine.run(slots, steps)
        except Exception:
            self._tell(tickets)
            for ticket in tickets:
                self.leave(ticket)
            return
        took = [int(s.canvas.steps[0]) - b for s, b in zip(slots, before, strict=True)]
        self._quantum.learn(shape, max(took), time.monotonic() - began)
        self.metrics.on_quantum(sum(took), time.monotonic() - began)
        for ticket, slot in zip(tickets, slots, strict=True):
            self._show(ticket, slot)

    def _tell(self, tickets: Sequence[Ticket]) -> None:
        """Of an error in a call for them alone, as where the device's memory is too small for its
        size; others go on. Raises where the engine can compute nothing any more."""
        log.exception("a call of the engine failed; who was in it is told")
        self.engine.probe()
        for ticket in tickets:
            ticket.end(error=ApiError(500, "the engine could not compute this answer", "failed"))

    def _show(self, ticket: Ticket, slot: Slot) -> None:
        """What is certain now; a slot that is done leaves."""
        old, steps = ticket.view, ticket.steps + int(slot.canvas.steps[0])
        ticket.depth = slot.depth if slot.chain else 0
        if slot.broken:
            self.leave(ticket)
            message = "the model's logits are not finite; this answer cannot be given"
            ticket.end(error=ApiError(500, message, "broken_answer"))
            return
        there, ended = old.tokens[: old.before], False
        if slot.done:
            answer = self.engine.result(slot)
            new, ended = answer.new, answer.ended
        else:
            new = self._certain(slot)
        tokens = np.concatenate([there, new]).astype(np.int32)
        begin, end = int(slot.rules.begin[0]), int(slot.rules.end[0])
        canvas = slot.canvas.tokens[0, begin:end]
        if not slot.done:
            ticket.show(old._replace(tokens=tokens, canvas=canvas, steps=steps))
            return
        self.leave(ticket)
        ticket.steps = steps
        view = View(tokens, canvas, old.before, steps)
        over = ended or len(tokens) >= ticket.ask.tokens or len(ticket.ask.suffix) > 0
        if over:
            assert ticket.admitted is not None, "it ran"
            self.mean_seconds += 0.1 * (time.monotonic() - ticket.admitted - self.mean_seconds)
            ticket.end("stop" if ended else "length", view=view)
            return
        with self._lock:
            self._growing.append(ticket)
        ticket.show(view._replace(canvas=canvas[:0], before=len(tokens)))

    def _certain(self, slot: Slot) -> Int32[np.ndarray, " n"]:
        """New tokens before the first mask, or before the end that was already found."""
        begin, end = int(slot.rules.begin[0]), int(slot.rules.end[0])
        row = slot.canvas.tokens[0, begin:end]
        stops = row == self.engine.sampler.mask_id
        if slot.rules.ends[0]:
            stops |= np.isin(row, self.engine.sampler.end_ids)
        return row[: int(stops.argmax())] if stops.any() else row
