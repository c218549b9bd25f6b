# SPDX-License-Identifier: Apache-2.0
"""Stages: what the device is and can do at most; kernels against float64; attention timed."""

from functools import partial

import jax
import jax.numpy as jnp

from geojax.bench.attention import (
    LSE_LIMIT,
    OUT_LIMIT,
    SMALL,
    TRAINING_LIMIT,
    Case,
    bound,
    interpreted_kernels,
    kernels_for,
    largest_errors,
    make_arguments,
    median_seconds,
    training_errors,
    training_kernels,
)
from geojax.bench.gpu.here import gpu_name, pool_bytes, sheet
from geojax.bench.gpu.stages import Stage
from geojax.config import RunError
from geojax.models.config import get_model

CHECKED = (
    Case(4, 32, 1024, 512, 0),
    Case(3, 5, 1000, 129, 2),
    Case(4, 32, 1000, 320, 0, page=64),
)
CHECKED_TINY = (Case(2, 5, 136, 16, 0), Case(2, 4, 100, 16, 0, page=64))
TIMED = (
    Case(1, 32, 1024, 320, 0),
    Case(4, 32, 4096, 320, 0),
    Case(4, 256, 1024, 320, 4),
    Case(4, 32, 1024, 320, 0, page=64),
    Case(16, 32, 4096, 320, 0, page=64),
)
TIMED_TINY = (Case(2, 8, 64, 16, 0),)
MODELS = ("llada-8b", "dream-7b")
TRAINED = ("llama-150m", "llama-3.2-1b")


def device(stage: Stage, tiny: bool) -> None:
    """The device's name, and the two rates that bound everything else."""
    here, found = jax.devices()[0], stage.result
    found |= {"kind": here.device_kind, "gpu": here.platform == "gpu", "known_as": gpu_name()}
    found["pool_bytes"] = pool_bytes()
    if here.platform != "gpu" and not tiny:
        return
    with stage.trying("matrix product"):
        n = 256 if tiny else 8192
        a, b = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in _keys(2))
        seconds = median_seconds(partial(jax.jit(jnp.matmul), a, b))
        found["matmul_flops_per_second"] = 2 * n**3 / seconds
    with stage.trying("copy"):
        x = jax.random.normal(_keys(1)[0], (2**16 if tiny else 2**30,), jnp.bfloat16)
        seconds = median_seconds(partial(jax.jit(jnp.negative), x))
        found["copied_bytes_per_second"] = 2 * x.nbytes / seconds


def kernels(stage: Stage, tiny: bool) -> None:
    """Each kernel that takes a case against float64; an error beyond its limit is a failure."""
    rows = stage.result.setdefault("checked", [])
    models = {"small": SMALL} if tiny else {name: get_model(name) for name in MODELS}
    cases = CHECKED_TINY if tiny else CHECKED
    for name, case in stage.each([(n, c) for c in cases for n in models]):
        args = make_arguments(models[name], case, "bfloat16")
        for kernel, attend in (interpreted_kernels() if tiny else kernels_for(args)).items():
            with stage.trying(f"{kernel}, {name}, {case}"):
                errors = largest_errors(jax.jit(attend)(*args), args)
                row = {"kernel": kernel, "model": name, "case": str(case)}
                rows.append(row | {"error": errors.out, "lse_error": errors.lse})
                if not errors.fine:
                    raise RunError(
                        f"outputs are off by {errors.out:.1e} and log-sum-exps by "
                        f"{errors.lse:.1e}; at most {OUT_LIMIT:.1e} and {LSE_LIMIT:.1e} are right"
                    )
    models = {"small": SMALL} if tiny else {name: get_model(name) for name in TRAINED}
    for kernel, name in stage.each([(k, n) for n in models for k in training_kernels()]):
        with stage.trying(f"{kernel} in training, {name}"):
            attend = training_kernels()[kernel]
            out, gradients = training_errors(attend, models[name], 32 if tiny else 512)
            row = {"kernel": f"{kernel} in training", "model": name, "case": "causal"}
            rows.append(row | {"error": out, "gradient_error": gradients})
            if not max(out, gradients) <= TRAINING_LIMIT:
                raise RunError(
                    f"outputs are off by {out:.1e} and gradients by {gradients:.1e}; at most "
                    f"{TRAINING_LIMIT} is right"
                )


def attention(stage: Stage, tiny: bool) -> None:
    """Seconds of each kernel in a few cases, beside what the data sheet allows."""
    rows = stage.result.setdefault("timed", [])
    gpu, known = sheet(), gpu_name() is not None
    models = {"small": SMALL} if tiny else {name: get_model(name) for name in MODELS}
    cases = TIMED_TINY if tiny else TIMED
    for name, case in stage.each([(n, c) for c in cases for n in models]):
        args = make_arguments(models[name], case, "bfloat16")
        flops, floor = bound(models[name], case, gpu)
        for kernel, attend in kernels_for(args).items():
            with stage.trying(f"{kernel}, {name}, {case}"):
                compiled = jax.jit(attend).lower(*args).compile()
                seconds = median_seconds(partial(compiled, *args))
                row = {"kernel": kernel, "model": name, "case": str(case), "seconds": seconds}
                row |= {"flops_per_second": flops / seconds}
                rows.append(row | {"share_of_bound": floor / seconds if known else None})


def _keys(count: int) -> jax.Array:
    return jax.random.split(jax.random.key(0), count)
