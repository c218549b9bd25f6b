# SPDX-License-Identifier: Apache-2.0
"""What a slice, whose processes are its own, tells for the run's records.

Invariant: every slice that a round merged tells its part of it, and what is the same for all; the
coordinator keeps the first of these.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from geojax.config import RunConfig
from geojax.geomesh.agreed import Agreed
from geojax.geomesh.balance import Plan
from geojax.geomesh.clock import Traffic
from geojax.geomesh.records import part_record, round_record
from geojax.geomesh.slice_work import OpenWork
from geojax.geomesh.sync import Merged
from geojax.geomesh.wan.seat import Seat
from geojax.geomesh.worker import Worker
from geojax.meshes.wan import wire_bytes
from geojax.track.console import RunConsole
from geojax.track.metrics import to_json
from geojax.train.steering import noise_record


@dataclass
class Closed:
    """A round that this slice was merged in."""

    number: int
    plan: Plan
    members: Sequence[int]
    merged: Sequence[int]
    result: Merged
    left_out: Sequence[str]
    digest: str


class SliceRecords:
    """Written by way of the slice's seat."""

    def __init__(
        self,
        config: RunConfig,
        traffic: Traffic,
        message_bytes: int,
        exchange_seconds: float | None,
    ):
        """`exchange_seconds`: where it is modelled."""
        self._config, self._traffic = config, traffic
        self._message_bytes, self._modelled_seconds = message_bytes, exchange_seconds
        self.exchanged_seconds = 0.0
        """Of the last exchange, measured."""
        self.wall_before = 0.0
        """Real time before this process."""
        self._sent_before = 0
        """Bytes to peers that the last record counted."""
        self._began = time.perf_counter()

    def begin(self, member: Seat, console: RunConsole) -> None:
        """From now on they are told to `member`, and what is odd to `console`."""
        self._member, self._console = member, console

    @property
    def wall_seconds(self) -> float:
        return self.wall_before + time.perf_counter() - self._began

    def tell(self, kind: str, border: int, **fields: Any) -> None:
        self._member.record(to_json({"kind": kind, "round": border, **fields}))

    def round(self, closed: Closed, worker: Worker, work: OpenWork, agreed: Agreed) -> None:
        """`agreed`: after it."""
        config, number, contribution = self._config, closed.number, work.contribution
        assert contribution, "it was merged"
        sending, waited = self._member.times(number, closed.merged)
        self.exchanged_seconds = waited or 0.0
        modelled = self._modelled_seconds
        if modelled is not None:
            waited = modelled
        gone_on = work.sent_round == number
        ahead = config.exchange.steps_ahead(worker.work.inner_steps) if gone_on else 0
        busy = work.accounts.busy_seconds
        part = work.accounts.close(worker, ahead, sending, modelled)
        line = round_record(closed.result, self._traffic) | {
            "tokens": agreed.tokens,
            "hash": closed.digest,
            "left_out": list(closed.left_out),
            "wall_seconds": self.wall_seconds,
        }
        if config.cona:
            noise = noise_record(agreed.planner.watch)
            line |= {"strategy": str(closed.plan), "noise": noise}
        line["samples"] = agreed.data.merged
        sent = wire_bytes("gather", len(closed.members), self._message_bytes)
        mine = part_record(worker, contribution, sent, self._traffic, part, waited, busy)
        sent_bytes = self._member.sent_bytes
        mine["slice"]["peer_bytes"] = sent_bytes - self._sent_before
        self._sent_before = sent_bytes
        mine["slice"]["took"] = [[part.start, part.stop] for part in work.share]
        self.tell("slice", number, line=line, **mine)
        if worker.ended.skipped:
            self._console.warn(
                f"round {number}: skipped {worker.ended.skipped} of {worker.ended.done} "
                "inner steps (loss or gradient not finite, or a spike)"
            )
