# SPDX-License-Identifier: Apache-2.0
"""What a slice's devices may do: the strategies that are measured or modelled, and which one runs.

Invariant: without CONA a slice has one layout for all batches, that of its config; under CONA each
batch has the strategy that the timing model predicts to be the fastest of all legal ones.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax

from geojax.config import ConfigError, RunConfig, SliceConfig, slice_strategy
from geojax.geomesh.balance import Option, SliceProfile, SliceWork
from geojax.meshes.candidates import Job, frontier, make_plan
from geojax.meshes.hardware import Cluster, get_gpu
from geojax.meshes.strategy import Strategy, parse_strategy
from geojax.meshes.timing_a100 import A100, extrapolated
from geojax.train.steering import candidates, local_strategy


def choices(config: RunConfig, devices: Sequence[tuple[jax.Device, ...]]) -> list[list[Strategy]]:
    """The strategies of each slice that are worth measuring: one a batch, under CONA the one that
    is predicted to be the fastest of all that its devices can take."""
    if config.cona is None:
        batches, micro = config.balance.batch_sizes, config.train.micro_batch
        return [[slice_strategy(s, micro, batch) for batch in batches] for s in config.slices]
    found = []
    for s, row in zip(config.slices, devices, strict=True):
        with _naming(s):
            found.append([c.strategy for c in frontier(candidates(config, row))])
    return found


def work_strategy(config: RunConfig, index: int, work: SliceWork) -> Strategy:
    """How slice `index` computes its part of a plan here.

    Under CONA and the modelled clock the plan names strategies of the slice's GPUs; here copies on
    its devices share the batch, in two parts or more where there are two sequences, which tell the
    noise apart.
    """
    s = config.slices[index]
    if config.cona and config.clock.kind == "measured":
        return parse_strategy(work.strategy)
    if config.cona and s.devices == 1:
        return local_strategy(config, parse_strategy(work.strategy))
    return slice_strategy(s, config.train.micro_batch, work.batch)


def modelled_choices(config: RunConfig) -> list[SliceProfile]:
    """Profiles under CONA and the modelled clock: of each slice's GPUs, the strategy of each batch
    that is fastest by the timing model, of those that fit.

    Slices by speed are not among them: where time goes by sequences, no batch is too small.
    """
    assert config.cona is not None, "strategies are CONA's"
    model, seq_len = config.clocked_model(), config.clock.seq_len or config.data.seq_len
    batches, micro = (
        tuple(sorted(x)) for x in (config.cona.global_batches, config.cona.micro_batches)
    )
    profiles = []
    for s in config.slices:
        a_node = min(s.gpus, config.clock.gpus_per_node)
        cluster = Cluster(get_gpu(s.gpu), s.gpus // a_node, a_node)
        job = Job(model, seq_len, cluster, config.train.optimizer.name, batches, micro)
        with _naming(s):
            best = frontier(make_plan(job, A100, extrapolated).candidates)
        options = (
            Option(c.strategy.global_batch, c.step_seconds, c.memory_bytes, str(c.strategy))
            for c in best
        )
        profiles.append(SliceProfile(s.name, tuple(options), job.usable_bytes))
    return profiles


@contextmanager
def _naming(s: SliceConfig) -> Iterator[None]:
    """Errors name the slice."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"slice {s.name}: {error}") from error
