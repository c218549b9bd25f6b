# SPDX-License-Identifier: Apache-2.0
"""Attention over a prefix and own keys on one GPU: right, and how fast, by each kernel.

    python benchmarks/kernel.py [--models llada-8b dream-7b] [--prefixes 1024 4096]
    python benchmarks/kernel.py --interpret

Every kernel that takes a case is first compared with float64, on rows drawn from its output, and
then timed: the median of some measurements, each of enough calls to last, beside the bound that
the data sheet sets. Attention's share of the model's FLOPs is by formula. Last, the engine answers
requests by random weights of the model's shape, end to end, with each kernel. `--interpret`
compares small shapes on a CPU, under Pallas' interpreter, whose times say nothing.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from geojax.bicache import engine as engines
from geojax.bicache.depth import Depths
from geojax.bicache.engine import Engine, Job, Sizes
from geojax.bicache.kernels import choose, cudnn
from geojax.bicache.kernels.choose import Choice, choose_for
from geojax.bicache.kernels.mosaic_gpu import attend_mosaic
from geojax.bicache.kernels.reference import Part, attend_xla
from geojax.bicache.policy import get_policy
from geojax.diffusion.request import SamplingConfig, prompt
from geojax.diffusion.sampler import Sampler
from geojax.meshes.hardware import GPUS, Gpu
from geojax.models.config import TransformerConfig, get_model
from geojax.models.transformer import Transformer, abstract_params

SAMPLES = 48
"""Rows of an output that are compared with float64."""
MEASUREMENT_SECONDS = 0.2
MEASUREMENTS = 7


class Shape(NamedTuple):
    """What of a model matters here."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab_size: int


MODELS = {
    "llada-8b": Shape(32, 4096, 32, 32, 128, 12288, 126464),
    "dream-7b": Shape(28, 3584, 28, 4, 128, 18944, 152064),
}
SMALL = Shape(2, 256, 4, 1, 64, 512, 1000)


class Case(NamedTuple):
    batch: int
    block: int
    """Queries a sequence."""
    prefix: int
    own: int
    entries: int
    """Prefix entries that the rows name in turn; 0: all rows share one."""


def attention_share(model: Shape, keys: int) -> float:
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


def make(model: Shape, case: Case, dtype: str) -> tuple:
    """Arguments of `attend_xla`: normal queries, keys and values, full lengths but for some."""
    rng = jax.random.key(0)
    b, p, s = case.batch, case.prefix, case.own
    k, e = model.kv_heads, model.head_dim
    lead = (case.entries,) if case.entries else ()
    shapes = [(b, case.block, model.heads, e), *[(*lead, p, k, e)] * 2, *[(b, s, k, e)] * 2]
    keys = jax.random.split(rng, len(shapes))
    q, pk, pv, ok, ov = (
        jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)
    )
    own = Part(ok, ov, jnp.arange(b, dtype=jnp.int32) % 3 - 2 + s)
    if not case.entries:
        return q, Part(pk, pv, jnp.int32(p)), own
    lengths = jnp.full(b, p, jnp.int32)
    return q, Part(pk, pv, lengths), own, jnp.arange(b, dtype=jnp.int32) % case.entries


