# SPDX-License-Identifier: Apache-2.0
"""One slice at work: its devices, its training state, and its share of the round.

A round begins from the shared parameters; or, where the exchange goes on beside inner steps, from
the slice's own, as it sent them, and what all came to is taken in at a fixed step:

    local <- shared + (local - sent)

So every step counts once: what a slice sends at the end of a round is the way that it went in it,
whoever's steps it began from. (With plain averaging as the outer step and the result taken in at
the round's end this is CoCoD-SGD, Shen et al. 2019. Kale et al. 2025, "Eager updates", also let a
slice's own steps count before the others' are there, with their share in the average; Douillard et
al. 2025, Streaming DiLoCo, take a weighted mean of local and shared, which drops a part of the
steps made meanwhile.)

Invariant: `progress`, `sent` and the training state together say exactly how far a round is, so
that it can be saved and continued at any chunk. With no step done ahead, `shared + (local - sent)`
has the bits of `shared`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import numpy as np

from geojax.cona.noise import Moments
from geojax.data import Batch, TrainSequences
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


@dataclass
class Sent:
    """What a slice sent, while it goes on and the result is under way."""

    params: list[np.ndarray]
    """Its own parameters, one host array a leaf."""
    progress: RoundProgress
    """Of the round that they ended."""


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
        self.sent: Sent | None = None
        """Where the next round has begun before the result of this one is taken in."""
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
        self.state = self.program.rehearse(self.state, self._chunk_steps)

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

    def go_on(self) -> None:
        """Start the next round from this slice's own parameters, as they were sent."""
        local = jax.tree.leaves(self.program.host(self.state.params))
        self.sent = Sent([np.array(x) for x in local], self.progress)
        self.progress = RoundProgress()

    def go_back(self) -> None:
        """To the start of a round that was begun like that."""
        assert self.sent, "it has gone on"
        self._put(self.sent.params)
        self.progress = RoundProgress()

    def begin_round(self) -> None:
        """Start from the shared parameters; where it has gone on, take them in."""
        shared = jax.tree.leaves(self.outer.params)
        if self.sent:
            local = jax.tree.leaves(self.program.host(self.state.params))
            rows = zip(shared, local, self.sent.params, strict=True)
            self._put([all_ + (mine - then) for all_, mine, then in rows])
            self.sent = None
        elif not self.progress.done:
            self._put(shared)

    def _put(self, leaves: Sequence[np.ndarray]) -> None:
        """These parameters on the devices."""
        params = jax.tree.unflatten(jax.tree.structure(self.outer.params), leaves)
        self.state = replace(self.state, params=self.program.put_params(params))

    def work_on(
        self,
        sequences: TrainSequences,
        share: range | np.ndarray,
        progress: tuple[float, float],
        stopped: Callable[[], bool],
        ahead: int,
    ) -> None:
        """`run`, from the shared parameters; a round that began before they were there takes them
        in after `ahead` steps."""
        if self.sent:
            self.run(sequences, share, progress, stopped, ahead)
            if self.progress.done < ahead:
                return
        self.begin_round()
        self.run(sequences, share, progress, stopped)

    def run(
        self,
        sequences: TrainSequences,
        share: range | np.ndarray,
        progress: tuple[float, float],
        stopped: Callable[[], bool],
        until: int | None = None,
    ) -> None:
        """Do what is left of the round's inner steps, or of the first `until`, or up to the chunk
        at which `stopped`.

        `share`: this slice's global samples, in order; `progress`: of the run, before and after
        the round.
        """
        begin, end = progress
        stride = (end - begin) / self.work.inner_steps
        until = self.work.inner_steps if until is None else until
        started = time.perf_counter()
        for chunk, real, probe in self._chunks(sequences, share, until):
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
            before, started = started, time.perf_counter()  # reading the chunk is a part of it
            self.progress = RoundProgress(
                p.done + real,
                p.loss + float(stats.loss),
                p.tokens + int(stats.tokens),
                p.grad_norm + float(stats.grad_norm),
                p.steps + int(stats.steps),
                p.skipped + int(stats.skipped),
                p.compute_seconds + started - before,
                _added(p.noise, stats.noise),
            )
            if stopped():
                return

    def _chunks(
        self, sequences: TrainSequences, share: range | np.ndarray, until: int
    ) -> Iterator[tuple[Batch, int, bool]]:
        """What is left of the round's first `until` steps: a chunk, its real steps, and whether it
        is a probe."""
        batch, done = self.work.batch, self.progress.done
        rows = self.program.local_sequences

        def after(steps: int) -> int | np.ndarray:
            rest = share[steps * batch :]
            return rest.start if isinstance(rest, range) else rest

        if self.probe and self.program.wants_probes and not done:
            for chunk, real in sequences.chunks(after(0), 1, batch, 1, rows=rows):
                yield chunk, real, True
            done = 1
        left = until - done
        if left > 0:
            pieces = sequences.chunks(after(done), left, batch, self._chunk_steps, rows=rows)
            for chunk, real in pieces:
                yield chunk, real, False

    def end_round(self) -> None:
        """The round's exchange is over, or its work lost: the next begins from what is shared."""
        self.progress, self.sent = RoundProgress(), None

    @property
    def finished(self) -> bool:
        """Whether the round's inner steps are done, and the result before is taken in."""
        return self.progress.done == self.work.inner_steps and self.sent is None

    @property
    def ended(self) -> RoundProgress:
        """Of the round that is sent, or to be sent."""
        return self.sent.progress if self.sent else self.progress

    def contribution(self) -> Contribution:
        """To the round's exchange; of no weight where too many steps were skipped."""
        p, anomalies = self.ended, self.program.task.train.anomalies
        tokens = p.tokens if p.skipped <= anomalies.max_skipped_fraction * p.done else 0
        return Contribution(self.index, self.pseudo_gradient(), tokens, p.steps, self.feedback)

    def pseudo_gradient(self) -> list[np.ndarray]:
        """Shared minus local parameters, one float32 host array a leaf."""
        if self.sent:
            local = self.sent.params
        else:
            local = jax.tree.leaves(self.program.host(self.state.params))
        pairs = zip(jax.tree.leaves(self.outer.params), local, strict=True)
        return [np.ascontiguousarray(shared - mine) for shared, mine in pairs]

    def checkpoint(self, mid_round: bool) -> dict[str, Any]:
        """What a checkpoint holds of this slice alone; local parameters only inside a round, and
        where it has gone on."""
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
        if self.sent:
            kept["sent"] = self.sent.params
        return kept

    def facts(self) -> dict[str, Any]:
        """The same, for JSON."""
        return {
            "progress": asdict(self.progress),
            "sent": asdict(self.sent.progress) if self.sent else None,
        }

    def restore(self, kept: dict[str, Any], outer: OuterCopy, facts: dict[str, Any]) -> None:
        """Take over what `checkpoint` and `facts` returned, and the shared parameters of that
        moment."""
        self.outer = outer
        self.progress, self.sent = _progress(facts["progress"]), None
        params = kept.get("params", outer.params)
        if facts["sent"] is not None:
            self.sent = Sent(list(kept["sent"]), _progress(facts["sent"]))
            tree = jax.tree.structure(outer.params)
            params = kept.get("params", jax.tree.unflatten(tree, self.sent.params))
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


def _progress(facts: dict[str, Any]) -> RoundProgress:
    noise = {source: Moments(*sums) for source, sums in facts.get("noise", {}).items()}
    return RoundProgress(**facts | {"noise": noise})


def _added(sums: Mapping[str, Moments], new: Mapping[str, Moments]) -> dict[str, Moments]:
    """Moments on the host, by source."""
    total = dict(sums)
    for source, moments in new.items():
        before = total.get(source, (0.0,) * len(moments))
        total[source] = Moments(*(a + float(b) for a, b in zip(before, moments, strict=True)))
    return total
