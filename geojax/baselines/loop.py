# SPDX-License-Identifier: Apache-2.0
"""The frame of a baseline's run: rounds, records, evaluations, checkpoints.

A method says what a round does, what its parameters are and what a checkpoint holds. Invariant: a
run is saved at round borders only, and what it does next is a function of its config and its last
checkpoint; modelled times are made again from the beginning.
"""

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any, NamedTuple

import jax

from geojax.baselines.setup import Setup
from geojax.config import LostRunError, RunConfig
from geojax.data import Corpus, TaskSet
from geojax.geomesh.checkpoint import Position
from geojax.geomesh.records import derived_rows, start_record
from geojax.geomesh.worker import RoundProgress
from geojax.models.transformer import Params
from geojax.platform import Watchdog
from geojax.track.console import RunConsole
from geojax.track.metrics import MetricsWriter
from geojax.train.checkpoint import Checkpoints
from geojax.train.origin import check_origin, origin


class Part(NamedTuple):
    """What one slice did in a round."""

    progress: RoundProgress
    """Of the inner steps that came in during the round."""
    compute_seconds: float
    straggler_seconds: float
    wan_seconds: float
    messages: float
    """Whole sets of parameters that it sent over the WAN, as messages."""
    sent_bytes: int
    """Really, of the model that is trained."""


