# SPDX-License-Identifier: Apache-2.0
"""What measuring the gradient's noise adds to a step: at most 2 % is the aim.

    python benchmarks/noise.py [--rounds N] [--dim D] [--strategy S ...]

Programs that differ in nothing but `Task.noise` run in turn in one process, in a random order and
from a state that is copied anew each round (where it lies in memory is worth some percent), on the
same chunk; what is compared is the ratio of their times, round by round, and of the fastest of
each, which a busy machine disturbs least. One of them is there twice: by how much it differs from
itself is the error of the others. A GPU's memory is slower beside its arithmetic, so
an estimate for one follows, from the bytes that are read again. JAX_PLATFORMS chooses a device; by
default it is the CPU.
"""

import argparse
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np

from geojax.config import OptimizerConfig, TrainConfig
from geojax.data import Batch, empty_batch
from geojax.meshes.hardware import Cluster, get_gpu
from geojax.meshes.strategy import Strategy, parse_strategy
from geojax.meshes.timing import StepCase
from geojax.meshes.timing_a100 import A100
from geojax.models.config import TransformerConfig, get_model
from geojax.models.transformer import abstract_params
from geojax.track.environment import machine
from geojax.train.program import Program, Task

LENGTH = 256
STRATEGIES = ("dp1-tp1-pp1-mb1-gb8", "dp2-tp1-pp4-mb1-gb8")
SAME = "no"  # measured again: the same program as None
KINDS = (None, SAME, "plain", "preconditioned")
A100_STRATEGIES = ("dp8-tp1-pp1-mb1-gb64", "dp8-tp1-pp1-mb4-gb256", "dp1-tp2-pp4-mb4-gb64")
KERNEL_SECONDS = 5e-6
"""Launch of the kernel that sums a leaf's squares: an assumption, as in meshes/hardware.py."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12, help="measurements of each program")
    parser.add_argument("--dim", type=int, default=256, help="width of the model")
    parser.add_argument("--strategy", nargs="+", default=STRATEGIES, help="on up to 8 devices")
    options = parser.parse_args()
    dim = options.dim
    model = TransformerConfig(4096, dim, 4, dim // 64, dim // 64, 4 * dim, family="llama")
    for text in options.strategy:
        seconds = step_seconds(model, parse_strategy(text), options.rounds)
        for kind in KINDS[1:]:
            ratios = seconds[kind] / seconds[None]
            low, middle, high = np.percentile(ratios, [25, 50, 75])
            print(
                f"{text}, {model.num_params / 1e6:.1f}M parameters: step that measures {kind} "
                f"noise / one that does not: median {middle:.3f} (quartiles {low:.3f}-{high:.3f}, "
                f"{options.rounds} pairs), fastest {seconds[kind].min() / seconds[None].min():.3f}"
            )
    print(f"measured clock, {machine()}")
    for text in A100_STRATEGIES:
        print(estimate(parse_strategy(text)))


def step_seconds(
    model: TransformerConfig, strategy: Strategy, rounds: int
) -> dict[str | None, np.ndarray]:
    """Seconds of a step in each round, by what is measured."""
    train = TrainConfig(
        total_tokens=1,
        optimizer=OptimizerConfig(name="adamw", weight_decay=0.1),
        compute_dtype="float32",
    )
    devices = jax.devices()[: strategy.devices]
    programs = {
        kind: Program(
            Task(model, train, LENGTH, noise=None if kind == SAME else kind), strategy, devices
        )
        for kind in KINDS
    }
    first = {kind: program.init(0) for kind, program in programs.items()}
    chunk = programs[None].put_chunk(random_chunk(model, strategy.global_batch))
    seconds: dict[str | None, list[float]] = {kind: [] for kind in KINDS}
    order = np.random.default_rng(0)
    for number in range(rounds + 1):
        for i in order.permutation(len(KINDS)):
            kind = KINDS[i]
            copies = jax.tree.map(
                lambda x: jax.device_put(x, x.sharding, may_alias=False), first[kind]
            )
            state = jax.block_until_ready(copies)
            started = time.perf_counter()
            state, _ = programs[kind].run(state, chunk, 1, 0.5, 0.0, 0)
            jax.block_until_ready(state)
            if number:  # the first of each compiled
                seconds[kind].append(time.perf_counter() - started)
    return {kind: np.array(times) for kind, times in seconds.items()}


def random_chunk(model: TransformerConfig, batch: int) -> Batch:
    """One batch [1, B, T]."""
    tokens = np.random.default_rng(0).integers(
        0, model.vocab_size, (1, batch, LENGTH + 1), np.int32
    )
    return empty_batch((1, batch), LENGTH)._replace(
        tokens=tokens[..., :-1],
        targets=tokens[..., 1:],
        weights=np.ones((1, batch, LENGTH), np.float32),
        positions=np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (1, batch, LENGTH)),
    )


def estimate(strategy: Strategy) -> str:
    """Of GPT-3 1.3B on A100s, modelled, at most: float32 gradients read once more a part, and the
    whole gradient and the second moment once a step. XLA's compiler for GPUs takes squares of parts
    along as it adds the parts up, and those of the whole as it takes its norm for clipping: then
    the second moment is all that is read again."""
    model, gpu = get_model("gpt-3-1.3b"), get_gpu("a100-80gb")
    reads = 2 + (strategy.micro_batches if strategy.pp == 1 else 1)
    leaves = len(jax.tree.leaves(abstract_params(model)))
    pass_seconds = (
        4 * model.num_params / (strategy.tp * strategy.pp) / gpu.memory_bytes_per_second
        + leaves * KERNEL_SECONDS
    )
    step = A100.seconds(StepCase(model, 1024, strategy, Cluster(gpu)))
    return (
        f"gpt-3-1.3b on 8 A100, {strategy}, step of {1e3 * step:.0f} ms: "
        f"{100 * pass_seconds / step:.2f} % where squares are fused, at most "
        f"{100 * reads * pass_seconds / step:.2f} %; modelled"
    )


if __name__ == "__main__":
    main()
