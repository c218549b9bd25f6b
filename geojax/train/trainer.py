# SPDX-License-Identifier: Apache-2.0
"""A run on one cluster: steps of one strategy, or of one after another, in rounds of a few steps.

Invariant: what a run does next is a function of its config and its last checkpoint, which any
strategy on any number of devices can take up: the state is the same, only where it lies differs. A
strategy that turns out not to run here costs the switch to it, and no step.
"""

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from geojax.cona.controller import Controller, Round
from geojax.cona.decision import Decision, record
from geojax.cona.noise import Moments
from geojax.config import ConfigError, LostRunError, RunConfig, RunError, require
from geojax.data import Corpus, TrainSequences, ValidSequences
from geojax.meshes.gradient import gradient_parts
from geojax.meshes.reshard import bring_back, keep_copy, reshard
from geojax.meshes.strategy import Strategy, parse_strategy
from geojax.platform import Watchdog, detect_gpu, mfu
from geojax.track.console import (
    RunConsole,
    format_bytes,
    format_count,
    format_seconds,
    format_share,
)
from geojax.track.environment import machine, versions
from geojax.track.metrics import MetricsWriter
from geojax.train.checkpoint import Checkpoints
from geojax.train.evaluate import evaluation_record
from geojax.train.origin import check_origin, origin
from geojax.train.program import Programs, Task
from geojax.train.steering import (
    devices_for,
    local_strategy,
    make_pilot,
    noise_record,
    step_timer,
)
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
        data, devices = config.data, devices_for(config)
        self._pilot, self._timer = make_pilot(config, devices), step_timer(config)
        corpus.require_batch(max(_batches(config)))
        self._sequences = TrainSequences(
            corpus, data.seq_len, data.seed, data.document_mask, data.masking
        )
        self._valid = ValidSequences(corpus, data.seq_len, data.document_mask, data.masking)
        require(
            config.eval.first < self._valid.sequences,
            f"eval.first {config.eval.first}: there are {self._valid.sequences} held-out "
            "sequences; lower it, or raise data.valid_fraction",
        )
        task = Task(
            config.model,
            config.train,
            data.seq_len,
            data.document_mask,
            config.seed,
            config.measured_noise.metric if config.measured_noise else None,
            config.scaling.base_batch if config.scaling else None,
        )
        chunk_steps = min(_CHUNK_STEPS, config.train.round_steps)
        self._programs = Programs(task, devices, chunk_steps)
        self.resumed = not checkpoints.empty
        meta = checkpoints.meta() if self.resumed else {}
        if self.resumed:
            check_origin(meta, config, corpus)
            self.position = Position(**meta["position"])
            try:
                self._pilot.restore(meta["pilot"])
            except ValueError as error:
                raise ConfigError(str(error)) from error
        self._program = self._programs.get(self._local(self._pilot.strategy))
        self._state = self._restored(meta) if self.resumed else self._fresh()
        self._state = self._program.rehearse(self._state, self._programs.steps)
        self._ran = {self._program.strategy}
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
        config, strategy = self.config, self._pilot.strategy
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
            *self._steering_rows(),
            ("clock", self._clock_row()),
        ]

    def _steering_rows(self) -> list[tuple[str, str]]:
        if isinstance(self._pilot, Controller):
            return [("cona", self._pilot.describe())]
        if self.config.chain:
            legs = ", ".join(
                f"{c.strategy} from {format_count(c.tokens)}" for c in self.config.chain
            )
            return [("chain", f"{legs} tokens")]
        return []

    def _clock_row(self) -> str:
        clock = self.config.clock
        if not self._timer:
            return "measured: wall time of steps"
        model = clock.model or self.config.name
        return (
            f"modelled: steps of {model} on {clock.nodes} x {clock.gpus_per_node} {clock.gpu}; the "
            "steps themselves run here on one device"
        )

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
            if not (ended or stopped):
                self._steer(console)
            if ended or stopped or (interval and position.round % interval == 0):
                self._save()
            if stopped and not ended:
                return False
        with self._watchdog.pause():
            self._checkpoints.wait()  # a run that says it ended can be read from its checkpoint
        self._write("end", seconds=position.seconds, reason="all tokens seen")
        return True

    def _round(self, console: RunConsole) -> None:
        """A round of steps, cut short by the end of the run or of a leg, or by a stop."""
        config, position, pilot = self.config, self.position, self._pilot
        batch, seq_len = self._program.strategy.global_batch, config.data.seq_len
        total = config.train.total_tokens
        left = -(-(total - self.tokens) // (batch * seq_len))
        border = pilot.samples_left(position.cursor)
        left = left if border is None else min(left, -(-border // batch))
        steps = min(config.train.round_steps, left)
        span = (self.tokens / total, batch * seq_len / total, pilot.scale())
        started, probes = time.perf_counter(), int(self._probe_due(steps))
        sums = self._steps(range(probes), span, probe=True)
        probed = time.perf_counter()
        if steps > probes and not (probes and self._stopped()):
            sums = _add(sums, self._steps(range(probes, steps), span))
        done = sums.done
        seconds = self._agreed(time.perf_counter() - started)
        pace_seconds = self._agreed(time.perf_counter() - probed)
        if self._timer:
            step_seconds = self._timer(pilot.strategy)
            pace_seconds = (done - probes) * step_seconds
            # A probe takes twice as long, under strategies that need it for their noise.
            extra = probes and gradient_parts(pilot.strategy) < 2
            seconds = (done + extra) * step_seconds
        nats, tokens, norms, good, skipped = sums.numbers
        position.round += 1
        position.step += done
        position.cursor += done * batch
        position.seconds += seconds
        position.lost_rounds = 0 if good else position.lost_rounds + 1
        pilot.observe(position.cursor, Round(done - probes, pace_seconds, sums.noise))
        speed = done * batch * seq_len / seconds
        kind = self._program.devices[0].device_kind
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
        devices = len(self._program.devices)
        record = {
            "round_seconds": seconds,
            "payload_bytes": 0,
            "payload_ratio": None,
            "wire_bytes": 0,
            "sign_agreement": None,
            "step": position.step,
            "samples": position.cursor,
            "strategy": str(pilot.strategy),
            "rate_scale": span[2],
            "noise": noise_record(pilot.noise),
            "tokens_per_second": speed,
            "mfu": None
            if self._timer
            else mfu(speed, config.model, seq_len, devices, detect_gpu(kind)),
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

    def _steps(
        self, steps: range, span: tuple[float, float, float], probe: bool = False
    ) -> "_Sums":
        """Some of a round's steps; `span`: progress at its beginning and a step, and the scale of
        the rate."""
        program, position = self._program, self.position
        batch, chunk_steps = program.strategy.global_batch, 1 if probe else self._programs.steps
        begin, stride, scale = span
        total, running, done = _Sums(0, np.zeros(5), {}), list[StepStats](), steps.start
        pieces = self._sequences.chunks(
            position.cursor + done * batch,
            len(steps),
            batch,
            chunk_steps,
            rows=program.local_sequences,
        )
        for piece, real in pieces if steps else ():
            chunk = program.put_chunk(piece)
            self._state, stats = program.run(
                self._state, chunk, real, begin, stride, done, scale, probe
            )
            done += real
            running.append(stats)
            if len(running) > 1:  # the devices never wait for the host between two chunks
                total = _add(total, _sums(0, running.pop(0)))
                self._watchdog.beat(f"round {position.round + 1} step {position.step + done}")
            if self._stopped():
                break
        for stats in running:
            total = _add(total, _sums(0, stats))
        return total._replace(done=done - steps.start)

    def _probe_due(self, steps: int) -> bool:
        watch, step = self._pilot.noise, self.position.step
        if watch is None or not self._program.wants_probes:
            return False
        return -step % watch.config.probe_steps < steps

    def _steer(self, console: RunConsole) -> None:
        """Ask the pilot, and do what it says."""
        pilot, position = self._pilot, self.position
        while True:
            decision, situation = pilot.propose(
                position.round, position.cursor, position.seconds, self._ready(console)
            )
            if situation:
                self._write("decision", **record(situation, decision))
            if decision.kind == "prepare":
                self._programs.prefetch(self._local(parse_strategy(decision.to)))
            if decision.kind in ("keep", "prepare"):
                break
            if self._switch(decision, console):
                break
        if not self._timer:
            for strategy in pilot.likely():
                self._programs.prefetch(strategy)

    def _ready(self, console: RunConsole) -> list[str] | None:
        """Strategies whose programs are compiled in all processes; those that cannot be are
        refused. None under the modelled clock, which counts no compiling."""
        if self._timer:
            return None
        found = self._programs.found()
        names = sorted(found, key=str)
        codes = np.array([2 if isinstance(found[s], Exception) else found[s] for s in names], int)
        if jax.process_count() > 1 and names:
            every = multihost_utils.process_allgather(codes)
            codes = np.where((every == 2).any(0), 2, every.min(0))
        for strategy, code in zip(names, codes, strict=True):
            if code == 2:
                self._refuse(str(strategy), found[strategy], console)
                self._programs.forget(strategy)
        return [str(s) for s, code in zip(names, codes, strict=True) if code == 1]

    def _switch(self, decision: Decision, console: RunConsole) -> bool:
        """To the decision's strategy; False where it does not run here, and all is as it was."""
        started, before = time.perf_counter(), self._program
        target = self._local(parse_strategy(decision.to))
        error: Exception | None = None
        try:
            self._program = self._programs.get(target)
        except Exception as failure:  # whatever the compiler raises
            error = failure
        if self._agree(error):
            self._program = before
            self._refuse(decision.to, error, console)
            return False
        if target != before.strategy:
            # A program that never ran may run out of memory, after the old state has gone.
            kept = None if target in self._ran else keep_copy(self._state)
            try:
                taken = [self._state]
                del self._state
                self._state = self._program.move(taken, before)
                if kept is not None:
                    self._state = self._program.rehearse(self._state, self._programs.steps)
            except jax.errors.JaxRuntimeError as failure:
                error = failure
            if kept is not None and self._agree(error):
                self._state = bring_back(kept)
                self._program = before
                self._refuse(decision.to, error, console)
                return False
            if error:
                raise error
            self._ran.add(target)
            self._state = self._program.recount(self._state, before)
        seconds = self._agreed(time.perf_counter() - started)
        if self._timer:
            seconds = self.config.clock.switch_seconds
        self.position.seconds += seconds
        self._write(
            "switch",
            **{"from": str(self._pilot.strategy), "to": decision.to, "switch_seconds": seconds},
            why=decision.reason,
            decision=decision.kind,
        )
        console.note(
            f"round {self.position.round}: {decision.kind} to {decision.to} in "
            f"{format_seconds(seconds)}: {decision.reason}"
        )
        self._pilot.switched(decision, seconds)
        return True

    def _refuse(self, name: str, error: object, console: RunConsole) -> None:
        reason = " ".join(str(error or "another process could not").split())[:200]
        if "RESOURCE_EXHAUSTED" in reason:
            reason = f"out of memory ({reason})"
        self._write("refused", strategy=name, why=reason)
        console.warn(f"{name} cannot run here, and is left out from now on: {reason}")
        try:
            self._pilot.refuse(name, reason)
        except ValueError as failure:
            self._save()
            raise RunError(f"{failure}; the run is saved") from failure

    def _local(self, strategy: Strategy) -> Strategy:
        return local_strategy(self.config, strategy)

    def _agreed(self, seconds: float) -> float:
        """The first process's measurement, in all of them."""
        if jax.process_count() == 1:
            return seconds
        return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))

    def _agree(self, error: Exception | None) -> bool:
        """Whether any process has an error."""
        if jax.process_count() == 1:
            return error is not None
        return bool(multihost_utils.process_allgather(np.array(error is not None)).any())

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
            "pilot": self._pilot.state(),
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
        config, strategy = self.config, self._pilot.strategy
        return {
            "method": config.name,
            "clock": config.clock.kind,
            "seed": config.seed,
            "params": config.model.num_params,
            "clocked_params": config.clocked_model().num_params,
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


class _Sums(NamedTuple):
    """Of steps, on the host."""

    done: int
    numbers: np.ndarray
    """nats, tokens, gradient norms, good steps, skipped ones."""
    noise: dict[str, Moments]


def _sums(done: int, stats: StepStats) -> _Sums:
    """Waits for the steps."""
    stats = jax.device_get(stats)
    noise = {source: Moments(*map(float, moments)) for source, moments in stats.noise.items()}
    return _Sums(done, np.array([float(x) for x in stats[:5]]), noise)


def _add(a: _Sums, b: _Sums) -> _Sums:
    noise = dict(a.noise)
    for source, moments in b.noise.items():
        noise[source] = jax.tree.map(float.__add__, noise.get(source, _NOTHING), moments)
    return _Sums(a.done + b.done, a.numbers + b.numbers, noise)


_NOTHING = Moments(*[0.0] * len(Moments._fields))


def _batches(config: RunConfig) -> list[int]:
    """Sequences a step that the run may take."""
    if config.cona:
        return list(config.cona.global_batches)
    texts = [config.strategy] if config.strategy else [leg.strategy for leg in config.chain]
    return [parse_strategy(text).global_batch for text in texts]
