# SPDX-License-Identifier: Apache-2.0
"""One slice at work: its devices, its training state, and its share of the round.

Invariant: between rounds a worker's parameters are its copy of the shared ones; during a round,
`progress` and the training state together say exactly how far it is, so that it can be saved and
continued at any chunk.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from geojax.config import TrainConfig
from geojax.data import Batch, TrainSequences
from geojax.geomesh.balance import SliceWork
from geojax.geomesh.outer import OuterCopy
from geojax.geomesh.sync import ErrorFeedback
from geojax.meshes.axes import DATA, data_mesh
from geojax.train.step import InnerLoop, TrainState, init_state


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
        devices: Sequence[jax.Device],
        config: TrainConfig,
        loop: InnerLoop,
        outer: OuterCopy,
        feedback: ErrorFeedback | None,
    ):
        """`index`: place among all slices; `chunk_steps`: inner steps handed to the devices at
        once; `outer`: this slice's copy of what is shared.
        """
        self.index = index
        self.work = work
        self.devices = devices
        self.outer = outer
        self.feedback = feedback
        self.progress = RoundProgress()
        self.mesh = data_mesh(devices)
        self._loop = loop
        self._chunk_steps = chunk_steps
        self._micro = config.micro_batch and config.micro_batch * len(devices)
        self._whole = NamedSharding(self.mesh, PartitionSpec())
        self._rows = NamedSharding(self.mesh, PartitionSpec(None, None, DATA))
        self.state = self._put(init_state(outer.params, config))

    def compile(self, seq_len: int) -> None:
        """Compile the inner loop now, with no step taken, so that no round's time includes it."""
        shape = (self._chunk_steps, self.work.batch, seq_len)
        chunk = Batch(*(np.zeros(shape, t) for t in ("i4", "i4", "f4", "i4", "i4")))
        self.state, _ = self._loop(self.state, self._device_chunk(chunk), 0, 0.0, 0.0, 0)

    def begin_round(self) -> None:
        """Start from the shared parameters."""
        self.state = replace(self.state, params=self._put(self.outer.params))

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
            device_chunk = self._device_chunk(chunk)
            self.state, stats = self._loop(
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
        pairs = zip(
            jax.tree.leaves(self.outer.params), jax.tree.leaves(self.state.params), strict=True
        )
        return [np.ascontiguousarray(shared - np.asarray(local)) for shared, local in pairs]

    def checkpoint(self, mid_round: bool) -> dict[str, Any]:
        """What a checkpoint holds of this slice alone; local parameters only inside a round."""
        kept: dict[str, Any] = {
            "opt_state": self.state.opt_state,
            "step": self.state.step,
            "mean_loss": self.state.mean_loss,
        }
        if self.feedback:
            kept["feedback"] = self.feedback.own
            if self.feedback.shard.size:
                kept["shard_feedback"] = self.feedback.shard
        if mid_round:
            kept["params"] = self.state.params
        return kept

    def restore(self, kept: dict[str, Any], outer: OuterCopy, progress: dict[str, Any]) -> None:
        """Take over what `checkpoint` returned and the shared parameters of that moment."""
        self.outer = outer
        self.progress = RoundProgress(**progress)
        params = kept.get("params", outer.params)
        state = TrainState(params, kept["opt_state"], kept["step"], kept["mean_loss"])
        self.state = self._put(state)
        if self.feedback:
            shard = kept.get("shard_feedback", self.feedback.shard)
            self.feedback = ErrorFeedback(kept["feedback"], shard)

    def _device_chunk(self, chunk: Batch) -> Batch:
        """[c, b, t] on the host as [c, m, micro b, t] on the devices, micro b over them."""
        rows = self._micro or self.work.batch
        split = Batch(*(x.reshape(x.shape[0], -1, rows, x.shape[-1]) for x in chunk))
        return jax.device_put(split, self._rows)

    def _put(self, tree: Any) -> Any:
        # A copy: the inner loop donates its state, and host arrays may be shared with the device.
        return jax.device_put(jax.tree.map(lambda x: np.array(x, copy=True), tree), self._whole)
