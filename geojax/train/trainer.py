# SPDX-License-Identifier: Apache-2.0
"""A run on one cluster: steps of one strategy, or of one after another, in rounds of a few steps.

Invariant: what a run does next is a function of its config and its last checkpoint, which any
strategy on any number of devices can take up: the state is the same, only where it lies differs. A
strategy that turns out not to run here costs the switch to it, and no step.
"""

import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from geojax.cona.controller import Round
from geojax.cona.decision import Decision, record
from geojax.config import ConfigError, LostRunError, RunConfig, RunError, require
from geojax.data import Corpus, TaskSet, both_splits
from geojax.meshes.reshard import reshard
from geojax.meshes.squares import gradient_parts
from geojax.meshes.strategy import Strategy, parse_strategy
from geojax.platform import Watchdog, detect_gpu, mfu
from geojax.track.console import (
    RunConsole,
    format_seconds,
)
from geojax.track.metrics import MetricsWriter
from geojax.train.about import batches, describe, start_record
from geojax.train.agree import FAILED, NO_MEMORY, READY, anyone, first_says
from geojax.train.checkpoint import Checkpoints
from geojax.train.engine import Engine
from geojax.train.evaluate import evaluation_record
from geojax.train.initial import read_init
from geojax.train.origin import check_origin, origin
from geojax.train.program import Program
from geojax.train.rounds import (
    ALONE,
    Partial,
    Sums,
    add,
    partial_record,
    read_partial,
    sums_of,
    work_record,
)
from geojax.train.steering import (
    devices_for,
    local_strategy,
    make_pilot,
    make_task,
    noise_record,
    step_timer,
)
from geojax.train.step import StepStats, TrainState

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
        corpus: Corpus | TaskSet,
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
        corpus.require_batch(max(batches(config)))
        self._sequences, self._valid = both_splits(corpus, data, config.model.shifted)
        require(
            config.eval.first < self._valid.sequences,
            f"eval.first {config.eval.first}: there are {self._valid.sequences} held-out "
            "sequences; lower it, or raise data.valid_fraction",
        )
        chunk_steps = min(_CHUNK_STEPS, config.train.round_steps)
        self._engine = Engine(make_task(config, evaluates=True), devices, chunk_steps)
        self._partial: Partial | None = None
        self.resumed = not checkpoints.empty
        meta = checkpoints.meta() if self.resumed else {}
        before = self._take_up(meta) if self.resumed else None
        refused = self._begin(meta)
        if metrics and self.resumed:
            metrics.rewind(self.position.round)
        elif metrics:
            metrics.clear()
            metrics.write("start", **start_record(config, self._pilot.strategy))
        self._resumed_at = time.perf_counter()
        now = str(self._pilot.strategy)
        if before is not None and before != now:
            if self._partial and self._partial.sums.done:  # its round ends here
                self._close(self._partial, parse_strategy(before), None)
            self._partial = None
            why = "the run goes on so from here" if not refused else "the other cannot run here"
            self._write_switch(before, now, 0.0, "resume", why)
        for name, reason in refused:
            self._write("refused", strategy=name, why=reason, switch_seconds=0.0)

    def _take_up(self, meta: dict[str, Any]) -> str:
        """Where the run was, by its checkpoint; the strategy then."""
        check_origin(meta, self.config, self._corpus)
        require(
            "pilot" in meta,
            "the checkpoint is of a version that knew one strategy a run; convert its weights with "
            "`geojax convert` and start a new run with --init",
        )
        self.position = Position(**meta["position"])
        try:
            self._pilot.restore(meta["pilot"])
        except ValueError as error:
            raise ConfigError(str(error)) from error
        before = meta["pilot"]["strategy"]
        self._partial = read_partial(meta["partial"])
        return before

    def _begin(self, meta: dict[str, Any]) -> list[tuple[str, str]]:
        """Program and state; strategies that turned out not to run here, with reasons."""
        refused = []
        make = partial(self._restored, meta) if meta else self._fresh
        while True:
            name = str(self._pilot.strategy)
            code, why = self._engine.begin(self._local(self._pilot.strategy), make)
            if code == READY:
                return refused
            try:
                self._pilot.refuse(name, why, out_of_memory=code == NO_MEMORY and not self._timer)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            refused.append((name, why))

    @property
    def tokens(self) -> int:
        """Tokens of all sequences that were seen."""
        return self.position.cursor * self.config.data.seq_len

    def describe(self) -> list[tuple[str, str]]:
        """What the run derived from its config, as (label, value)."""
        return describe(self.config, self._pilot, self._engine.program)

    def run(self, console: RunConsole) -> bool:
        """Train to the end; False if it was stopped before. Either way the state is saved."""
        try:
            return self._run(console)
        finally:
            self._engine.programs.close()

    def _run(self, console: RunConsole) -> bool:
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
            if self._partial is None:
                if ended or (every and self.tokens // every > before // every):
                    self._evaluation(console)
                if not ended:
                    with self._watchdog.pause():
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
        """A round of steps, cut short by the end of the run or of a leg; what is left of it, where
        a stop interrupted it before. Stopped itself, it leaves `_partial`."""
        part = self._partial or self._new_round()
        programs, sums = self._engine.programs, part.sums
        started, disturbed = time.perf_counter(), programs.busy
        if sums.done < part.probes:
            sums = add(sums, self._steps(range(part.probes), part.span, probe=True))
        probed = time.perf_counter()
        if sums.done < part.steps and not self._stopped():
            sums = add(sums, self._steps(range(sums.done, part.steps), part.span))
        ended = time.perf_counter()
        part = part._replace(
            sums=sums,
            seconds=part.seconds + first_says(ended - started),
            pace_seconds=part.pace_seconds + first_says(ended - probed),
            disturbed=part.disturbed or anyone(disturbed or programs.busy),
        )
        self._partial = part
        if part.sums.done == part.steps:
            self._close(part, self._pilot.strategy, console)

    def _new_round(self) -> Partial:
        program = self._engine.program
        batch, seq_len = program.strategy.global_batch, self.config.data.seq_len
        total, cursor = self.config.train.total_tokens, self.position.cursor
        left = -(-(total - self.tokens) // (batch * seq_len))
        border = self._pilot.samples_left(cursor)
        left = left if border is None else min(left, -(-border // batch))
        steps = min(self.config.train.round_steps, left)
        span = (self.tokens / total, batch * seq_len / total, self._pilot.scale())
        return Partial(steps, span, int(program.wants_probes and self._probe_due(steps)))

    def _close(self, part: Partial, strategy: Strategy, console: RunConsole | None) -> None:
        """Accounts of a round that has ended; no console: before its time, as another strategy
        goes on."""
        config, position, pilot = self.config, self.position, self._pilot
        batch, seq_len, sums = strategy.global_batch, config.data.seq_len, part.sums
        self._partial, done, seconds = None, sums.done, part.seconds
        pace_seconds = part.pace_seconds
        if self._timer:
            step_seconds = self._timer(strategy)
            pace_seconds = (done - part.probes) * step_seconds
            # Here every step tells its noise; there a probe would, in twice the time.
            probes = int(gradient_parts(strategy) < 2 and self._probe_due(part.steps))
            seconds = (done + probes) * step_seconds
        good, skipped = sums.numbers[3:]
        position.round += 1
        position.step += done
        position.cursor += done * batch
        position.seconds += seconds
        position.lost_rounds = 0 if good else position.lost_rounds + 1
        if console:
            made = Round(done - part.probes, pace_seconds, sums.noise, part.disturbed)
            pilot.observe(position.cursor, made)
        speed, share = done * batch * seq_len / seconds, None
        if not self._timer:
            devices = self._engine.program.devices
            kind = detect_gpu(devices[0].device_kind)
            share = mfu(speed, config.model, seq_len, len(devices), kind)
        work = work_record(sums, batch, seconds)
        line = ALONE | {
            "round_seconds": seconds,
            "step": position.step,
            "samples": position.cursor,
            "strategy": str(strategy),
            "rate_scale": part.span[2],
            "noise": noise_record(pilot.noise),
            "tokens_per_second": speed,
            "mfu": share,
            "wall_seconds": self._wall_seconds(),
        }
        self._write("slice", **work)
        self._write("round", seconds=position.seconds, tokens=self.tokens, **line)
        if console is None:
            return
        console.step_line(line | {"tokens": self.tokens}, work)
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

    def _steps(self, steps: range, span: tuple[float, float, float], probe: bool = False) -> Sums:
        """Some of a round's steps; `span` as in Partial."""
        engine, position = self._engine, self.position
        program, done = engine.program, steps.start
        batch, (begin, stride, scale) = program.strategy.global_batch, span
        total, running = Sums(0, np.zeros(5), {}), list[StepStats]()
        pieces = self._sequences.chunks(
            position.cursor + done * batch,
            len(steps),
            batch,
            1 if probe else engine.programs.steps,
            rows=program.local_sequences,
        )
        for piece, real in pieces:
            chunk = program.put_chunk(piece)
            engine.state, stats = program.run(
                engine.state, chunk, real, begin, stride, done, scale, probe
            )
            done += real
            running.append(stats)
            if len(running) > 1:  # the devices never wait for the host between two chunks
                total = add(total, sums_of(running.pop(0)))
                self._watchdog.beat(f"round {position.round + 1} step {position.step + done}")
            if self._stopped():
                break
        for stats in running:
            total = add(total, sums_of(stats))
            self._watchdog.beat(f"round {position.round + 1} step {position.step + done}")
        return total._replace(done=done - steps.start)

    def _probe_due(self, steps: int) -> bool:
        watch = self._pilot.noise
        return watch is not None and -self.position.step % watch.config.probe_steps < steps

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
                self._engine.programs.prefetch(self._local(parse_strategy(decision.to)))
            if decision.kind in ("keep", "prepare"):
                break
            if self._switch(decision, console):
                break
        if not self._timer:
            for strategy in pilot.likely():
                self._engine.programs.prefetch(strategy)

    def _ready(self, console: RunConsole) -> list[str] | None:
        """Strategies whose programs are compiled in all processes; those that cannot be are
        refused. None under the modelled clock, which counts no compiling."""
        if self._timer:
            return None
        ready = []
        for strategy, code, why in self._engine.standing():
            if code >= FAILED:
                self._refuse(str(strategy), why, code == NO_MEMORY, 0.0, console)
            elif code == READY:
                ready.append(str(strategy))
        return ready

    def _switch(self, decision: Decision, console: RunConsole) -> bool:
        """To the decision's strategy; False where it does not run here, and all is as it was."""
        started = time.perf_counter()
        code, why = self._engine.switch(self._local(parse_strategy(decision.to)))
        seconds = first_says(time.perf_counter() - started)
        if self._timer:
            seconds = self.config.clock.switch_seconds
        self.position.seconds += seconds
        if code != READY:
            # Under the modelled clock memory ran out here, and not on the GPUs that are modelled.
            out_of_memory = code == NO_MEMORY and not self._timer
            self._refuse(decision.to, why, out_of_memory, seconds, console)
            return False
        present = str(self._pilot.strategy)
        self._write_switch(present, decision.to, seconds, decision.kind, decision.reason)
        console.note(
            f"round {self.position.round}: {decision.kind} to {decision.to} in "
            f"{format_seconds(seconds)}: {decision.reason}"
        )
        self._pilot.switched(decision, seconds)
        return True

    def _write_switch(self, old: str, new: str, seconds: float, kind: str, why: str) -> None:
        places = {"from": old, "to": new}
        self._write("switch", **places, switch_seconds=seconds, decision=kind, why=why)

    def _refuse(
        self, name: str, reason: str, out_of_memory: bool, seconds: float, console: RunConsole
    ) -> None:
        self._write("refused", strategy=name, why=reason, switch_seconds=seconds)
        console.warn(f"{name} cannot run here, and is left out from now on: {reason}")
        try:
            self._pilot.refuse(name, reason, out_of_memory)
        except ValueError as failure:
            self._save()
            raise RunError(f"{failure}; the run is saved") from failure

    def _local(self, strategy: Strategy) -> Strategy:
        return local_strategy(self.config, strategy)

    def _stopped(self) -> bool:
        """Whether any process was told to stop; the same answer in all of them."""
        return anyone(self._stop.is_set())

    def _evaluation(self, console: RunConsole) -> None:
        config = self.config.eval
        with self._watchdog.pause():
            result = self._engine.program.evaluate(
                self._engine.state.params,
                lambda rows: self._valid.batches(
                    rows, config.sequences, config.first, config.draws
                ),
                config.batch,
                config.draws,
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
        program = self._engine.program
        order = program.order
        meta = origin(self.config, self._corpus) | {
            "position": asdict(self.position) | {"wall_seconds": self._wall_seconds()},
            "pilot": self._pilot.state(),
            "batch": program.strategy.global_batch,
            "partial": partial_record(self._partial),
            "layer_order": None if order is None else order.tolist(),
        }
        with self._watchdog.pause():
            self._checkpoints.save({"state": self._engine.state}, meta)

    def _fresh(self, program: Program) -> TrainState:
        config = self.config
        if not config.init:
            return program.init(config.seed)
        where = program.state_shardings.params
        return program.init_from(read_init(config.init, config.model, where))

    def _restored(self, meta: dict[str, Any], program: Program) -> Any:
        state, _ = self._checkpoints.restore({"state": program.abstract_state})
        before = meta["layer_order"]
        taken = [state.pop("state")]
        order = None if before is None else np.array(before)
        state = reshard(taken, program.state_shardings, order, program.order)
        return program.carry_over(state, meta["batch"])

    def _write(self, kind: str, **fields: Any) -> None:
        if self._metrics:
            defaults = {"round": self.position.round, "tokens": self.tokens}
            self._metrics.write(kind, **(defaults | fields))

    def _wall_seconds(self) -> float:
        return self.position.wall_seconds + time.perf_counter() - self._resumed_at
