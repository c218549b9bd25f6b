# SPDX-License-Identifier: Apache-2.0
"""Stage: the engine with an 8B model's shape and random weights, by each policy of reuse."""

import math
import time
from dataclasses import dataclass, replace
from statistics import median

import jax

from geojax.bench.denoising import random_sampler, roomy_sizes, shared_jobs
from geojax.bench.gpu.here import too_small
from geojax.bench.gpu.stages import Stage
from geojax.bicache.depth import Depths
from geojax.bicache.engine import Engine
from geojax.bicache.policy import get_policy
from geojax.diffusion.request import SamplingConfig
from geojax.models.config import TransformerConfig, get_model
from geojax.models.transformer import abstract_params

DTYPE = "bfloat16"
POLICIES = ("none", "refresh", "bicache", "bicache-dual")
ENOUGH_SECONDS = 8.0
"""Of timed runs of one policy."""
MOST_RUNS = 3


@dataclass(frozen=True)
class Setting:
    """Requests that are answered."""

    model: str
    batches: tuple[int, ...]
    prefix: int
    private: int
    canvas: int
    sampling: SamplingConfig


SETTING = Setting("llada-8b", (1, 4), 1024, 64, 256, SamplingConfig(steps=128, block=32))
SETTING_TINY = Setting("llada-tiny", (1,), 64, 16, 8, SamplingConfig(steps=4, block=4))


def engine(stage: Stage, tiny: bool) -> None:
    """Tokens and denoising steps a second; prefixes are shared in half of the layers, and stored
    before the time is taken."""
    setting = SETTING_TINY if tiny else SETTING
    config = get_model(setting.model)
    stage.skipped = too_small(wanted_bytes(config, setting))
    if stage.skipped:
        return
    stage.result |= {
        "model": setting.model,
        "params": config.num_params,
        "dtype": DTYPE,
        "prefix": setting.prefix,
        "private": setting.private,
        "new_tokens": setting.canvas,
        "shared_layers": config.layers // 2,
    }
    rows = stage.result.setdefault("policies", [])
    with stage.trying("weights"):
        sampler = random_sampler(config, DTYPE)
    if stage.errors:
        return
    pairs = [(policy, batch) for batch in setting.batches for policy in POLICIES]
    for policy, batch in stage.each(pairs):
        with stage.trying(f"{policy}, batch {batch}"):
            rows.append(_measure(stage, sampler, setting, policy, batch))


def _measure(stage: Stage, sampler, setting: Setting, policy: str, batch: int) -> dict:
    config = sampler.model.config
    jobs = _jobs(config, setting, batch)
    depths = Depths(((0.0, config.layers // 2),))
    made = Engine(sampler, get_policy(policy), roomy_sizes(config, DTYPE, jobs), depths)
    # A step a block goes through all programs, and stores the prefix.
    quick = replace(setting.sampling, steps=math.ceil(setting.canvas / setting.sampling.block))
    started = time.perf_counter()
    made.answer(_jobs(config, replace(setting, sampling=quick), batch))
    warm = time.perf_counter() - started
    times: list[float] = []
    steps = 0
    for _ in range(MOST_RUNS):
        started = time.perf_counter()
        steps = max(answer.steps for answer in made.answer(jobs))
        times.append(time.perf_counter() - started)
        if sum(times) >= ENOUGH_SECONDS or times[-1] >= stage.left_seconds:
            break
    seconds = median(times)
    return {
        "policy": policy,
        "batch": batch,
        "first_seconds": warm,
        "seconds": seconds,
        "runs": len(times),
        "denoising_steps": steps,
        "steps_per_second": steps / seconds,
        "tokens_per_second": batch * setting.canvas / seconds,
    }


def _jobs(config: TransformerConfig, setting: Setting, batch: int):
    sizes = (batch, setting.prefix, setting.private, setting.canvas)
    return shared_jobs(config.vocab_size - 1, *sizes, setting.sampling)


def wanted_bytes(config: TransformerConfig, setting: Setting) -> float:
    """Weights, what making the largest of them takes, and the pages; by guess, a tenth more."""
    leaves = [math.prod(x.shape) for x in jax.tree.leaves(abstract_params(config))]
    pages = roomy_sizes(config, DTYPE, _jobs(config, setting, max(setting.batches)))
    making = 8 * max(leaves)  # random bits and values in float32
    return 1.1 * (2 * sum(leaves) + max(making, pages.kv_bytes + pages.hidden_bytes))
