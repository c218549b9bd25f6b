# SPDX-License-Identifier: Apache-2.0
"""The one interface to time: what a round took, by slice, measured or modelled.

Invariant: for every slice compute + straggler wait + WAN wait + outer step = the round's seconds.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from geojax.config import ConfigError, RunConfig, SliceConfig
from geojax.geomesh.balance import Option, Plan, SliceProfile
from geojax.geomesh.layout import make_layout
from geojax.geomesh.sync import payload_bytes
from geojax.meshes.candidates import MICRO_BATCHES, Candidate, Job, frontier, make_plan
from geojax.meshes.hardware import Cluster, get_gpu
from geojax.meshes.timing_a100 import A100, extrapolated
from geojax.meshes.wan import get_wan, wire_bytes


class RoundTimes(NamedTuple):
    """Seconds of one round."""

    compute: list[float]
    """Inner steps, by slice."""
    inner: float
    """Until the last slice had done its inner steps."""
    exchange: float
    outer: float
    """Encoding, decoding, merging, the outer step and the hash check."""

    @property
    def total(self) -> float:
        return self.inner + self.exchange + self.outer

    def straggler(self, index: int) -> float:
        """What slice `index` waited for the last one."""
        return self.inner - self.compute[index]


@runtime_checkable
class Clock(Protocol):
    """Where a run's times come from."""

    def round(self, plan: Plan, measured: RoundTimes) -> RoundTimes: ...


class MeasuredClock:
    """Wall time. Slices that share a device wait for each other's compute."""

    def round(self, plan: Plan, measured: RoundTimes) -> RoundTimes:
        return measured


@dataclass(frozen=True)
class ModelledClock:
    """Step times of the plan and exchange times of the WAN model.

    The outer step counts as nothing; docs/geomesh.md states what it takes.
    """

    exchange_seconds: float

    def round(self, plan: Plan, measured: RoundTimes) -> RoundTimes:
        compute = [w.compute_seconds for w in plan.work]
        return RoundTimes(compute, max(compute), self.exchange_seconds, 0.0)


@dataclass(frozen=True)
class Traffic:
    """What an exchange of the clocked model moves, in bytes a slice."""

    params: int
    payload_bytes: int
    """One slice's message."""
    fp32_bytes: int
    """The same parameters uncompressed."""
    wire_bytes: int
    """Sent by one slice under the schedule in force."""

    @property
    def payload_ratio(self) -> float:
        return self.fp32_bytes / self.payload_bytes


def traffic(config: RunConfig) -> Traffic:
    """Traffic of an exchange of the model whose time is counted."""
    from geojax.models.transformer import abstract_params

    model = config.clocked_model()
    payload = payload_bytes(make_layout(abstract_params(model), config.exchange))
    slices = len(config.slices)
    sent = wire_bytes(config.exchange.resolve_schedule(slices), slices, payload)
    return Traffic(model.num_params, payload, 4 * model.num_params, sent)


def modelled_exchange_seconds(config: RunConfig, payload: int) -> float:
    """Seconds of one exchange of `payload` bytes a slice over the configured WAN."""
    wan, regions = get_wan(config.clock.wan), [s.region for s in config.slices]
    if config.exchange.resolve_schedule(len(regions)) == "gather":
        return wan.gather_seconds(regions, payload)
    return wan.two_phase_seconds(regions, payload)


def modelled_profiles(config: RunConfig) -> list[SliceProfile]:
    """What each slice could do, from its relative speed, or of its GPUs the strategy of each batch
    that is the fastest by the timing model, of those that fit.

    ConfigError that names the slice, where nothing fits its GPUs.
    """
    profiles = []
    for s in config.slices:
        if s.gpu:
            job = _job(config, s)
            with naming(s.name):
                found = frontier(make_plan(job, A100, extrapolated).candidates)
            profiles.append(gpu_profile(s.name, job, found))
        else:
            options = (_option_by_speed(config, s, batch) for batch in config.slice_batches)
            profiles.append(SliceProfile(s.name, tuple(options), None))
    return profiles


def gpu_profile(name: str, job: Job, found: Sequence[Candidate]) -> SliceProfile:
    """A slice that does `job` by the strategies `found`, one a batch."""
    options = (
        Option(c.strategy.global_batch, c.step_seconds, c.memory_bytes, str(c.strategy))
        for c in found
    )
    return SliceProfile(name, tuple(options), job.usable_bytes)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors name the slice."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"slice {name}: {error}") from error


def _job(config: RunConfig, s: SliceConfig) -> Job:
    """What is planned for the GPUs of a slice: whole nodes, or part of one."""
    model, seq_len = config.clocked_model(), config.clock.seq_len or config.data.seq_len
    if config.cona:
        micro = config.cona.micro_batches
    else:
        micro = (config.train.micro_batch,) if config.train.micro_batch else MICRO_BATCHES
    a_node = min(s.gpus, config.clock.gpus_per_node)
    cluster = Cluster(get_gpu(s.gpu), s.gpus // a_node, a_node)
    batches = tuple(sorted(config.slice_batches))
    return Job(model, seq_len, cluster, config.train.optimizer.name, batches, tuple(sorted(micro)))


def _option_by_speed(config: RunConfig, s: SliceConfig, batch: int) -> Option:
    clock = config.clock
    assert s.speed
    assert clock.base_step_seconds
    assert clock.base_batch
    return Option(batch, clock.base_step_seconds * batch / clock.base_batch / s.speed, 0)
