# SPDX-License-Identifier: Apache-2.0
"""Attention over a prefix and own keys on one GPU: right, and how fast, by each kernel.

    python benchmarks/kernel.py [--minutes 7] [--models llada-8b dream-7b] [--prefixes 1024 4096]
    python benchmarks/kernel.py --interpret

Every kernel that takes a case is first compared with float64, on rows drawn from its output, and
then timed: the median of some measurements, each of enough calls to last, beside the bound that
the data sheet sets. Attention's share of the model's FLOPs is by formula. Last, the engine answers
requests by random weights of the model's shape, end to end, with each kernel. `--minutes` is what
all of it may take: cases have three fifths of it, the models in turn, and what there is no time for
is left out by name; what has begun is finished. `--interpret` compares small shapes on a CPU, under
Pallas' interpreter, whose times say nothing.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp

from geojax.bench.attention import (
    SMALL,
    Case,
    bound,
    interpreted_kernels,
    kernels_for,
    largest_errors,
    make_arguments,
    median_seconds,
)
from geojax.bench.denoising import random_sampler, roomy_sizes, shared_jobs
from geojax.bicache import engine as engines
from geojax.bicache.depth import Depths
from geojax.bicache.engine import Engine
from geojax.bicache.kernels import choose
from geojax.bicache.kernels.choose import Choice
from geojax.bicache.kernels.reference import Part
from geojax.bicache.policy import get_policy
from geojax.diffusion.request import SamplingConfig
from geojax.meshes.hardware import GPUS, Gpu
from geojax.models.config import TransformerConfig, get_model
from geojax.platform import detect_gpu

MODELS = ("llada-8b", "dream-7b")
_CASES = 0.6  # of the time


def attention_share(model: TransformerConfig, keys: int) -> float:
    """Attention's share of the forward FLOPs of a row that sees `keys` keys.

    2 FLOPs a matmul parameter: queries and output, keys and values, a gated MLP, and the head; and
    for every query head 4 head_dim a key, scores and weighted values.
    """
    kv_dim = model.kv_heads * model.head_dim
    per_layer = 2 * model.dim * (model.heads * model.head_dim + kv_dim) + 3 * (
        model.dim * model.mlp_dim
    )
    matmuls = 2 * (model.layers * per_layer + model.dim * model.vocab_size)
    attention = 4 * model.layers * model.heads * model.head_dim * keys
    return attention / (attention + matmuls)


def run(name: str, model: TransformerConfig, case: Case, dtype: str, gpu: Gpu) -> None:
    args = make_arguments(model, case, dtype)
    flops, floor = bound(model, case, gpu)
    for kernel, attend in kernels_for(args).items():
        compiled = jax.jit(attend).lower(*args).compile()
        errors = largest_errors(compiled(*args), args)
        took = median_seconds(partial(compiled, *args))
        print(
            f"{name:<9} {case!s:<46} {kernel:<10} {took * 1e6:9.1f} us  "
            f"{flops / took / gpu.bf16_flops_per_second:6.1%} of peak FLOPs  "
            f"{floor / took:6.1%} of the bound  error {errors.out:.1e}, lse {errors.lse:.1e}",
            flush=True,
        )


def end_to_end(config: TransformerConfig, name: str, prefix: int, batch: int, dtype: str) -> None:
    """Seconds of a batch of requests under each kernel that takes them, in turn."""
    canvas, private = 64, 64
    sampler = random_sampler(config, dtype)
    ask = SamplingConfig(steps=32, block=32)
    jobs = shared_jobs(sampler.mask_id, batch, prefix, private, canvas, ask)
    sizes = roomy_sizes(config, dtype, jobs)
    depths, took = Depths(((0.0, config.layers // 2),)), {}
    real = choose.choose_for
    best = real(jax.devices()[0], *_probe(config, dtype)).kernel
    for kernel in dict.fromkeys([best, "xla"]):
        choose.choose_for = lambda *_, kernel=kernel: Choice(kernel, ())
        engines._compiled.cache_clear()  # programs are kept by shape, not by kernel
        for policy in ("none", "bicache"):
            engine = Engine(sampler, get_policy(policy), sizes, depths)
            engine.answer(jobs)
            started = time.perf_counter()
            engine.answer(jobs)
            took[kernel, policy] = time.perf_counter() - started
    choose.choose_for = real
    for (kernel, policy), spent in took.items():
        print(
            f"{name} end to end, {batch} x {prefix} + {private} + {canvas}, {policy:<8} "
            f"{kernel:<10} {spent:6.2f} s, {batch * canvas / spent:7.1f} tokens/s, "
            f"{took['xla', policy] / spent:.2f}x of xla's speed",
            flush=True,
        )


def _probe(config: TransformerConfig, dtype: str) -> tuple:
    """Arguments of `choose_for` like the engine's: pages that a table names."""
    q = jax.ShapeDtypeStruct((1, 64, config.heads, config.head_dim), jnp.dtype(dtype))
    page = jax.ShapeDtypeStruct((8, 64, config.kv_heads, config.head_dim), jnp.dtype(dtype))
    counts = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    return q, Part(page, page, counts), counts


