# SPDX-License-Identifier: Apache-2.0
"""One slice at work: its devices, its training state, and its share of the round.

Invariant: between rounds a worker's parameters are its copy of the shared ones; during a round,
`progress` and the training state together say exactly how far it is, so that it can be saved and
continued at any chunk.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from geojax.data import TrainSequences, empty_batch
from geojax.geomesh.balance import SliceWork
from geojax.geomesh.outer import OuterCopy
from geojax.geomesh.sync import ErrorFeedback
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
        self._chunk_steps = chunk_steps
        self.state = program.put_state(init_state(outer.params, program.task.train))

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        return self.program.devices

    def compile(self) -> None:
        """Compile the inner loop now, with no step taken, so that no round's time includes it."""
        lead = (self._chunk_steps, self.work.batch)
        chunk = self.program.put_chunk(empty_batch(lead, self.program.task.seq_len))
        self.state, _ = self.program.run(self.state, chunk, 0, 0.0, 0.0, 0)

    def begin_round(self) -> None:
        """Start from the shared parameters."""
        self.state = replace(self.state, params=self.program.put_params(self.outer.params))

    def run(
        self,
        sequences: TrainSequences,
        share: range,
        progress: tuple[float, float],
        stopped: Callable[[], bool],
    ) -> None:
        """Do what is left of the round's inner steps, or up to the chunk at which `stopped`.

        `share`: this slice's global samples; `progress`: of the run, before and after the round.
        """
        batch, steps, done = self.work.batch, self.work.inner_steps, self.progress.done
        begin, end = progress
        stride = (end - begin) / steps
        first = share.start + done * batch
        for chunk, real in sequences.chunks(first, steps - done, batch, self._chunk_steps):
            started = time.perf_counter()
            device_chunk = self.program.put_chunk(chunk)
            self.state, stats = self.program.run(
                self.state, device_chunk, real, begin, stride, self.progress.done
            )
            stats = jax.device_get(stats)
            p = self.progress
            self.progress = RoundProgress(
                p.done + real,
                p.loss + float(stats.loss),
                p.tokens + int(stats.tokens),
                p.grad_norm + float(stats.grad_norm),
                p.steps + int(stats.steps),
                p.skipped + int(stats.skipped),
                p.compute_seconds + time.perf_counter() - started,
            )
            if stopped():
                return

    def end_round(self) -> None:
        """The round's exchange is over."""
        self.progress = RoundProgress()

    @property
    def finished(self) -> bool:
        """Whether the round's inner steps are done."""
        return self.progress.done == self.work.inner_steps

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
        self.progress = RoundProgress(**progress)
        params = kept.get("params", outer.params)
        state = TrainState(params, kept["opt_state"], kept["step"], kept["mean_loss"])
        self.state = self.program.put_state(state)
        if self.feedback:
            shard = kept.get("shard_feedback", self.feedback.shard)
            self.feedback = ErrorFeedback(kept["feedback"], shard)
