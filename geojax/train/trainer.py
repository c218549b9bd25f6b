# SPDX-License-Identifier: Apache-2.0
"""A run on one cluster: steps of one strategy, in rounds of a few steps each.

Invariant: what a run does next is a function of its config and its last checkpoint, which any
strategy on any number of devices can take up: the state is the same, only where it lies differs.
"""

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from geojax.config import ConfigError, LostRunError, RunConfig, require
from geojax.data import Corpus, TrainSequences, ValidSequences
from geojax.meshes.reshard import reshard
from geojax.meshes.strategy import parse_strategy
from geojax.platform import Watchdog, detect_gpu, mfu
from geojax.track.console import RunConsole, format_bytes, format_count, format_share
from geojax.track.environment import machine, versions
from geojax.track.metrics import MetricsWriter
from geojax.train.checkpoint import Checkpoints
from geojax.train.evaluate import evaluation_record
from geojax.train.origin import check_origin, origin
from geojax.train.program import Programs, Task
from geojax.train.step import StepStats, TrainState, init_state, read_init

_CHUNK_STEPS = 8
"""Steps handed to the devices at once, at most; a signal is seen after them."""


@dataclass
class Position:
    """How far a run is; saved with every checkpoint."""

    round: int = 0
    step: int = 0
    cursor: int = 0
    """Next global sample."""
    seconds: float = 0.0
    """Of the rounds, measured; evaluation and saving not counted."""
    lost_rounds: int = 0
    """In a row without one good step."""
    wall_seconds: float = 0.0
    """Real time, over all processes that worked on the run."""