def largest_error(found: tuple, args: tuple) -> tuple[float, float]:
    """Largest error of outputs and of log-sum-exps on SAMPLES rows, each against float64.

    Outputs relative to the sum of weights x |values|, of which bfloat16 rounds by 2^-8 at most.
    """
    out, lse = (np.asarray(x, np.float64) for x in found)
    q, prefix, own, *index = args
    rng = np.random.default_rng(0)
    worst_out = worst_lse = 0.0
    group = q.shape[2] // own.k.shape[2]
    for _ in range(SAMPLES):
        i, t, h = (int(rng.integers(size)) for size in q.shape[:3])
        parts = [prefix, Part(*(x[i] for x in own))]
        if index:
            entry = int(index[0][i])
            parts[0] = Part(prefix.k[entry], prefix.v[entry], prefix.length[i])
        k, v = (
            np.concatenate(
                [np.asarray(part[j][: int(part.length), h // group], np.float64) for part in parts]
            )
            for j in range(2)
        )
        scores = k @ np.asarray(q[i, t, h], np.float64) / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        total = weights.sum()
        error = np.abs(out[i, t, h] - weights @ v / total) / (weights @ np.abs(v) / total)
        worst_out = max(worst_out, error.max())
        worst_lse = max(worst_lse, abs(lse[i, h, t] - scores.max() - np.log(total)))
    return worst_out, worst_lse


def seconds(call: Callable[[], tuple]) -> float:
    """Median seconds of a call, launched one after another and waited for together."""
    jax.block_until_ready(call())

    def measure(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    calls = max(1, int(MEASUREMENT_SECONDS / measure(3)))
    return float(np.median([measure(calls) for _ in range(MEASUREMENTS)]))


def bound(model: Shape, case: Case, gpu: Gpu) -> tuple[float, float]:
    """FLOPs, and the least seconds that they and one reading of everything take on `gpu`."""
    rows = case.batch * case.block
    flops = 4 * rows * model.heads * model.head_dim * (case.prefix + case.own)
    keys = max(case.entries, 1) * case.prefix + case.batch * case.own
    elements = 2 * rows * model.heads + 2 * keys * model.kv_heads
    traffic_bytes = 2 * elements * model.head_dim
    floor = max(flops / gpu.bf16_flops_per_second, traffic_bytes / gpu.memory_bytes_per_second)
    return flops, floor


def kernels(args: tuple) -> dict[str, Callable]:
    """Those that take these arguments on this GPU."""
    q, prefix, _, *index = args
    found: dict[str, Callable] = {}
    choice = choose_for(jax.devices()[0], q, prefix, index[0] if index else None)
    if choice.kernel == "mosaic_gpu":
        found["mosaic_gpu"] = attend_mosaic
    if not index and cudnn.AVAILABLE and q.shape[-1] % 8 == 0:
        found["cudnn"] = cudnn.attend_cudnn
    found["xla"] = attend_xla
    return found


def run(name: str, model: Shape, case: Case, dtype: str, gpu: Gpu) -> None:
    args = make(model, case, dtype)
    flops, floor = bound(model, case, gpu)
    for kernel, attend in kernels(args).items():
        compiled = jax.jit(attend).lower(*args).compile()
        out_error, lse_error = largest_error(compiled(*args), args)
        took = seconds(partial(compiled, *args))
        print(
            f"{name:<9} {case.batch:>3} x {case.block:<3} prefix {case.prefix:<5} own {case.own:<4}"
            f" entries {case.entries:<2} {kernel:<10} {took * 1e6:9.1f} us  "
            f"{flops / took / gpu.bf16_flops_per_second:6.1%} of peak FLOPs  "
            f"{floor / took:6.1%} of the bound  error {out_error:.1e}, lse {lse_error:.1e}",
            flush=True,
        )


def random_weights(config: TransformerConfig, dtype: str):
    """Normal ones of the size that fresh ones have, made in `dtype` on the device."""
    leaves, tree = jax.tree.flatten(abstract_params(config))

    def make(key, shape):
        fan_in = shape[-2] if len(shape) > 1 else 1
        return jax.random.normal(key, shape, dtype) / jnp.sqrt(fan_in).astype(dtype)

    made = jax.jit(make, static_argnums=1)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten([made(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def end_to_end(config: TransformerConfig, name: str, prefix: int, batch: int, dtype: str) -> None:
    """Seconds of a batch of requests under each kernel that takes them, in turn."""
    mask, canvas, private, steps = config.vocab_size - 1, 64, 64, 32
    forbidden = np.arange(config.vocab_size) == mask
    weights = random_weights(config, dtype)
    sampler = Sampler(Transformer(config), weights, mask, forbidden, dtype=jnp.dtype(dtype))
    rng = np.random.default_rng(0)
    shared = rng.integers(0, mask, prefix).tolist()
    ask = SamplingConfig(steps=steps, block=32)
    jobs = [
        Job(
            prompt([*shared, *rng.integers(0, mask, private).tolist()], canvas, mask, ask),
            (prefix,),
        )
        for _ in range(batch)
    ]
    row_bytes = 4 * config.layers * config.kv_heads * config.head_dim
    sizes = Sizes(2 * (batch + 1) * (prefix + 256) * row_bytes, 8 * prefix * config.dim)
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
    attend = jax.jit(partial(attend_mosaic, interpret=plgpu.InterpretGPUParams()))
    for case in (Case(2, 5, 136, 16, 0), Case(3, 4, 136, 16, 2)):
        args = make(SMALL, case, "bfloat16")
        for name, kernel in {"mosaic_gpu": attend, "xla": attend_xla}.items():
            out_error, lse_error = largest_error(kernel(*args), args)
            print(f"{case} {name:<10} error {out_error:.1e}, lse {lse_error:.1e}", flush=True)
            if out_error > 2**-8 or lse_error > 1e-4:
                raise SystemExit(f"{name} is off by {out_error:.1e} and {lse_error:.1e}")
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
    kind = device.device_kind.lower().replace(" ", "-")
    for name in sorted(GPUS, key=len, reverse=True):
        if name in kind:
            return GPUS[name]
    raise SystemExit(f"no data sheet of a {device.device_kind}; add it to GPUS in hardware.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--interpret", action="store_true", help="small shapes, on a CPU")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--prefixes", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--blocks", nargs="+", type=int, default=[32, 256])
    parser.add_argument("--own", type=int, default=512, help="own keys a sequence")
    parser.add_argument("--entries", nargs="+", type=int, default=[0, 4], help="0: one for all")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    options = parser.parse_args()
    if options.interpret:
        jax.config.update("jax_platforms", "cpu")
        return interpret()
    gpu = sheet()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {options.dtype}")
    for name in options.models:
        model = MODELS[name]
        for prefix in options.prefixes:
            share = attention_share(model, prefix + options.own)
            print(f"{name}: attention over {prefix + options.own} keys is {share:.1%} of FLOPs")
            for batch in options.batches:
                for block in options.blocks:
                    for entries in options.entries:
                        case = Case(batch, block, prefix, options.own, entries)
                        run(name, model, case, options.dtype, gpu)
        for prefix in options.prefixes[:2]:
            end_to_end(get_model(name), name, prefix, 4, options.dtype)
    return None


if __name__ == "__main__":
    main()
