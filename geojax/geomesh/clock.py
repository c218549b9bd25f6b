# SPDX-License-Identifier: Apache-2.0
"""The one interface to time: what a round took, by slice, measured or modelled.

Invariant: that of geojax.geomesh.timeline; the modelled clock looks at no measured second.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

from geojax.config import ConfigError, RunConfig, SliceConfig, slice_strategy
from geojax.geomesh.balance import Option, Plan, SliceProfile, SliceWork
from geojax.geomesh.layout import make_layout
from geojax.geomesh.sync import payload_bytes
from geojax.geomesh.timeline import Part, RoundTimes, round_times
from geojax.meshes.candidates import MICRO_BATCHES, Candidate, Job, frontier, make_plan
from geojax.meshes.hardware import Cluster, get_gpu
from geojax.meshes.timing_a100 import A100, extrapolated
from geojax.meshes.wan import get_wan, wire_bytes


class Happened(NamedTuple):
    """One round as it happened here, by slice."""

    compute: list[float]
    """Seconds of inner steps."""
    inner: float
    """Seconds until the last slice had done its inner steps."""
    exchange: float
    outer: float
    """Seconds of encoding, decoding, merging, the outer step and the hash check."""
    behind: list[int]
    """Inner steps of this round that were done beside the exchange before."""
    ahead: list[int]
    """Inner steps of the next round that are done beside this one's."""
    late: list[float]
    """As `RoundTimes` of the round before has it."""


@runtime_checkable
class Clock(Protocol):
    """Where a run's times come from."""

    def round(self, plan: Plan, happened: Happened) -> RoundTimes: ...


class MeasuredClock:
    """Wall time of slices in one process. Those that share a device wait for each other's compute;
    there is nothing beside which an exchange could go on."""

    def round(self, plan: Plan, happened: Happened) -> RoundTimes:
        compute, inner, exchange, outer, *_ = happened
        return RoundTimes(
            inner + exchange + outer,
            compute,
            [inner - seconds for seconds in compute],
            exchange,
            [outer] * len(compute),
            [0.0] * len(compute),
        )


@dataclass(frozen=True)
class ModelledClock:
    """Step times of the plan and exchange times of the WAN model.

    The outer step counts as nothing; docs/geomesh.md states what it takes.
    """

    exchange_seconds: float

    def round(self, plan: Plan, happened: Happened) -> RoundTimes:
        rows = zip(plan.work, happened.behind, happened.ahead, strict=True)
        parts = [
            modelled_part(work, behind, ahead, self.exchange_seconds)
            for work, behind, ahead in rows
        ]
        return round_times(parts, happened.late, 0.0)


def modelled_part(work: SliceWork, behind: int, ahead: int, exchange_seconds: float) -> Part:
    """A slice's part of a round of which it had done `behind` steps when it began."""
    step = work.seconds_per_step
    return Part((work.inner_steps - behind) * step, ahead * step, 0.0, exchange_seconds)


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
def naming(name: str) -> Generator[None]:
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
    option = Option(batch, clock.base_step_seconds * batch / clock.base_batch / s.speed, 0)
    if s.devices == 1:
        return option
    return replace(option, strategy=str(slice_strategy(s, config.train.micro_batch, batch)))