class Trainer:
    """One run by one strategy, in this process's part of it."""

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        metrics: MetricsWriter | None,
        checkpoints: Checkpoints,
        stop: threading.Event,
        watchdog: Watchdog,
    ):
        """Program and state, taken from a checkpoint where there is one.

        `metrics`: None in all processes but the first. Set `stop` to end the run, saved, at the
        next chunk of steps.
        """
        self.config = config
        self.position = Position()
        self._corpus, self._metrics, self._checkpoints = corpus, metrics, checkpoints
        self._stop, self._watchdog = stop, watchdog
        data, strategy = config.data, parse_strategy(config.strategy)
        corpus.require_batch(strategy.global_batch)
        self._sequences = TrainSequences(
            corpus, data.seq_len, data.seed, data.document_mask, data.masking
        )
        self._valid = ValidSequences(corpus, data.seq_len, data.document_mask, data.masking)
        require(
            config.eval.first < self._valid.sequences,
            f"eval.first {config.eval.first}: there are {self._valid.sequences} held-out "
            "sequences; lower it, or raise data.valid_fraction",
        )
        task = Task(config.model, config.train, data.seq_len, data.document_mask, config.seed)
        chunk_steps = min(_CHUNK_STEPS, config.train.round_steps)
        self._programs = Programs(task, _devices(strategy.devices), chunk_steps)
        self._program = self._programs.get(strategy)
        self.resumed = not checkpoints.empty
        if self.resumed:
            meta = checkpoints.meta()
            check_origin(meta, config, corpus)
            self.position = Position(**meta["position"])
            self._state = self._restored(meta)
        else:
            self._state = self._fresh()
        if metrics and self.resumed:
            metrics.rewind(self.position.round)
        elif metrics:
            metrics.clear()
            metrics.write("start", **self._start_record())
        self._resumed_at = time.perf_counter()

    @property
    def tokens(self) -> int:
        """Tokens of all sequences that were seen."""
        return self.position.cursor * self.config.data.seq_len

    def describe(self) -> list[tuple[str, str]]:
        """What the run derived from its config, as (label, value)."""
        config, strategy = self.config, self._program.strategy
        seq_len, total = config.data.seq_len, config.train.total_tokens
        step_tokens = strategy.global_batch * seq_len
        flops = config.model.train_flops_per_token(seq_len)
        return [
            (
                "model",
                f"{format_count(config.model.num_params)} parameters, {config.model.family}; "
                f"{flops * total / 1e12:.3g} TFLOP for {format_count(total)} tokens "
                f"({total / config.model.num_params:.1f} a parameter)",
            ),
            (
                "strategy",
                f"{strategy}: {strategy.devices} devices, {strategy.micro_batches} micro-batches, "
                f"bubble {format_share(strategy.bubble)}",
            ),
            (
                "step",
                f"{strategy.global_batch} sequences of {seq_len}, {format_count(step_tokens)} "
                f"tokens, {flops * step_tokens / 1e12:.3g} TFLOP; {-(-total // step_tokens)} steps",
            ),
            ("state", f"{format_bytes(self._program.state_bytes)} a device"),
            ("clock", "measured: wall time of steps"),
        ]

    def run(self, console: RunConsole) -> bool:
        """Train to the end; False if it was stopped before. Either way the state is saved."""
        config, position = self.config, self.position
        total = config.train.total_tokens
        if not self.resumed:
            self._evaluation(console)
        while self.tokens < total:
            before = self.tokens
            self._round(console)
            stopped = self._stopped()
            every, interval = config.eval.every_tokens, config.checkpoint.every_rounds
            ended = self.tokens >= total
            if ended or (every and self.tokens // every > before // every):
                self._evaluation(console)
            if ended or stopped or (interval and position.round % interval == 0):
                self._save()
            if stopped and not ended:
                return False
        with self._watchdog.pause():
            self._checkpoints.wait()  # a run that says it ended can be read from its checkpoint
        self._write("end", seconds=position.seconds, reason="all tokens seen")
        return True

    def _round(self, console: RunConsole) -> None:
        """A round of steps, cut short by the end of the run, or by a stop."""
        config, position, program = self.config, self.position, self._program
        batch, seq_len = program.strategy.global_batch, config.data.seq_len
        total = config.train.total_tokens
        left = -(-(total - self.tokens) // (batch * seq_len))
        steps = min(config.train.round_steps, left)
        begin, stride = self.tokens / total, batch * seq_len / total
        running: list[StepStats] = []
        started, done, sums = time.perf_counter(), 0, np.zeros(5)
        pieces = self._sequences.chunks(
            position.cursor, steps, batch, self._programs.steps, rows=program.local_sequences
        )
        for piece, real in pieces:
            chunk = program.put_chunk(piece)
            self._state, stats = program.run(self._state, chunk, real, begin, stride, done)
            done += real
            running.append(stats)
            if len(running) > 1:  # the devices never wait for the host between two chunks
                sums += _numbers(running.pop(0))
                self._watchdog.beat(f"round {position.round + 1} step {position.step + done}")
            if self._stopped():
                break
        sums += sum(map(_numbers, running))
        seconds = time.perf_counter() - started
        nats, tokens, norms, good, skipped = (float(x) for x in sums)
        position.round += 1
        position.step += done
        position.cursor += done * batch
        position.seconds += seconds
        position.lost_rounds = 0 if good else position.lost_rounds + 1
        speed = done * batch * seq_len / seconds
        kind = program.devices[0].device_kind
        work = {
            "slice": "all",
            "batch": batch,
            "steps": done,
            "tokens": int(tokens),
            "loss": nats / tokens if tokens else None,
            "grad_norm": norms / good if good else None,
            "skipped": int(skipped),
            "merged": True,
            "compute_seconds": seconds,
            **{f"{part}_seconds": 0.0 for part in ("straggler", "wan", "outer")},
            **{f"{kind}_bytes": 0 for kind in ("payload", "wire", "sent")},
            "captured_energy": None,
        }
        record = {
            "round_seconds": seconds,
            "payload_bytes": 0,
            "payload_ratio": None,
            "wire_bytes": 0,
            "sign_agreement": None,
            "step": position.step,
            "strategy": str(program.strategy),
            "tokens_per_second": speed,
            "mfu": mfu(speed, config.model, seq_len, len(program.devices), detect_gpu(kind)),
            "wall_seconds": self._wall_seconds(),
        }
        self._write("slice", **work)
        self._write("round", seconds=position.seconds, tokens=self.tokens, **record)
        console.step_line(record | {"tokens": self.tokens}, work)
        if skipped:
            console.warn(
                f"round {position.round}: skipped {skipped:.0f} of {done} steps (loss or gradient "
                "not finite, or a spike)"
            )
        if position.lost_rounds >= config.train.anomalies.max_lost_rounds:
            raise LostRunError(
                f"no step of the last {position.lost_rounds} rounds was good "
                f"(train.anomalies.max_lost_rounds {config.train.anomalies.max_lost_rounds}); look "
                "at the data, lower train.optimizer.learning_rate in the run's config.json and "
                "resume, or start anew"
            )

    def _stopped(self) -> bool:
        """Whether any process was told to stop; the same answer in all of them."""
        if jax.process_count() == 1:
            return self._stop.is_set()
        return bool(multihost_utils.process_allgather(np.array(self._stop.is_set())).any())

    def _evaluation(self, console: RunConsole) -> None:
        config = self.config.eval
        with self._watchdog.pause():
            result = self._program.evaluate(
                self._state.params,
                lambda rows: self._valid.batches(rows, config.sequences, config.first),
                config.batch,
            )
        record = {
            "round": self.position.round,
            "tokens": self.tokens,
            "seconds": self.position.seconds,
            **evaluation_record(result, config, self._valid),
        }
        if self._metrics:
            self._metrics.write("eval", **record)
        console.eval_line(record)

    def _save(self) -> None:
        order = self._program.order
        meta = origin(self.config, self._corpus) | {
            "position": asdict(self.position) | {"wall_seconds": self._wall_seconds()},
            "layer_order": None if order is None else order.tolist(),
        }
        with self._watchdog.pause():
            self._checkpoints.save({"state": self._state}, meta)

    def _fresh(self) -> TrainState:
        config, program = self.config, self._program
        if not config.init:
            return program.init(config.seed)
        params = read_init(config.init, config.model)
        return program.put_state(init_state(params, config.train))

    def _restored(self, meta: dict[str, Any]) -> Any:
        program = self._program
        state, _ = self._checkpoints.restore({"state": program.abstract_state})
        before = meta["layer_order"]
        taken = [state.pop("state")]
        order = None if before is None else np.array(before)
        return reshard(taken, program.state_shardings, order, program.order)

    def _start_record(self) -> dict[str, Any]:
        config, strategy = self.config, self._program.strategy
        return {
            "method": config.name,
            "clock": "measured",
            "seed": config.seed,
            "params": config.model.num_params,
            "clocked_params": config.model.num_params,
            "strategy": str(strategy),
            "tokens_per_round": strategy.global_batch
            * config.data.seq_len
            * config.train.round_steps,
            "total_tokens": config.train.total_tokens,
            "versions": versions(),
            "machine": machine(),
        }

    def _write(self, kind: str, **fields: Any) -> None:
        if self._metrics:
            defaults = {"round": self.position.round, "tokens": self.tokens}
            self._metrics.write(kind, **(defaults | fields))

    def _wall_seconds(self) -> float:
        return self.position.wall_seconds + time.perf_counter() - self._resumed_at


def _numbers(stats: StepStats) -> np.ndarray:
    """Waits for the steps."""
    return np.array([float(x) for x in jax.device_get(stats)])


def _devices(wanted: int) -> list[jax.Device]:
    """The first `wanted`; ConfigError where there are fewer, or some process would have none."""
    there = jax.devices()
    if wanted > len(there) or (jax.process_count() > 1 and wanted != len(there)):
        raise ConfigError(
            f"the strategy wants {wanted} devices, and there are {len(there)}; choose another, or "
            f"on CPU set XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        )
    return list(there[:wanted])