class Loop(ABC):
    """One run in one process, which holds all slices."""

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus | TaskSet,
        metrics: MetricsWriter,
        checkpoints: Checkpoints,
        stop: threading.Event,
        watchdog: Watchdog,
    ):
        """Taken from a checkpoint where there is one. Set `stop` to end the run, saved, at the end
        of the round."""
        self.config = config
        self.position = Position()
        self.setup = Setup(config, corpus)
        self.workers = [self.setup.worker(i) for i in range(len(config.slices))]
        self._metrics, self._checkpoints, self._corpus = metrics, checkpoints, corpus
        self._stop, self._watchdog = stop, watchdog
        self._begin()
        meta = None if checkpoints.empty else checkpoints.meta()
        self.resumed = meta is not None
        if meta:
            check_origin(meta, config, corpus)
            state, meta = checkpoints.restore(jax.eval_shape(self._state))
            self.position = Position(**meta["position"])
            self._restore(state, meta["facts"])
            metrics.rewind(self.position.round)
        else:
            metrics.clear()
            traffic = self.setup.traffic
            metrics.write(
                "start", **start_record(config, self.setup.plan, traffic) | self._start_fields()
            )
        self._resumed_at = time.perf_counter()

    @property
    def tokens(self) -> int:
        """Predicted tokens up to the last round border, over all slices."""
        return self.position.cursor * self.config.data.seq_len

    def describe(self) -> list[tuple[str, str]]:
        """What the run derived from its config, as (label, value)."""
        rows = derived_rows(self.config, self.setup.plan, self.setup.traffic, None, False)
        return [(label, self._exchange_row() if label == "exchange" else v) for label, v in rows]

    def run(self, console: RunConsole) -> bool:
        """Train to the end; False if it was stopped before. Either way the state is saved."""
        position = self.position
        if not self.resumed:
            self._evaluation(console)
        while not self._finished:
            before, began = self.tokens, position.seconds
            parts, fields = self._round(console)
            self._record(console, parts, position.seconds - began, fields)
            every = self.config.eval.every_tokens
            if self._finished or (every and self.tokens // every > before // every):
                self._evaluation(console)
            interval = self.config.checkpoint.every_rounds
            due = interval and position.round % interval == 0
            if due or self._finished or self._stop.is_set():
                self._save()
            if self._stop.is_set() and not self._finished:
                return False
        self._checkpoints.wait()
        self._metrics.write(
            "end",
            round=position.round,
            tokens=self.tokens,
            seconds=position.seconds,
            reason="all tokens seen",
        )
        return True

    @abstractmethod
    def _begin(self) -> None:
        """State before the first round."""

    @property
    @abstractmethod
    def _finished(self) -> bool:
        """Whether there is no round left."""

    @abstractmethod
    def _round(self, console: RunConsole) -> tuple[list[Part], dict[str, Any]]:
        """Do the next one and move `position` on: what each slice did, and fields of its record."""

    @abstractmethod
    def _params(self) -> Params:
        """What the run has learned so far."""

    @abstractmethod
    def _state(self) -> Any:
        """Arrays of a checkpoint; always of the same shapes."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """What a checkpoint holds beside them, for JSON."""

    @abstractmethod
    def _restore(self, state: Any, facts: dict[str, Any]) -> None:
        """Take over what these were, at `position`."""

    @abstractmethod
    def _exchange_row(self) -> str:
        """How slices exchange, in a line."""

    @abstractmethod
    def _start_fields(self) -> dict[str, Any]:
        """Fields of the start record in place of GeoMesh's."""

    def _beat(self) -> None:
        self._watchdog.beat(f"inner steps of round {self.position.round + 1}")

    def _record(
        self, console: RunConsole, parts: list[Part], seconds: float, fields: dict[str, Any]
    ) -> None:
        traffic = self.setup.traffic
        lines = []
        for worker, work, part in zip(self.workers, self.setup.plan.work, parts, strict=True):
            p = part.progress
            line = {
                "slice": work.name,
                "batch": work.batch,
                "steps": p.done,
                "tokens": p.tokens,
                "loss": p.loss / p.tokens if p.tokens else None,
                "grad_norm": p.grad_norm / p.steps if p.steps else None,
                "skipped": p.skipped,
                "merged": p.tokens > 0,
                "compute_seconds": part.compute_seconds,
                "straggler_seconds": part.straggler_seconds,
                "wan_seconds": part.wan_seconds,
                "outer_seconds": 0.0,
                "payload_bytes": round(part.messages * traffic.payload_bytes),
                "wire_bytes": round(part.messages * self._wire_bytes),
                "sent_bytes": part.sent_bytes,
                "captured_energy": None,
                "rate_scale": worker.scale,
            }
            self._metrics.write("slice", round=self.position.round, **line)
            lines.append(line)
            if p.skipped:
                console.warn(
                    f"round {self.position.round}, slice {work.name}: skipped {p.skipped} of "
                    f"{p.done} inner steps (loss or gradient not finite, or a spike)"
                )
        sent = any(part.messages for part in parts)
        record = {
            "round_seconds": seconds,
            "payload_bytes": sum(line["payload_bytes"] for line in lines) / len(lines),
            "payload_ratio": traffic.payload_ratio if sent else None,
            "wire_bytes": sum(line["wire_bytes"] for line in lines) / len(lines),
            "sign_agreement": None,
            "round": self.position.round,
            "tokens": self.tokens,
            "seconds": self.position.seconds,
            "left_out": [],
            "wall_seconds": self._wall_seconds(),
            "samples": self.position.cursor,
            **fields,
        }
        self._metrics.write("round", **record)
        console.round_line(record, lines)
        good = any(part.progress.tokens for part in parts)
        self.position.lost_rounds = 0 if good else self.position.lost_rounds + 1
        limit = self.config.train.anomalies.max_lost_rounds
        if self.position.lost_rounds >= limit:
            raise LostRunError(
                f"the last {limit} rounds had no good step (train.anomalies.max_lost_rounds); look "
                "at the data, or lower train.optimizer.learning_rate and start anew"
            )

    @property
    def _wire_bytes(self) -> int:
        """That one slice sends for a message, of the clocked model."""
        return self.setup.traffic.wire_bytes

    def _evaluation(self, console: RunConsole) -> None:
        with self._watchdog.pause():
            found = self.setup.evaluate(self.workers[0].program, self._params())
        where = {
            "round": self.position.round,
            "tokens": self.tokens,
            "seconds": self.position.seconds,
        }
        self._metrics.write("eval", **where, **found)
        console.eval_line(where | found)

    def _save(self) -> None:
        meta = origin(self.config, self._corpus) | {
            "position": asdict(self.position) | {"wall_seconds": self._wall_seconds()},
            "facts": self._facts(),
        }
        with self._watchdog.pause():
            self._checkpoints.save(self._state(), meta)

    def _wall_seconds(self) -> float:
        return self.position.wall_seconds + time.perf_counter() - self._resumed_at
