# SPDX-License-Identifier: Apache-2.0
"""A GeoMesh run: rounds of inner steps on every slice, each ended by an exchange.

Every method is a setting of the parts used here: DiLoCo is equal work, fp32 and AdamW; per-step
data parallelism is one inner step of plain SGD with the real optimizer outside. Under CONA the plan
may change at a round's border. Invariant: what a run does next is a function of its config, its
plan and its last checkpoint, nothing else.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from typing import Any

import jax
import numpy as np

from geojax.config import ConfigError, LostRunError, RunConfig
from geojax.data import Corpus, TaskSet, allot
from geojax.geomesh.balance import Plan, SliceWork
from geojax.geomesh.checkpoint import Position, checkpoint_tree, take_over
from geojax.geomesh.clock import (
    Clock,
    Happened,
    MeasuredClock,
    ModelledClock,
    modelled_exchange_seconds,
    modelled_profiles,
    traffic,
)
from geojax.geomesh.exchange import MeshExchange
from geojax.geomesh.layout import make_layout
from geojax.geomesh.options import Preparer, choices, work_strategy
from geojax.geomesh.outer import OuterCopy, OuterStep, check_digests, digest
from geojax.geomesh.parts import (
    chunk_steps,
    evaluate_shared,
    lost_rounds_message,
    read_splits,
)
from geojax.geomesh.profile import measured_profiles
from geojax.geomesh.records import (
    derived_rows,
    left_out,
    round_record,
    slice_record,
    start_record,
)
from geojax.geomesh.steering import Planner, first_plan, record
from geojax.geomesh.sync import Contribution, Synchronizer
from geojax.geomesh.worker import Worker, sharing_devices
from geojax.meshes.axes import assign_devices
from geojax.models.transformer import Params
from geojax.platform import Watchdog
from geojax.track.console import RunConsole, format_seconds
from geojax.track.metrics import MetricsWriter
from geojax.train.agree import out_of_memory, reason
from geojax.train.checkpoint import Checkpoints
from geojax.train.initial import host_params
from geojax.train.origin import check_origin, origin
from geojax.train.program import Program
from geojax.train.steering import make_task, noise_record


class Trainer:
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
        """Plan, programs and state, taken from a checkpoint where there is one.

        Set `stop` to end the run, saved, at the next chunk of inner steps.
        """
        self.config = config
        self.position = Position()
        self._names = [s.name for s in config.slices]
        self._metrics = metrics
        self._checkpoints = checkpoints
        self._corpus = corpus
        self._stop = stop
        self._watchdog = watchdog
        self._sequences, self._valid = read_splits(config, corpus)
        try:
            devices = assign_devices([s.devices for s in config.slices], jax.local_devices())
        except ValueError as error:
            raise ConfigError(str(error)) from error
        task = make_task(config)
        self._program = cache(lambda row, strategy: Program(task, strategy, row))
        self._preparer = Preparer(config, self._program)
        params = host_params(config, resumed=not checkpoints.empty)
        layout = make_layout(params, config.exchange)
        schedule = config.exchange.resolve_schedule(len(self._names))
        self._exchange = MeshExchange([row[0] for row in devices])
        self._synchronizer = Synchronizer(
            layout, self._exchange, self._names, schedule, config.outer.merge
        )
        self._shapes = [x.shape for x in jax.tree.leaves(params)]
        self._outer_step = OuterStep(config.outer)
        self.traffic = traffic(config)
        meta = None if checkpoints.empty else checkpoints.meta()
        self.exchange_seconds: float | None = None  # where it is modelled
        self._clock: Clock = MeasuredClock()
        if config.clock.kind == "modelled":
            self.exchange_seconds = modelled_exchange_seconds(config, self.traffic.payload_bytes)
            self._clock = ModelledClock(self.exchange_seconds)
        self._others = meta["slices"] if meta and meta["slices"] != self._names else []
        if meta:
            check_origin(meta, config, corpus, any_slices=True)
        if meta and not self._others:
            self._planner = Planner.restored(config, meta)
        else:
            self._planner = self._make_planner(devices, params)
        self.workers = []
        for index, (work, row) in enumerate(zip(self.plan.work, devices, strict=True)):
            outer = self._outer_step.init(params)
            feedback = None
            if config.exchange.error_feedback:
                feedback = self._synchronizer.init_feedback(index, jax.tree.leaves(params))
            program = self._program(row, work_strategy(config, index, work))
            steps = chunk_steps(config, self.plan)
            self.workers.append(Worker(index, work, steps, program, outer, feedback))
        self.resumed = meta is not None
        self._again = 0
        """Inner steps of a round that other slices had begun."""
        self._groups = sharing_devices(self.workers)
        if meta:
            self._restore(meta)
            metrics.rewind(self.position.round, meta["slices"])
            if self._others:
                metrics.write(
                    "slices",
                    **{"round": self.position.round, "from": self._others, "to": self._names},
                    plan=str(self.plan),
                )
        else:
            metrics.clear()
            metrics.write("start", **start_record(config, self.plan, self.traffic))
        self._warm_up()
        self._resumed_at = time.perf_counter()

    @property
    def plan(self) -> Plan:
        """In force."""
        return self._planner.plan

    @property
    def tokens(self) -> int:
        """Predicted tokens up to the last round border, over all slices."""
        return self.position.cursor * self.config.data.seq_len

    def describe(self) -> list[tuple[str, str]]:
        """What the run derived from its config, as (label, value)."""
        shared = len(self._groups) < len(self.workers)
        rows = derived_rows(self.config, self.plan, self.traffic, self.exchange_seconds, shared)
        if self._others:
            rows.append(("slices before", f"{', '.join(self._others)}; others from here on"))
        if self._again:
            rows.append(("done again", f"{self._again} inner steps of the open round"))
        return rows

    def run(self, console: RunConsole) -> bool:
        """Train to the end; False if it was stopped before. Either way the state is saved."""
        try:
            return self._run(console)
        finally:
            self._preparer.close()

    def _run(self, console: RunConsole) -> bool:
        total, position = self.config.train.total_tokens, self.position
        if not self.resumed:
            self._evaluation(console)
        while self.tokens < total:
            shares, cursor = allot(position.cursor, [w.sequences for w in self.plan.work])
            self._inner_steps(shares, cursor)
            if not all(w.finished for w in self.workers):
                self._save(mid_round=True)
                return False
            before = self.tokens
            self._end_round(cursor, console)
            every = self.config.eval.every_tokens
            if self.tokens >= total or (every and self.tokens // every > before // every):
                self._evaluation(console)
            if self.tokens < total and self.config.cona:
                self._steer(console)
            interval = self.config.checkpoint.every_rounds
            due = interval and position.round % interval == 0
            if due or self.tokens >= total or self._stop.is_set():
                self._save(mid_round=False)
            if self.tokens < total and self._stop.is_set():
                return False
        self._checkpoints.wait()  # a run that says it ended can be read from its checkpoint
        self._metrics.write(
            "end",
            round=position.round,
            tokens=self.tokens,
            seconds=position.seconds,
            reason="all tokens seen",
        )
        return True

    def _warm_up(self) -> None:
        """Compile what rounds run, so that none of them is longer for it."""
        for worker in self.workers:
            worker.compile()
        self._empty_exchange()
        self._check_copies()
        spare = self._outer_step.init(self.workers[0].outer.params)
        self._outer_step.apply(spare, self._no_change(), 0.0)

    def _no_change(self) -> list[np.ndarray]:
        """A pseudo-gradient of zeros."""
        return [np.zeros(shape, np.float32) for shape in self._shapes]

    def _empty_exchange(self) -> float:
        """An exchange of messages that no slice joins, which changes nothing; its real seconds."""
        nothing = self._no_change()
        absent = [Contribution(i, nothing, 0, 0, None) for i in range(len(self._names))]
        return self._synchronizer.exchange(0, absent).exchange_seconds

    def _make_planner(self, devices: Sequence[tuple[jax.Device, ...]], params: Params) -> Planner:
        config = self.config
        if config.clock.kind == "measured":
            strategies = choices(config, devices)
            profiles = measured_profiles(config, devices, strategies, self._program, params)
        else:
            profiles = modelled_profiles(config)
        seconds = self.exchange_seconds
        if seconds is None and (config.balance.sync_share or config.cona):
            self._empty_exchange()
            seconds = self._empty_exchange()  # the first one compiled
        plan = first_plan(config, profiles, seconds or 0.0)
        return Planner(config, plan, profiles, seconds or 0.0)

    def _steer(self, console: RunConsole) -> None:
        """Ask the planner, and go over to another plan if it says so."""
        position, before = self.position, self.plan
        facts = {"round": position.round, "tokens": self.tokens}
        situation, decision = self._planner.propose(position.round, position.cursor)
        self._metrics.write("plan", **facts, **record(situation, decision))
        if decision.kind == "keep":
            if decision.best:
                self._preparer.prepare(decision.best, self.workers)
            return
        started = time.perf_counter()
        with self._watchdog.pause():
            failed = self._take_up(decision.plan)
        seconds = time.perf_counter() - started
        if self.config.clock.kind == "modelled":
            seconds = self.config.clock.switch_seconds
        position.seconds += seconds
        if failed:
            work, why = failed
            self._planner.refuse(work, out_of_memory(why))
            what = {"slice": work.name, "strategy": work.strategy, "why": why}
            self._metrics.write("refused", **facts, **what, switch_seconds=seconds)
            console.warn(
                f"round {position.round}, slice {work.name}: {work.strategy} cannot run here, and "
                f"is left out from now on: {why}"
            )
            return
        self._planner.changed(decision.plan, seconds)
        places = {"from": str(before), "to": str(self.plan)}
        why = {"why": decision.reason, "decision": decision.kind}
        self._metrics.write("switch", **facts, **places, switch_seconds=seconds, **why)
        console.note(
            f"round {position.round}: change to {self.plan} in {format_seconds(seconds)}: "
            f"{decision.reason}"
        )

    def _take_up(self, plan: Plan) -> tuple[SliceWork, str] | None:
        """Go over to another plan; the work that failed and why, all being as it was."""
        previous = [(w.work, w.program) for w in self.workers]
        for taken, (worker, work) in enumerate(zip(self.workers, plan.work, strict=True)):
            try:
                strategy = work_strategy(self.config, worker.index, work)
                program = self._program(worker.devices, strategy)
                worker.take_up(work, chunk_steps(self.config, plan), program)
            except jax.errors.JaxRuntimeError as failure:
                why = reason(failure)
                for other, (old, program) in list(zip(self.workers, previous, strict=True))[:taken]:
                    other.take_up(old, chunk_steps(self.config, self.plan), program)
                return work, why
        return None

    def _inner_steps(self, shares: Sequence[range], cursor: int) -> None:
        """What is left of the round's inner steps; slices on other devices work side by side."""
        seq_len, total = self.config.data.seq_len, self.config.train.total_tokens
        span = (self.tokens / total, cursor * seq_len / total)
        started = time.perf_counter()

        def stopped() -> bool:
            self._watchdog.beat(f"inner steps of round {self.position.round + 1}")
            return self._stop.is_set()

        def work(group: Sequence[Worker]) -> None:
            for worker in group:
                worker.scale = self._planner.scale(worker.index)
                worker.probe = self._planner.probe_due(worker.index)
                if worker.finished or self._stop.is_set():
                    continue
                ahead = self.config.exchange.steps_ahead(worker.work.inner_steps)
                worker.work_on(self._sequences, shares[worker.index], span, stopped, ahead)

        with ThreadPoolExecutor(len(self._groups)) as pool:
            list(pool.map(work, self._groups))
        self.position.inner_seconds += time.perf_counter() - started

    def _end_round(self, cursor: int, console: RunConsole) -> None:
        """Exchange, outer step, hash check, accounts."""
        position = self.position
        position.round += 1
        started = time.perf_counter()
        contributions = [w.contribution() for w in self.workers]
        merged = self._synchronizer.exchange(position.round, contributions)
        ahead = self._go_on(contributions, cursor)
        if merged.pseudo_gradients:
            progress = self.tokens / self.config.train.total_tokens
            for worker, gradient in zip(self.workers, merged.pseudo_gradients, strict=True):
                self._outer_step.apply(worker.outer, gradient, progress)
        position.lost_rounds = 0 if merged.pseudo_gradients else position.lost_rounds + 1
        copy_hash = self._check_copies()
        position.cursor = cursor
        outer_seconds = time.perf_counter() - started - merged.exchange_seconds
        slices = len(self.workers)
        happened = Happened(
            [w.ended.compute_seconds for w in self.workers],
            position.inner_seconds,
            merged.exchange_seconds,
            outer_seconds,
            position.behind or [0] * slices,
            ahead,
            position.late or [0.0] * slices,
        )
        times = self._clock.round(self.plan, happened)
        position.seconds += times.total
        position.inner_seconds, position.late, position.behind = 0.0, times.late, ahead
        self._planner.observe(
            cursor,
            [w.ended.steps for w in self.workers],
            [w.ended.noise for w in self.workers],
        )

        records = []
        for worker, contribution, sent in zip(
            self.workers, contributions, merged.sent_bytes, strict=True
        ):
            part = slice_record(worker, contribution, sent, self.traffic)
            part |= times.fields(worker.index)
            self._metrics.write("slice", round=position.round, **part)
            records.append(part)
            if worker.ended.skipped:
                console.warn(
                    f"round {position.round}, slice {worker.work.name}: skipped "
                    f"{worker.ended.skipped} of {worker.ended.done} inner steps (loss or "
                    "gradient not finite, or a spike)"
                )
            if not worker.sent:
                worker.end_round()
        missing = left_out(merged.headers, self._names)
        if missing:
            console.warn(
                f"round {position.round}: left out {', '.join(missing)}, whose update was not "
                "finite or came from too few good steps"
            )
        line = round_record(merged, self.traffic) | {
            "round": position.round,
            "round_seconds": times.total,
            "tokens": self.tokens,
            "seconds": position.seconds,
            "hash": copy_hash,
            "left_out": missing,
            "wall_seconds": self._wall_seconds(),
        }
        if self.config.cona:
            line |= {"strategy": str(self.plan), "noise": noise_record(self._planner.watch)}
        line["samples"] = position.cursor
        self._metrics.write("round", **line)
        console.round_line(line, records)
        if position.lost_rounds >= self.config.train.anomalies.max_lost_rounds:
            raise LostRunError(lost_rounds_message(self.config, position.lost_rounds))

    def _go_on(self, contributions: Sequence[Contribution], cursor: int) -> list[int]:
        """Slices that were merged begin the next round, where it may begin before they take this
        one's result in: the steps that each does until then."""
        last = cursor * self.config.data.seq_len >= self.config.train.total_tokens
        steps = []
        for worker, contribution in zip(self.workers, contributions, strict=True):
            ahead = self.config.exchange.steps_ahead(worker.work.inner_steps)
            if last or not contribution.tokens:
                ahead = 0
            if ahead:
                worker.go_on()
            steps.append(ahead)
        return steps

    def _check_copies(self) -> str:
        """Every slice sends every other the digest of its copy; all compare. Returns it in hex."""
        own = [digest(w.outer) for w in self.workers]
        received = self._exchange.all_gather([np.frombuffer(d, np.uint8) for d in own])
        for row in received:
            check_digests([d.tobytes() for d in row], self._names, self.position.round)
        return own[0].hex()

    def _evaluation(self, console: RunConsole) -> None:
        with self._watchdog.pause():
            result = evaluate_shared(self.workers[0], self._valid, self.config)
        position = self.position
        facts = {"round": position.round, "tokens": self.tokens, "seconds": position.seconds}
        record = facts | result
        self._metrics.write("eval", **record)
        console.eval_line(record)

    def _save(self, mid_round: bool) -> None:
        state = checkpoint_tree(self.workers, mid_round)
        meta = origin(self.config, self._corpus) | {
            "position": asdict(self.position) | {"wall_seconds": self._wall_seconds()},
            **self._planner.state(),
            "mid_round": mid_round,
            "slices_at": [w.facts() for w in self.workers],
        }
        with self._watchdog.pause():
            self._checkpoints.save(state, meta)

    def _restore(self, meta: dict[str, Any]) -> None:
        if self._others:
            state, meta = self._checkpoints.restore(None)
            take_over(self.workers, state)
            here = {"inner_seconds": 0.0, "late": [], "behind": []}
            self.position = Position(**meta["position"] | here)
            self._again = sum(facts["progress"]["done"] for facts in meta["slices_at"])
            return
        abstract = jax.eval_shape(lambda: checkpoint_tree(self.workers, meta["mid_round"]))
        for worker, facts in zip(self.workers, meta["slices_at"], strict=True):
            if facts["sent"] is not None:
                sent = jax.tree.leaves(abstract["params"])
                abstract["slices"][worker.work.name]["sent"] = sent
        state, meta = self._checkpoints.restore(abstract)
        self.position = Position(**meta["position"])
        for worker, facts in zip(self.workers, meta["slices_at"], strict=True):
            shared = jax.tree.map(np.array, (state["params"], state["outer_opt_state"]))
            kept = state["slices"][worker.work.name]
            worker.restore(kept, OuterCopy(*shared), facts)

    def _wall_seconds(self) -> float:
        return self.position.wall_seconds + time.perf_counter() - self._resumed_at
