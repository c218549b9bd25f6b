# SPDX-License-Identifier: Apache-2.0
"""Estimated memory of training steps beside XLA's own account of them, without a GPU.

    python benchmarks/memory.py [--count 60]

Samples legal strategies of four models on H100s and A100s, compiles each step for those GPUs, and
compares with meshes/memory.py. Needs the extra `aot`; answers are kept on disk, so that it can be
stopped and started again. XLA's total is arguments + results + temporaries, donated buffers counted
once.
"""

import argparse
import os
import random

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np

from geojax.meshes.candidates import OPTIMIZER_SLOTS, Job
from geojax.meshes.hardware import Cluster, get_gpu
from geojax.meshes.memory import step_memory
from geojax.meshes.strategy import Strategy, problems
from geojax.models.config import get_model
from geojax.plan.exact import exact_bytes
from geojax.track.environment import machine

MODELS = {"gpt-3-1.3b": 2048, "llama-3.2-1b": 2048, "bert-large": 512, "gpt-2": 1024}
NODES = {1: (1, 1), 2: (1, 2), 4: (1, 4), 8: (1, 8), 16: (2, 8), 32: (4, 8)}


def sample(count: int, seed: int) -> list[tuple[str, str, Strategy]]:
    """(model, GPU, strategy), drawn evenly over every choice."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        name, gpu = rng.choice(list(MODELS)), rng.choice(["h100", "a100-80gb"])
        model, gpus = get_model(name), rng.choice(list(NODES))
        tp = rng.choice([t for t in (1, 2, 4, 8) if gpus % t == 0])
        pp = rng.choice([p for p in (1, 2, 4, 8) if gpus // tp % p == 0])
        dp = gpus // tp // pp
        micro, times = rng.choice([1, 2, 4]), rng.choice([1, 2, 4])
        strategy = Strategy(
            dp,
            tp,
            pp,
            micro,
            dp * micro * pp * times,
            interleave=rng.choice([1, 1, 2]) if pp > 1 else 1,
            remat=rng.choice(["none", "matmuls", "full"]),
            sharding=rng.choice(["none", "optimizer", "all"]) if dp > 1 else "none",
        )
        case = (name, gpu, strategy)
        if not problems(strategy, model) and case not in found:
            found.append(case)
    return found


def job(name: str, gpu: str, strategy: Strategy) -> Job:
    cluster = Cluster(get_gpu(gpu), *NODES[strategy.devices])
    batch, micro = (strategy.global_batch,), (strategy.micro_batch,)
    return Job(get_model(name), MODELS[name], cluster, "adamw", batch, micro)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    slots = OPTIMIZER_SLOTS["adamw"]
    errors = []
    for name, gpu, strategy in sample(options.count, options.seed):
        model, seq_len = get_model(name), MODELS[name]
        exact = exact_bytes(job(name, gpu, strategy), gpu, strategy)
        estimate = step_memory(model, seq_len, strategy, slots)
        errors.append(estimate.total_bytes / exact - 1)
        print(
            f"{name:<13} {gpu:<10} {strategy!s:<42} XLA {exact / 1e9:7.2f} GB, estimate "
            f"{estimate.total_bytes / 1e9:7.2f} ({errors[-1]:+.0%})",
            flush=True,
        )
    within = np.mean(np.abs(errors) <= 0.15)
    print(
        f"{within:.0%} of {len(errors)} within 15 %; median error "
        f"{np.median(np.abs(errors)):.1%}, largest {np.abs(errors).max():.0%}"
    )
    print(f"compiled for GPUs that are not here, {machine()}")


if __name__ == "__main__":
    main()
