# SPDX-License-Identifier: Apache-2.0
"""Strategies for a model and a cluster: which fit, how long a step takes, and why others are out.

Invariant: every legal strategy is either a candidate or excluded with its reason. Bytes are of one
GPU; seconds are modelled (meshes/timing.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from geojax.meshes.hardware import Cluster
from geojax.meshes.memory import step_memory
from geojax.meshes.strategy import Remat, Sharding, Strategy, enumerate_strategies
from geojax.meshes.timing import StepCase, TimingModel
from geojax.models.config import TransformerConfig

CONTEXT_BYTES = 10**9
"""Kept for CUDA's context and NCCL's buffers: an assumption."""
FRAGMENTATION = 0.05
"""Share of the memory kept for fragmentation and libraries' workspaces: an assumption."""
OPTIMIZER_SLOTS = {"adamw": 2, "lion": 1, "sgd": 0, "own": 2}
"""Values a parameter that an optimizer keeps; of one's own, an assumption."""
INTERLEAVES = (1, 2, 4)
MICRO_BATCHES = (1, 2, 4, 8)
"""Sequences that one copy of the model computes at once, where nothing else is asked for."""
Far = Callable[[StepCase], str | None]
# From what costs no time to what costs most; the first that fits is taken.
_SHARDINGS: tuple[Sharding, ...] = ("none", "optimizer", "all")
_REMATS: tuple[Remat, ...] = ("none", "matmuls", "full")


@dataclass(frozen=True)
class Job:
    """What is to be planned."""

    model: TransformerConfig
    seq_len: int
    cluster: Cluster
    optimizer: str
    global_batches: tuple[int, ...]
    micro_batches: tuple[int, ...]

    @property
    def usable_bytes(self) -> int:
        """Of one GPU's memory, less the reserve."""
        return round(self.cluster.gpu.memory_bytes * (1 - FRAGMENTATION)) - CONTEXT_BYTES


@dataclass(frozen=True)
class Candidate:
    """A strategy that fits, and what is predicted of it."""

    strategy: Strategy
    memory_bytes: int
    exact: bool
    """Whether the compiler counted the memory, or a formula estimates it."""
    step_seconds: float
    mfu: float
    extrapolated: str | None
    """Why the time is far from what was measured; None where it is not."""

    @property
    def samples_per_second(self) -> float:
        return self.strategy.global_batch / self.step_seconds


@dataclass(frozen=True)
class Plan:
    """All candidates, fastest first, and what was excluded, with reasons."""

    candidates: tuple[Candidate, ...]
    excluded: tuple[tuple[Strategy, str], ...]


def make_plan(job: Job, timing: TimingModel, far: Far) -> Plan:
    """Candidates of `job`, the memory of each estimated.

    For each layout, micro-batch and global batch the fastest choice of recomputation and sharding
    that fits. `far(case)` says why a time is an extrapolation. ValueError where nothing fits.
    """
    found = enumerate_strategies(
        job.model,
        job.cluster.gpus,
        job.global_batches,
        job.micro_batches,
        INTERLEAVES,
        _REMATS,
        _SHARDINGS,
        also=lambda s: _placement(s, job.cluster),
    )
    fitting, excluded = [], list(found.excluded)
    for _, group in groupby(found.legal, key=_layout):
        choices = [(s, _memory(job, s)) for s in group]
        fits = [(s, size) for s, size in choices if size <= job.usable_bytes]
        if not fits:
            strategy, size = min(choices, key=lambda pair: pair[1])
            excluded.append(
                (
                    strategy,
                    f"needs about {size / 1e9:.3g} GB of {job.usable_bytes / 1e9:.3g} GB even with "
                    f"remat {strategy.remat!r} and sharding {strategy.sharding!r}",
                )
            )
            continue
        cases = [StepCase(job.model, job.seq_len, s, job.cluster) for s, _ in fits]
        seconds = timing.seconds_of(cases)
        best = min(range(len(fits)), key=lambda i: (seconds[i], *_preference(fits[i][0])))
        strategy, size = fits[best]
        fitting.append(_candidate(job, strategy, size, False, float(seconds[best]), far))
    if not fitting:
        raise ValueError(_nothing_fits(job, excluded))
    fitting.sort(key=lambda c: (-c.samples_per_second, str(c.strategy)))
    return Plan(tuple(fitting), tuple(excluded))


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest of each global batch, by batch."""
    best: dict[int, Candidate] = {}
    for candidate in candidates:
        kept = best.get(candidate.strategy.global_batch)
        if kept is None or candidate.step_seconds < kept.step_seconds:
            best[candidate.strategy.global_batch] = candidate
    return [best[batch] for batch in sorted(best)]


def with_exact_memory(candidate: Candidate, memory_bytes: int) -> Candidate:
    return replace(candidate, memory_bytes=memory_bytes, exact=True)


def _candidate(job: Job, strategy: Strategy, size: int, exact: bool, seconds: float, far: Far):
    flops = job.model.train_flops_per_token(job.seq_len) * strategy.global_batch * job.seq_len
    peak = job.cluster.gpu.bf16_flops_per_second * strategy.devices
    case = StepCase(job.model, job.seq_len, strategy, job.cluster)
    return Candidate(strategy, size, exact, seconds, flops / (peak * seconds), far(case))


def _memory(job: Job, strategy: Strategy) -> int:
    slots = OPTIMIZER_SLOTS[job.optimizer]
    return step_memory(job.model, job.seq_len, strategy, optimizer_slots=slots).total_bytes


def _placement(strategy: Strategy, cluster: Cluster) -> str | None:
    if strategy.tp > cluster.gpus_per_node:
        return (
            f"tp {strategy.tp} leaves the node of {cluster.gpus_per_node} GPUs, and sends "
            f"activations over the network in every layer; use tp {cluster.gpus_per_node} or less"
        )
    return None


def _layout(s: Strategy) -> tuple[int, ...]:
    return (s.dp, s.tp, s.pp, s.global_batch, s.micro_batch, s.interleave)


def _preference(s: Strategy) -> tuple[int, int]:
    return _REMATS.index(s.remat), _SHARDINGS.index(s.sharding)


def _nothing_fits(job: Job, excluded: Sequence[tuple[Strategy, str]]) -> str:
    tight = [reason for _, reason in excluded if "even with" in reason]
    state = 4 * (2 + OPTIMIZER_SLOTS[job.optimizer]) * job.model.num_params
    gpus = -(-state // job.usable_bytes)
    why = min(tight, key=len) if tight else excluded[0][1] if excluded else "nothing is legal"
    return (
        f"no strategy fits {job.cluster.gpus} GPUs at global batches {list(job.global_batches)}: "
        f"{why}; the state alone takes {state / 1e9:.3g} GB, {gpus} GPUs or more; use more GPUs, a "
        "smaller micro-batch or sequence, or another global batch"
    )
