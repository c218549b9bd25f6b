# SPDX-License-Identifier: Apache-2.0
"""One slice at work: its devices, its training state, and its share of the round.

Invariant: between rounds a worker's parameters are its copy of the shared ones; during a round,
`progress` and the training state together say exactly how far it is, so that it can be saved and
continued at any chunk.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from geojax.cona.noise import Moments
from geojax.data import Batch, TrainSequences, empty_batch
from geojax.geomesh.balance import SliceWork
from geojax.geomesh.outer import OuterCopy
from geojax.geomesh.sync import Contribution, ErrorFeedback
from geojax.train.program import Program
from geojax.train.step import TrainState, init_state


@dataclass
class RoundProgress:
    """Where a slice is in its round, and what its steps gave so far."""

    done: int = 0
    """Inner steps, skipped ones included."""
    loss: float = 0.0
    """Sum over loss-bearing tokens, in nats."""
    tokens: int = 0
    grad_norm: float = 0.0
    """Sum over steps."""
    steps: int = 0
    """Inner steps that were not skipped."""
    skipped: int = 0
    compute_seconds: float = 0.0
    noise: Mapping[str, Moments] = field(default_factory=dict)
    """Sums over steps, by source; empty where noise is not measured."""


class Worker:
    """One local slice."""

    def __init__(
        self,
        index: int,
        work: SliceWork,
        chunk_steps: int,
        program: Program,
        outer: OuterCopy,
        feedback: ErrorFeedback | None,
    ):
        """`index`: place among all slices; `chunk_steps`: inner steps handed to the devices at
        once; `program`: of the slice's devices and strategy; `outer`: this slice's copy of what is
        shared.
        """
        self.index = index
        self.work = work
        self.program = program
        self.outer = outer
        self.feedback = feedback
        self.progress = RoundProgress()
        self.scale = 1.0
        """Factor on the learning rate."""
        self.probe = False
        """Whether a round begins with a step that measures the noise of the whole gradient."""
        self._chunk_steps = chunk_steps
        self.state: Any = program.put_state(init_state(outer.params, program.task.train))
        """A TrainState, donated to each call of `program.run`."""

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        return self.program.devices

    def compile(self) -> None:
        """Compile the inner loop now, with no step taken, so that no round's time includes it."""
        lead = (self._chunk_steps, self.work.batch)
        chunk = self.program.put_chunk(empty_batch(lead, self.program.task.seq_len))
        self.state, _ = self.program.run(self.state, chunk, 0, 0.0, 0.0, 0)
        if self.program.wants_probes:
            self.program.compile(1, probe=True)
        jax.block_until_ready(self.state)  # what the devices raise is raised here

    def take_up(self, work: SliceWork, chunk_steps: int, program: Program) -> None:
        """Another part of another plan, at a round border: the optimizer's state moves to `program`
        by way of the host; error feedback, which is of the shape of the parameters, stays.

        What the compiler or the devices raise leaves the worker as it was.
        """
        before = self.work, self._chunk_steps, self.program
        state = self.program.host(self.state)
        try:
            self.work, self._chunk_steps = work, chunk_steps
            if program is not self.program:
                batch = self.program.strategy.global_batch
                self.program, self.state = program, None  # there may be no room for both
                self.state = program.carry_over(program.put_state(state), batch)
            self.compile()
        except jax.errors.JaxRuntimeError:
            self.work, self._chunk_steps, self.program = before
            self.state = None  # what is there takes the room
            self.state = self.program.put_state(state)
            raise

    def begin_round(self) -> None:
        """Start from the shared parameters."""
        self.state = replace(self.state, params=self.program.put_params(self.outer.params))

    def run(
        self,
        sequences: TrainSequences,
        share: range | np.ndarray,
        progress: tuple[float, float],
        stopped: Callable[[], bool],
    ) -> None:
        """Do what is left of the round's inner steps, or up to the chunk at which `stopped`.

        `share`: this slice's global samples, in order; `progress`: of the run, before and after
        the round.
        """
        begin, end = progress
        stride = (end - begin) / self.work.inner_steps
        for chunk, real, probe in self._chunks(sequences, share):
            started = time.perf_counter()
            p = self.progress
            self.state, stats = self.program.run(
                self.state,
                self.program.put_chunk(chunk),
                real,
                begin,
                stride,
                p.done,
                self.scale,
                probe,
            )
            stats = jax.device_get(stats)
            self.progress = RoundProgress(
                p.done + real,
                p.loss + float(stats.loss),
                p.tokens + int(stats.tokens),
                p.grad_norm + float(stats.grad_norm),
                p.steps + int(stats.steps),
                p.skipped + int(stats.skipped),
                p.compute_seconds + time.perf_counter() - started,
                _added(p.noise, stats.noise),
            )
            if stopped():
                return

    def _chunks(
        self, sequences: TrainSequences, share: range | np.ndarray
    ) -> Iterator[tuple[Batch, int, bool]]:
        """What is left of the round: a chunk, its real steps, and whether it is a probe. Where
        chunks begin does not depend on where the round was interrupted."""
        batch, done = self.work.batch, self.progress.done

        def after(steps: int) -> int | np.ndarray:
            rest = share[steps * batch :]
            return rest.start if isinstance(rest, range) else rest

        if self.probe and self.program.wants_probes and not done:
            for chunk, real in sequences.chunks(after(0), 1, batch, 1):
                yield chunk, real, True
            done = 1
        left = self.work.inner_steps - done
        if left:
            for chunk, real in sequences.chunks(after(done), left, batch, self._chunk_steps):
                yield chunk, real, False

    def end_round(self) -> None:
        """The round's exchange is over."""
        self.progress = RoundProgress()

    @property
    def finished(self) -> bool:
        """Whether the round's inner steps are done."""
        return self.progress.done == self.work.inner_steps

    def contribution(self) -> Contribution:
        """To the round's exchange; of no weight where too many steps were skipped."""
        p, anomalies = self.progress, self.program.task.train.anomalies
        tokens = p.tokens if p.skipped <= anomalies.max_skipped_fraction * p.done else 0
        return Contribution(self.index, self.pseudo_gradient(), tokens, p.steps, self.feedback)

    def pseudo_gradient(self) -> list[np.ndarray]:
        """Shared minus local parameters, one float32 host array a leaf."""
        local = self.program.host(self.state.params)
        pairs = zip(jax.tree.leaves(self.outer.params), jax.tree.leaves(local), strict=True)
        return [np.ascontiguousarray(shared - mine) for shared, mine in pairs]

    def checkpoint(self, mid_round: bool) -> dict[str, Any]:
        """What a checkpoint holds of this slice alone; local parameters only inside a round."""
        state = self.program.host(self.state)
        kept: dict[str, Any] = {
            "opt_state": state.opt_state,
            "step": state.step,
            "mean_loss": state.mean_loss,
        }
        if self.feedback:
            kept["feedback"] = self.feedback.own
            if self.feedback.shard.size:
                kept["shard_feedback"] = self.feedback.shard
        if mid_round:
            kept["params"] = state.params
        return kept

    def restore(self, kept: dict[str, Any], outer: OuterCopy, progress: dict[str, Any]) -> None:
        """Take over what `checkpoint` returned and the shared parameters of that moment."""
        self.outer = outer
        noise = {source: Moments(*sums) for source, sums in progress.get("noise", {}).items()}
        self.progress = RoundProgress(**progress | {"noise": noise})
        params = kept.get("params", outer.params)
        state = TrainState(params, kept["opt_state"], kept["step"], kept["mean_loss"])
        self.state = self.program.put_state(state)
        if self.feedback:
            shard = kept.get("shard_feedback", self.feedback.shard)
            self.feedback = ErrorFeedback(kept["feedback"], shard)


def sharing_devices(workers: Sequence[Worker]) -> list[list[Worker]]:
    """Workers in groups that have no device in common."""
    groups: list[list[Worker]] = []
    for worker in workers:
        devices = set(worker.devices)
        shared = [g for g in groups if any(devices & set(w.devices) for w in g)]
        groups = [g for g in groups if g not in shared]
        groups.append([w for g in shared for w in g] + [worker])
    return groups


def _added(sums: Mapping[str, Moments], new: Mapping[str, Moments]) -> dict[str, Moments]:
    """Moments on the host, by source."""
    total = dict(sums)
    for source, moments in new.items():
        before = total.get(source, (0.0,) * len(moments))
        total[source] = Moments(*(a + float(b) for a, b in zip(before, moments, strict=True)))
    return total
