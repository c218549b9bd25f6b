# SPDX-License-Identifier: Apache-2.0
"""A GeoMesh run of which this process holds one slice, and other processes the others.

It does what geojax.geomesh.trainer does for all slices, for one; geojax.geomesh.wan says which
slices are in a round and moves their messages. Invariant: the shared parameters are, bit for bit,
those of a run in one process that merged the same samples in the same rounds.

With exchange.overlap a slice goes on, once its message is made, with the samples that it was given
for the next round (geojax.geomesh.wan.samples), and takes the result in after a fixed number of
steps, however long the exchange took. It goes back to what is shared, and the steps are lost, where
the round ends without it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import jax
import numpy as np

from geojax.config import (
    ConfigError,
    LostRunError,
    RunConfig,
    RunError,
    SliceConfig,
)
from geojax.data import Corpus, TaskSet
from geojax.geomesh.agreed import Agreed
from geojax.geomesh.balance import Plan
from geojax.geomesh.clock import modelled_exchange_seconds, traffic
from geojax.geomesh.layout import make_layout
from geojax.geomesh.message import version
from geojax.geomesh.options import Preparer, choices, work_strategy
from geojax.geomesh.outer import OuterStep, digest
from geojax.geomesh.parts import (
    chunk_steps,
    evaluate_shared,
    lost_rounds_message,
    read_splits,
)
from geojax.geomesh.profile import measured_profiles
from geojax.geomesh.records import derived_rows, left_out, start_record
from geojax.geomesh.slice_checkpoint import Saved, restore, save
from geojax.geomesh.slice_feedback import SliceFeedback
from geojax.geomesh.slice_records import Closed, SliceRecords
from geojax.geomesh.slice_work import OpenWork
from geojax.geomesh.sync import Synchronizer, payload_bytes
from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.rounds import run_rounds
from geojax.geomesh.wan.samples import Share, in_order
from geojax.geomesh.wan.seat import Message, Seat, Stopped
from geojax.geomesh.worker import Worker
from geojax.meshes.axes import assign_devices
from geojax.platform import Watchdog
from geojax.track.console import RunConsole
from geojax.train.checkpoint import Checkpoints
from geojax.train.initial import host_params
from geojax.train.program import Program
from geojax.train.steering import make_task


class SliceTrainer:
    """One slice of a run."""

    def __init__(
        self,
        config: RunConfig,
        index: int,
        corpus: Corpus | TaskSet,
        checkpoints: Checkpoints,
        watchdog: Watchdog,
    ):
        """State, taken from this slice's last checkpoint where there is one."""
        self.config, self.index = config, index
        self._corpus, self._checkpoints, self._watchdog = corpus, checkpoints, watchdog
        self._names = [s.name for s in config.slices]
        self._sequences, self._valid = read_splits(config, corpus)
        self._devices = _devices_of(config.slices[index])
        task = make_task(config, evaluates=True)
        self._program = cache(lambda row, strategy: Program(task, strategy, row))
        self._preparer = Preparer(config, self._program)
        params = host_params(config, resumed=not checkpoints.empty)
        layout = make_layout(params, config.exchange)
        merge = config.outer.merge
        self._synchronizer = Synchronizer(layout, None, self._names, "gather", merge)
        self.check, self.message_bytes = self._synchronizer.check, payload_bytes(layout)
        self._outer_step = OuterStep(config.outer)
        self._outer = self._outer_step.init(params)
        self.state_bytes = sum(leaf.nbytes for leaf in self._shared_leaves())
        feedback = None
        if config.exchange.error_feedback:
            feedback = self._synchronizer.init_feedback(index, jax.tree.leaves(params))
        self._feedback = SliceFeedback(feedback)
        self.traffic = traffic(config)
        self._exchange_seconds: float | None = None  # where it is modelled
        if config.clock.kind == "modelled":
            self._exchange_seconds = modelled_exchange_seconds(config, self.traffic.payload_bytes)
        self._agreed = Agreed(config, self._exchange_seconds)
        self._text = [corpus.folder.name, corpus.tokenizer_fingerprint]
        self.epoch = self.border = 0
        self._lost_rounds = 0
        self._worker: Worker | None = None
        self._plan: Plan | None = None  # the worker's
        self._reached: tuple[int, int] | None = None
        self._digest: tuple[tuple[int, int], str] | None = None
        self._open = OpenWork()
        self._records = SliceRecords(
            config, self.traffic, self.message_bytes, self._exchange_seconds
        )
        self._saved: Saved | None = None
        self.resumed = not checkpoints.empty
        if self.resumed:
            name = self._names[index]
            self._saved = restore(checkpoints, config, corpus, name, self._outer, self._feedback)
            self.epoch, self.border = (self._saved.meta[k] for k in ("epoch", "border"))
            self._records.wall_before = self._saved.meta["wall_seconds"]

    def describe(self) -> list[tuple[str, str]]:
        """What the run derived from its config, as (label, value)."""
        return derived_rows(
            self.config, self._agreed.plan, self.traffic, self._exchange_seconds, False
        )

    def run(self, member: Seat, console: RunConsole) -> bool:
        """To the end of the run; False if it was stopped before. Either way the state is saved."""
        self._member, self._console = member, console
        self._records.begin(member, console)
        if self._saved:  # what the process before could not send
            member.record(*self._saved.meta["records"])
        member.while_waiting(lambda: self._watchdog.beat("waiting for others"))
        try:
            run_rounds(member, self)
        except Stopped:
            self._save(mid_round=True)
            return False
        finally:
            self._preparer.close()
            self._checkpoints.wait()
        return True

    # What geojax.geomesh.wan.rounds asks for, in the order of a round.

    def digest(self) -> str:
        place = (self.epoch, self.border)
        if self._digest is None or self._digest[0] != place:
            self._digest = (place, digest(self._outer).hex())
        return self._digest[1]

    def arrays(self) -> Sequence[np.ndarray]:
        return [np.ascontiguousarray(leaf) for leaf in self._shared_leaves()]

    def facts(self, member: Seat) -> Mapping[str, Any]:
        config = self.config
        facts: dict[str, Any] = {"corpus": self._text, "exchange_seconds": 0.0}
        if config.clock.kind == "modelled":
            return facts
        mine, rows = replace(config, slices=(config.slices[self.index],)), [self._devices]
        strategies = choices(mine, rows)
        profiles = measured_profiles(mine, rows, strategies, self._program, self._outer.params)
        facts["profile"] = asdict(profiles[0])
        if config.balance.sync_share or config.cona:
            member.wait(lambda history: member.knows_all())
            message = np.zeros(self.message_bytes, np.uint8)
            member.probe(message)  # the connections
            facts["exchange_seconds"] = member.probe(message)
        return facts

    def follow(self, history: History) -> None:
        assert history.start is not None, "the run has begun"
        self._agreed.follow(history, self.border)
        texts = [facts["corpus"] for facts in history.start["facts"].values()]
        if any(text != self._text for text in texts):
            raise RunError(
                f"slices have different texts or tokenizers: {texts}, and {self._text} here; give "
                "all of them the same"
            )

    @property
    def finished(self) -> bool:
        return self._agreed.finished

    def reached(self, history: History) -> None:
        if self._reached == (self.epoch, self.border):
            return
        first, self._reached = self._reached is None, (self.epoch, self.border)
        if self._feedback.settled > self.border:  # of a round that was undone
            self._feedback.settled = self.border
            self._forget_feedback(history)
        with self._open.accounts.busy():
            self._stand_at_border(first)

    def _stand_at_border(self, first: bool) -> None:
        agreed, fresh = self._agreed, first and not self.resumed
        if self._worker is None:
            with self._watchdog.pause():
                self._make_worker()
            if self.index == 0:  # all would say the same
                self._console.header("derived", self.describe())
        if not self.border and fresh:
            self._tell("start", **start_record(self.config, agreed.plan, self.traffic))
        total, every = self.config.train.total_tokens, self.config.eval.every_tokens
        tokens, before = agreed.tokens, agreed.tokens_before
        due = tokens >= total or (every and tokens // every > before // every)
        if fresh or (due and not first):
            self._member.tell(phase="busy")
            with self._watchdog.pause():
                result = evaluate_shared(self.worker, self._valid, self.config)
            self._tell("eval", tokens=tokens, seconds=None, **result)
        if agreed.considered:
            self._tell("plan", tokens=tokens, **agreed.considered)
        if self._plan != agreed.plan:
            self._take_up()
        if agreed.likely:
            self._preparer.prepare(agreed.likely, [self.worker])
        interval = self.config.checkpoint.every_rounds
        if first:
            there = self._saved is not None and self._saved.is_of(self.epoch, self.border)
            due = self.finished and not there
        else:
            due = self.finished or (interval and self.border % interval == 0)
        if due:
            self._save(mid_round=self.worker.sent is not None)

    def work(self, members: Sequence[int]) -> None:
        worker, agreed = self.worker, self._agreed
        opened = agreed.open(members)
        mine, ahead = opened.shares[self.index], opened.ahead.get(self.index, ())
        sent = self._open.take(worker, self.border + 1, mine, ahead)
        span, self._ahead_span = agreed.spans(opened)
        if sent or worker.finished:
            return
        if self._member.stopping:
            raise Stopped
        worker.scale = agreed.planner.scale(self.index)
        worker.probe = agreed.planner.probe_due(self.index)
        if worker.sent:
            self._go_ahead(mine, span)
        with self._open.accounts.outer():
            worker.begin_round()
        worker.run(self._sequences, in_order(mine), span, self._stopped)
        if not worker.finished:
            raise Stopped

    def message(self) -> tuple[Message, Mapping[str, Any]]:
        worker = self.worker
        with self._open.accounts.outer():
            contribution = worker.contribution()
            contribution.feedback = self._feedback.for_message()
            message = self._synchronizer.pack(self.border + 1, contribution)
        self._open.contribution, self._open.version = contribution, version(message)
        p = worker.ended
        facts = {
            "steps": p.steps,
            "noise": {source: list(map(float, sums)) for source, sums in p.noise.items()},
            "step_seconds": p.compute_seconds / p.done,
            "exchange_seconds": self._records.exchanged_seconds,
            "expected_seconds": self._agreed.plan.compute_seconds,
        }
        return message, facts

    def go_on(self) -> bool:
        work = self._open
        assert work.contribution, "its message was made"
        if not work.ahead or not work.contribution.tokens:
            return False
        work.go_on(self.worker, self.border + 1)
        self._go_ahead(work.ahead, self._ahead_span)
        return True

    def settle(self, number: int, merged: str, history: History) -> None:
        feedback = self._feedback
        if number <= feedback.settled:
            return
        feedback.settled = number
        saved = self._saved
        if merged and not self._open.contribution and saved and saved.round == number:
            self._agreed.follow(history, number - 1)
            self._make_worker()
            if self.worker.finished or self._open.sent_round == number:
                self.message()
        if merged and self._open.contribution and merged == self._open.version:
            feedback.merged(number, self._open.contribution.feedback)
        else:
            if merged:
                self._forget_feedback(history)
            self._open.drop(self._worker)
        if self._worker:
            self._worker.feedback = feedback.value

    def apply(self, number: int, row: Sequence[Message | None], history: History) -> None:
        started, agreed = time.perf_counter(), self._agreed
        agreed.follow(history, number - 1)
        plan, members = agreed.plan, history.members_of(number)
        progress = agreed.tokens / self.config.train.total_tokens
        most = agreed.most(members)
        result = self._synchronizer.merge(number, row, jax.tree.leaves(self._outer.params), most)
        if result.pseudo_gradients:
            self._outer_step.apply(self._outer, result.pseudo_gradients[0], progress)
        found = digest(self._outer).hex()
        self._digest = ((history.epoch, number), found)
        agreed.follow(history, number)
        applied = time.perf_counter() - started
        missing = left_out(result.headers, self._names)
        merged = history.rounds[number - 1]["merged"]
        if self._open.contribution:
            closed = Closed(number, plan, members, merged, result, missing, found)
            self._records.round(closed, self.worker, self._open, agreed)
        self._open.merged(self._worker, number)
        self._open.accounts.outer_seconds = applied
        if poor := [name for name in missing if self._names.index(name) in merged]:
            self._console.warn(
                f"round {number}: left out {', '.join(poor)}, whose update was not finite or came "
                "from too few good steps"
            )
        self._lost_rounds = 0 if result.pseudo_gradients else self._lost_rounds + 1
        if self._lost_rounds >= self.config.train.anomalies.max_lost_rounds:
            raise LostRunError(lost_rounds_message(self.config, self._lost_rounds))

    def adopt(self, data: np.ndarray, border: int, history: History) -> None:
        leaves, start = [], 0
        for leaf in self._shared_leaves():
            part = data[start : start + leaf.nbytes]
            leaves.append(part.view(leaf.dtype).reshape(leaf.shape).copy())
            start += leaf.nbytes
        self._saved = self._saved and self._saved.of_another_round()
        tree = jax.tree.structure((self._outer.params, self._outer.opt_state))
        self._outer.params, self._outer.opt_state = jax.tree.unflatten(tree, leaves)
        self._digest = None
        feedback = self._feedback
        if history.last_merged(self.index) > feedback.round or border < feedback.settled:
            self._forget_feedback(history)
        feedback.settled = border
        self._open.drop(self._worker)

    # Parts of these.

    @property
    def worker(self) -> Worker:
        assert self._worker, "made at the first border"
        return self._worker

    def _shared_leaves(self) -> list[np.ndarray]:
        return jax.tree.leaves((self._outer.params, self._outer.opt_state))

    def _go_ahead(self, share: Share, span: tuple[float, float]) -> None:
        """What is left of the steps before the result is taken in. Stopped."""
        worker = self.worker
        steps = self.config.exchange.steps_ahead(worker.work.inner_steps)
        worker.run(self._sequences, in_order(share), span, self._stopped, steps)
        if worker.progress.done < steps:
            raise Stopped

    def _stopped(self) -> bool:
        self._watchdog.beat(f"inner steps after round {self.border}")
        return self._member.stopping

    def _make_worker(self) -> None:
        """For the plan in force; with what the checkpoint holds of it, if that is of this round."""
        if self._worker is not None:
            return
        self._plan = plan = self._agreed.plan
        work, steps = plan.work[self.index], chunk_steps(self.config, plan)
        program = self._program(self._devices, work_strategy(self.config, self.index, work))
        worker = Worker(self.index, work, steps, program, self._outer, self._feedback.value)
        if self._saved:
            self._saved.give(worker, self._outer, self.border + 1, self._open)
            worker.feedback = self._feedback.value
        worker.compile()
        self._worker = worker

    def _take_up(self) -> None:
        """The plan that was agreed on, in place of the one before."""
        agreed, worker, started = self._agreed, self.worker, time.perf_counter()
        self._plan = agreed.plan
        work, steps = agreed.plan.work[self.index], chunk_steps(self.config, agreed.plan)
        strategy = work_strategy(self.config, self.index, work)
        self._member.tell(phase="busy")
        with self._watchdog.pause():
            worker.take_up(work, steps, self._program(self._devices, strategy))
        seconds = time.perf_counter() - started
        if self.config.clock.kind == "modelled":
            seconds = self.config.clock.switch_seconds
        if agreed.changed is None:
            return
        before, decision = agreed.changed
        self._tell(
            "switch",
            tokens=agreed.tokens,
            **{"from": str(before), "to": str(agreed.plan)},
            switch_seconds=seconds,
            why=decision.reason,
            decision=decision.kind,
        )

    def _forget_feedback(self, history: History) -> None:
        """It is not what this slice's messages left over: another process sent some."""
        self._feedback.forget(history.last_merged(self.index))
        if self._worker:
            self._worker.feedback = self._feedback.value

    def _tell(self, kind: str, **fields: Any) -> None:
        self._records.tell(kind, self.border, **fields)

    def _save(self, mid_round: bool) -> None:
        if self._worker is None:
            return  # what was restored is still on disk
        place = {
            "epoch": self.epoch,
            "border": self.border,
            "feedback_round": self._feedback.round,
            "wall_seconds": self._records.wall_seconds,
        }
        with self._watchdog.pause():
            save(
                self._checkpoints,
                self.config,
                self._corpus,
                self._worker,
                self._open,
                place,
                self._member.unwritten,
                mid_round,
            )


def _devices_of(slice_: SliceConfig) -> tuple[jax.Device, ...]:
    """Equally many of each of its processes."""
    share = slice_.devices // slice_.processes
    found: list[jax.Device] = []
    for number in range(slice_.processes):
        try:
            found += assign_devices([share], jax.local_devices(process_index=number))[0]
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return tuple(found)