def interpret() -> None:
    """Small cases under the interpreter; SystemExit where one is off."""
    for case in (Case(2, 5, 136, 16, 0), Case(3, 4, 136, 16, 2), Case(2, 5, 136, 16, 0, 64)):
        args = make_arguments(SMALL, case, "bfloat16")
        for name, kernel in interpreted_kernels().items():
            errors = largest_errors(jax.jit(kernel)(*args), args)
            print(f"{case} {name:<10} error {errors.out:.1e}, lse {errors.lse:.1e}", flush=True)
            if not errors.fine:
                raise SystemExit(f"{name} is off by {errors.out:.1e} and {errors.lse:.1e}")
    tiny = TransformerConfig(
        vocab_size=512, dim=64, layers=2, heads=2, kv_heads=1, mlp_dim=96, bidirectional=True
    )
    end_to_end(tiny, "tiny", 128, 2, "bfloat16")
    print("interpreted on a CPU: these times say nothing")


def sheet() -> Gpu:
    """Figures of the GPU that is here; SystemExit where there is none, or none are known."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(
            f"this needs an NVIDIA GPU, and JAX found {device.platform}; install geojax[cuda13] "
            "on a machine with one, or pass --interpret to compare small shapes on this CPU"
        )
    name = detect_gpu(device.device_kind)
    if name is None:
        raise SystemExit(f"no data sheet of a {device.device_kind}; add it to GPUS in hardware.py")
    return GPUS[name]


def cases_of(options: argparse.Namespace) -> list[tuple[str, Case]]:
    """(model, case): prefixes that all rows share, that rows name, and that lie in pages."""
    kinds = [(entries, 0) for entries in options.entries] + [(0, page) for page in options.pages]
    sizes = product(options.prefixes, options.batches, options.blocks, kinds, options.models)
    return [
        (name, Case(batch, block, prefix, options.own, entries, page))
        for prefix, batch, block, (entries, page), name in sizes
    ]


def within[T](items: Iterable[T], seconds: float, now: Callable[[], float]) -> Iterator[T]:
    """Those that there is time to begin with; the others are printed."""
    end, left = now() + seconds, list(items)
    while left and now() < end:
        yield left.pop(0)
    if left:
        print(f"left out, no time: {'; '.join(' '.join(map(str, item)) for item in left)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--interpret", action="store_true", help="small shapes, on a CPU")
    parser.add_argument("--minutes", type=float, default=7.0, help="that all of it may take")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--prefixes", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--blocks", nargs="+", type=int, default=[32, 256])
    parser.add_argument("--own", type=int, default=512, help="own keys a sequence")
    parser.add_argument("--entries", nargs="*", type=int, default=[0, 4], help="0: one for all")
    parser.add_argument("--pages", nargs="*", type=int, default=[64], help="rows of a page")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    options = parser.parse_args()
    if options.minutes <= 0:
        raise SystemExit(f"--minutes {options.minutes} must be above 0")
    if options.interpret:
        jax.config.update("jax_platforms", "cpu")
        return interpret()
    gpu, started = sheet(), time.monotonic()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.dtype}")
    for name, prefix in product(options.models, options.prefixes):
        share = attention_share(get_model(name), prefix + options.own)
        print(f"{name}: attention over {prefix + options.own} keys is {share:.1%} of FLOPs")
    whole = 60 * options.minutes
    for name, case in within(cases_of(options), _CASES * whole, time.monotonic):
        run(name, get_model(name), case, options.dtype, gpu)
    ends = product(options.prefixes[:2], options.models)
    for prefix, name in within(ends, started + whole - time.monotonic(), time.monotonic):
        end_to_end(get_model(name), name, prefix, 4, options.dtype)
    return None


if __name__ == "__main__":
    main()
