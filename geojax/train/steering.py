# SPDX-License-Identifier: Apache-2.0
"""From a run's config to the one who says which strategy is in force, and what its steps take.

Under the modelled clock strategies are those of the clock's cluster, and each step runs here on one
device with the same batch: what a step does depends on its batch alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from geojax.cona.controller import Controller, FixedChain, NoiseWatch, Pilot
from geojax.config import ConfigError, RunConfig, require
from geojax.meshes.candidates import OPTIMIZER_SLOTS, Candidate, Job, make_plan
from geojax.meshes.hardware import NOMINAL, Cluster, get_gpu
from geojax.meshes.strategy import Strategy, parse_strategy
from geojax.meshes.timing import StepCase
from geojax.meshes.timing_a100 import A100, extrapolated
from geojax.platform import detect_gpu
from geojax.train.program import Task

_MOVED_BYTES_PER_SECOND = 5e8  # of a state, and what a switch takes besides, before one was
_SWITCH_SECONDS = 0.1  # measured; benchmarks/reshard.py
_MICRO_BATCH = 8  # sequences that one device computes at once under the modelled clock


def make_pilot(config: RunConfig, devices: Sequence[jax.Device]) -> Pilot:
    """ConfigError where no strategy fits, or the config names one that does not."""
    rule = config.scaling.rate_rule() if config.scaling else None
    noise = config.measured_noise
    if config.cona is None:
        seq_len = config.data.seq_len
        texts = [(0, config.strategy)] if config.strategy else []
        texts += [(-(-leg.tokens // seq_len), leg.strategy) for leg in config.chain]
        legs = [(sample, parse_strategy(text)) for sample, text in texts]
        return FixedChain(legs, rule, NoiseWatch(noise) if noise else None)
    assert noise is not None, "cona asks for noise"
    total = -(-config.train.total_tokens // config.data.seq_len)
    modelled = config.clock.kind == "modelled"
    try:
        return Controller(
            config.cona,
            noise,
            candidates(config, devices),
            total,
            config.clock.switch_seconds if modelled else _expected_switch(config),
            rule,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _expected_switch(config: RunConfig) -> float:
    slots = OPTIMIZER_SLOTS[config.train.optimizer.name]
    state_bytes = 4 * (1 + slots) * config.model.num_params
    return _SWITCH_SECONDS + state_bytes / _MOVED_BYTES_PER_SECOND


def candidates(config: RunConfig, devices: Sequence[jax.Device]) -> Sequence[Candidate]:
    """Strategies that CONA may choose from: those that fit the modelled cluster, or `devices`.

    ConfigError where cona.layouts leaves none.
    """
    assert config.cona is not None
    batches, micro = (
        tuple(sorted(x)) for x in (config.cona.global_batches, config.cona.micro_batches)
    )
    optimizer = config.train.optimizer.name
    if config.clock.kind == "modelled":
        cluster, seq_len = clock_cluster(config), config.clock.seq_len or config.data.seq_len
        job = Job(config.clocked_model(), seq_len, cluster, optimizer, batches, micro)
    else:
        kind = detect_gpu(devices[0].device_kind)
        gpu = get_gpu(kind) if kind else NOMINAL
        nodes = jax.process_count()
        cluster = Cluster(gpu, nodes, max(len(devices) // nodes, 1))
        job = Job(config.model, config.data.seq_len, cluster, optimizer, batches, micro)
    found = make_plan(job, A100, extrapolated).candidates
    if config.cona.layouts == "dp":
        found = tuple(c for c in found if c.strategy.tp == c.strategy.pp == 1)
        require(
            found,
            f"cona.layouts 'dp': no strategy without tp and pp fits {job.cluster.gpus} devices at "
            f"batches {list(batches)}; use 'all', or add batches that divide by the devices",
        )
    return found


def clock_cluster(config: RunConfig) -> Cluster:
    """GPUs that the modelled clock times."""
    return Cluster(get_gpu(config.clock.gpu), config.clock.nodes, config.clock.gpus_per_node)


def step_timer(config: RunConfig) -> Callable[[Strategy], float] | None:
    """Seconds a step by strategy under the modelled clock; None under the measured one."""
    if config.clock.kind != "modelled":
        return None
    cluster, model = clock_cluster(config), config.clocked_model()
    seq_len = config.clock.seq_len or config.data.seq_len
    return lambda strategy: A100.seconds(StepCase(model, seq_len, strategy, cluster))


def local_strategy(config: RunConfig, strategy: Strategy) -> Strategy:
    """What runs here: `strategy` itself, or under the modelled clock its batch on one device, in
    two micro-batches or more where there are two sequences, which tell the noise apart."""
    if config.clock.kind != "modelled":
        return strategy
    batch, limit = strategy.global_batch, config.train.micro_batch or _MICRO_BATCH
    sizes = [m for m in range(1, min(limit, max(batch // 2, 1)) + 1) if batch % m == 0]
    return Strategy(1, 1, 1, sizes[-1], batch)


def devices_for(config: RunConfig) -> Sequence[jax.Device]:
    """The devices of the run; ConfigError where there are too few, or some process would have
    none."""
    there = jax.devices()
    if config.clock.kind == "modelled":
        require(
            jax.process_count() == 1,
            f"{jax.process_count()} processes, and under the modelled clock one device does all "
            "steps; start one",
        )
        return there[:1]
    if config.cona is not None:
        return there
    wanted = parse_strategy(config.strategy or config.chain[0].strategy).devices
    if wanted > len(there) or (jax.process_count() > 1 and wanted != len(there)):
        raise ConfigError(
            f"the strategy wants {wanted} devices, and there are {len(there)}; choose another, or "
            f"on CPU set XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        )
    return there[:wanted]


def make_task(config: RunConfig, evaluates: bool = False) -> Task:
    """What is trained; noise is measured where somebody asks for it. `evaluates`: by every program,
    which is then made ready for that."""
    noise, scaling = config.measured_noise, config.scaling
    return Task(
        config.model,
        config.train,
        config.data.seq_len,
        config.data.document_mask,
        config.seed,
        noise.metric if noise else None,
        scaling.base_batch if scaling else None,
        config.eval.batch if evaluates else 0,
    )


def noise_record(watch: NoiseWatch | None) -> dict[str, Any] | None:
    """The noise scale as known, for a round's record."""
    found = watch.estimate() if watch else None
    if found is None:
        return None
    return {"value": found.value, "low": found.low, "high": found.high, "source": found.source}
