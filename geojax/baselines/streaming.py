# SPDX-License-Identifier: Apache-2.0
"""A Streaming DiLoCo run: fragments of the model in turn, each taken in some steps after it went.

Each slice keeps its own parameters between rounds: what comes in is mixed with them. The shared
fragments are moved by the outer optimizer as in DiLoCo, each from where it was when it last came
in. Invariant: all slices send a fragment at the same step, and take the same result in at the same
later step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from geojax.baselines.fragments import put, take
from geojax.baselines.loop import Loop, Part
from geojax.baselines.setup import added, run_steps
from geojax.baselines.streaming_times import StreamClock, fragment_bytes, parts
from geojax.geomesh.exchange import MeshExchange
from geojax.geomesh.layout import make_layout
from geojax.geomesh.outer import OuterCopy, OuterStep, digest
from geojax.geomesh.sync import Contribution, ErrorFeedback, Synchronizer
from geojax.geomesh.worker import RoundProgress, Worker
from geojax.models.transformer import Params
from geojax.track.console import RunConsole, format_bytes
from geojax.train.step import TrainState


class StreamingTrainer(Loop):
    """One run in one process."""

    def _begin(self) -> None:
        config, streaming = self.config, self.config.streaming
        assert streaming is not None, "a run by Streaming DiLoCo has its settings"
        self._streaming = streaming
        setup, names = self.setup, [s.name for s in config.slices]
        self._parts = parts(
            setup.plan.work[0].inner_steps, streaming.fragments, streaming.lag_steps
        )
        self._outer_step = OuterStep(config.outer)
        exchange = MeshExchange([worker.devices[0] for worker in self.workers])
        schedule = config.exchange.resolve_schedule(len(names))
        self._shared: list[OuterCopy] = []
        self._synchronizers: list[Synchronizer] = []
        self._feedback: list[list[ErrorFeedback | None]] = []
        for index in range(streaming.fragments):
            fragment = self._take(setup.params, index)
            layout = make_layout(fragment, config.exchange)
            synchronizer = Synchronizer(layout, exchange, names, schedule, config.outer.merge)
            leaves = jax.tree.leaves(fragment)
            self._shared.append(self._outer_step.init(fragment))
            self._synchronizers.append(synchronizer)
            self._feedback.append(
                [
                    synchronizer.init_feedback(i, leaves)
                    if config.exchange.error_feedback
                    else None
                    for i in range(len(names))
                ]
            )
        self._clock = self._make_clock()

    def _make_clock(self) -> StreamClock:
        sizes = fragment_bytes(self.config)
        network = self.setup.network
        pattern = self.config.exchange.resolve_schedule(len(self.config.slices))
        seconds = [network.exchange(pattern, size).seconds for size in sizes]
        return StreamClock(
            [w.seconds_per_step for w in self.setup.plan.work],
            self._parts,
            lambda index, begin, seconds: begin + seconds,
            lambda round_, fragment: seconds[fragment],
        )

    def _take(self, params: Params, index: int) -> Params:
        return take(params, index, self._streaming.fragments)

    @property
    def _finished(self) -> bool:
        return self.tokens >= self.config.train.total_tokens

    def _round(self, console: RunConsole) -> tuple[list[Part], dict[str, Any]]:
        position, work = self.position, self.setup.plan.work
        position.round += 1
        progress = [RoundProgress() for _ in self.workers]
        sent = [0] * len(self.workers)
        left_out: set[str] = set()
        for index, part in enumerate(self._parts):
            done = [self._steps(part.before, worker) for worker in self.workers]
            merged = self._exchange(index, done, sent, left_out)
            late = [self._steps(part.beside, worker) for worker in self.workers]
            if merged is not None:
                self._outer_step.apply(self._shared[index], merged, self._progress())
            for i, worker in enumerate(self.workers):
                self._mix(worker, index)
                progress[i] = added(added(progress[i], done[i]), late[i])
        span = self._clock.round(position.round)
        position.seconds = self._clock.seconds
        waits = min(span.idle)
        whole = OuterCopy(self._params(), [shared.opt_state for shared in self._shared])
        return [
            Part(progress[i], span.compute[i], span.idle[i] - waits, waits, 1.0, sent[i])
            for i in range(len(work))
        ], {"hash": digest(whole).hex(), "left_out": sorted(left_out)}

    def _progress(self) -> float:
        return min(1.0, self.tokens / self.config.train.total_tokens)

    def _steps(self, steps: int, worker: Worker) -> RoundProgress:
        """The next `steps` of one slice; the last slice moves the cursor on."""
        position, config = self.position, self.config
        if not steps:
            return RoundProgress()
        size = steps * worker.work.batch
        count = len(self.workers)
        first = position.cursor + worker.index * size
        after = (position.cursor + count * size) * config.data.seq_len / config.train.total_tokens
        span = (self._progress(), min(1.0, after))
        found = run_steps(worker, self.setup, first, steps, span, self._beat)
        if worker.index == count - 1:
            position.cursor += count * size
        return found

    def _exchange(
        self, index: int, done: Sequence[RoundProgress], sent: list[int], left_out: set[str]
    ) -> list[np.ndarray] | None:
        """The merged pseudo-gradient of a fragment; None where no slice could join."""
        skipped = self.config.train.anomalies.max_skipped_fraction
        contributions = []
        for i, (worker, p) in enumerate(zip(self.workers, done, strict=True)):
            local = self._take(worker.program.host(worker.state.params), index)
            pairs = zip(
                jax.tree.leaves(self._shared[index].params), jax.tree.leaves(local), strict=True
            )
            pseudo = [np.ascontiguousarray(shared - mine) for shared, mine in pairs]
            tokens = p.tokens if p.skipped <= skipped * p.done else 0
            contributions.append(Contribution(i, pseudo, tokens, p.steps, self._feedback[index][i]))
        number = (self.position.round - 1) * self._streaming.fragments + index + 1
        merged = self._synchronizers[index].exchange(number, contributions)
        for i, num_bytes in enumerate(merged.sent_bytes):
            sent[i] += num_bytes
        names = (s.name for s in self.config.slices)
        left_out |= {n for n, h in zip(names, merged.headers, strict=True) if not h.tokens}
        found = merged.pseudo_gradients
        return list(found[0]) if found else None

    def _mix(self, worker: Worker, index: int) -> None:
        """A slice's own fragment and the shared one."""
        own = np.float32(self._streaming.local_weight)
        local = worker.program.host(worker.state.params)
        mixed = jax.tree.map(
            lambda mine, shared: own * mine + (1 - own) * shared,
            self._take(local, index),
            self._shared[index].params,
        )
        params = put(local, mixed, index, self._streaming.fragments)
        worker.state = replace(worker.state, params=worker.program.put_params(params))

    def _params(self) -> Params:
        params = self.setup.params
        for index, shared in enumerate(self._shared):
            params = put(params, shared.params, index, self._streaming.fragments)
        return params

    def _state(self) -> Any:
        slices = {}
        for worker in self.workers:
            state = worker.program.host(worker.state)
            kept = {
                "params": state.params,
                "opt_state": state.opt_state,
                "step": state.step,
                "mean_loss": state.mean_loss,
            }
            feedback = [row[worker.index] for row in self._feedback]
            if all(feedback):
                kept["feedback"] = [
                    {"own": f.own} | ({"shard": f.shard} if f.shard.size else {})
                    for f in feedback
                    if f
                ]
            slices[worker.work.name] = kept
        outer = [shared.opt_state for shared in self._shared]
        return {"params": self._params(), "outer_opt_state": outer, "slices": slices}

    def _facts(self) -> dict[str, Any]:
        return {}

    def _restore(self, state: Any, facts: dict[str, Any]) -> None:
        state = jax.tree.map(np.array, state)
        for index, shared in enumerate(self._shared):
            shared.params = self._take(state["params"], index)
            shared.opt_state = state["outer_opt_state"][index]
        for worker in self.workers:
            kept = state["slices"][worker.work.name]
            worker.state = worker.program.put_state(
                TrainState(kept["params"], kept["opt_state"], kept["step"], kept["mean_loss"])
            )
            for row, f in zip(self._feedback, kept.get("feedback", ()), strict=False):
                before = row[worker.index]
                assert before is not None, "error feedback is kept where it is on"
                row[worker.index] = ErrorFeedback(f["own"], f.get("shard", before.shard))
        for number in range(self.position.round):
            self._clock.round(number + 1)

    def _exchange_row(self) -> str:
        streaming, traffic = self._streaming, self.setup.traffic
        pattern = self.config.exchange.resolve_schedule(len(self.workers))
        return (
            f"{self.config.exchange.codec} by {pattern}, {streaming.fragments} fragments in turn, "
            f"taken in {streaming.lag_steps} steps later: {format_bytes(traffic.payload_bytes)} a "
            f"round and slice ({traffic.payload_ratio:.1f}x under fp32)"
        )

    def _start_fields(self) -> dict[str, Any]:
        return {}
