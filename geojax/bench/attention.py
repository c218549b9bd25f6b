# SPDX-License-Identifier: Apache-2.0
"""Attention kernels on one device: cases of them, compared with float64, and timed.

Invariant: a number that is not finite is an error without bound, never one of 0.

Shapes: b sequences, t queries, s own keys, p keys of a prefix, h query heads, k key/value heads,
e head size.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from geojax.bicache.kernels import cudnn
from geojax.bicache.kernels.choose import choose_for
from geojax.bicache.kernels.mosaic_gpu import attend_mosaic
from geojax.bicache.kernels.reference import Part, attend_xla
from geojax.meshes.hardware import Gpu
from geojax.models.attention import attend, attend_cudnn
from geojax.models.config import TransformerConfig

SAMPLES = 48
"""Rows of an output that are compared with float64."""
OUT_LIMIT, LSE_LIMIT = 2.0**-8, 1e-4
"""Largest errors of outputs, which are rounded to bfloat16, and of log-sum-exps, which are not."""
TRAINING_LIMIT = 1e-2
"""Of outputs and gradients by norm: bfloat16 rounds by 2^-9, probabilities and sums add to it."""
MEASUREMENT_SECONDS = 0.2
MEASUREMENTS = 7
SMALL = TransformerConfig(1000, dim=256, layers=2, heads=4, kv_heads=1, mlp_dim=512)
"""What an interpreter can take."""


class Case(NamedTuple):
    """Queries over a prefix and own keys."""

    batch: int
    block: int
    """Queries a sequence."""
    prefix: int
    own: int
    entries: int
    """Prefix entries that the rows name in turn; 0: all rows share one."""
    page: int = 0
    """Rows of the pages that a prefix lies in, as an engine's do; 0: it lies in one piece."""

    def __str__(self) -> str:
        kind = f"pages of {self.page}" if self.page else f"entries {self.entries}"
        return f"{self.batch} x {self.block} prefix {self.prefix} own {self.own} {kind}"


class Errors(NamedTuple):
    """Largest ones against float64."""

    out: float
    """Relative to the sum of weights x |values|."""
    lse: float

    @property
    def fine(self) -> bool:
        return self.out <= OUT_LIMIT and self.lse <= LSE_LIMIT


def make_arguments(model: TransformerConfig, case: Case, dtype: str) -> tuple:
    """Arguments of `attend_xla`: normal queries, keys and values, full lengths but for some."""
    rng = jax.random.key(0)
    b, p, s = case.batch, case.prefix, case.own
    k, e = model.kv_heads, model.head_dim
    pages = -(-p // case.page) if case.page else 0
    lead = (b * pages, case.page) if case.page else (case.entries, p) if case.entries else (p,)
    shapes = [(b, case.block, model.heads, e), *[(*lead, k, e)] * 2, *[(b, s, k, e)] * 2]
    keys = jax.random.split(rng, len(shapes))
    q, pk, pv, ok, ov = (
        jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)
    )
    own = Part(ok, ov, jnp.arange(b, dtype=jnp.int32) % 3 - 2 + s)
    if case.page:
        # The pages of a row do not lie in a row.
        table = jnp.arange(b * pages, dtype=jnp.int32).reshape(pages, b).T
        counts = jnp.minimum(p - jnp.arange(pages) * case.page, case.page).astype(jnp.int32)
        return q, Part(pk, pv, jnp.broadcast_to(counts, (b, pages))), own, table
    if not case.entries:
        return q, Part(pk, pv, jnp.int32(p)), own
    lengths = jnp.full(b, p, jnp.int32)
    return q, Part(pk, pv, lengths), own, jnp.arange(b, dtype=jnp.int32) % case.entries


def largest_errors(found: tuple, args: tuple) -> Errors:
    """Of outputs and log-sum-exps on SAMPLES rows of what a kernel found for `args`."""
    out, lse = (np.asarray(x, np.float64) for x in found)
    q, prefix, own, *index = args
    rng = np.random.default_rng(0)
    off_out, off_lse = [], []
    group = q.shape[2] // own.k.shape[2]
    for _ in range(SAMPLES):
        i, t, h = (int(rng.integers(size)) for size in q.shape[:3])
        parts = [prefix, Part(*(x[i] for x in own))]
        if index:
            ids, lengths = np.atleast_1d(index[0][i]), np.atleast_1d(prefix.length[i])
            entries = zip(ids.tolist(), lengths.tolist(), strict=True)
            parts[:1] = [Part(prefix.k[n], prefix.v[n], length) for n, length in entries]
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
        off_out.append(error.max())
        off_lse.append(abs(lse[i, h, t] - scores.max() - np.log(total)))
    return Errors(_worst(off_out), _worst(off_lse))


def median_seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call, launched one after another and waited for together."""
    jax.block_until_ready(call())

    def measure(calls: int) -> float:
        start, result = time.perf_counter(), None
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    calls = max(1, int(MEASUREMENT_SECONDS / measure(3)))
    return float(np.median([measure(calls) for _ in range(MEASUREMENTS)]))


def bound(model: TransformerConfig, case: Case, gpu: Gpu) -> tuple[float, float]:
    """FLOPs, and the least seconds that they and one reading of everything take on `gpu`."""
    rows = case.batch * case.block
    flops = 4 * rows * model.heads * model.head_dim * (case.prefix + case.own)
    prefixes = case.batch if case.page else max(case.entries, 1)
    keys = prefixes * case.prefix + case.batch * case.own
    elements = 2 * rows * model.heads + 2 * keys * model.kv_heads
    traffic_bytes = 2 * elements * model.head_dim
    floor = max(flops / gpu.bf16_flops_per_second, traffic_bytes / gpu.memory_bytes_per_second)
    return flops, floor


def kernels_for(args: tuple) -> dict[str, Callable]:
    """Those that take these arguments on this device."""
    q, prefix, _, *index = args
    found: dict[str, Callable] = {}
    device = jax.devices()[0]
    choice = choose_for(device, q, prefix, index[0] if index else None)
    if choice.kernel == "mosaic_gpu":
        found["mosaic_gpu"] = attend_mosaic
        found["mosaic_gpu, registers"] = partial(attend_mosaic, registers=True)
    if device.platform == "gpu" and not index and cudnn.AVAILABLE and q.shape[-1] % 8 == 0:
        found["cudnn"] = cudnn.attend_cudnn
    found["xla"] = attend_xla
    return found


def interpreted_kernels() -> dict[str, Callable]:
    """The GPU's kernel under Pallas' interpreter, and XLA's: what a CPU can compare."""
    attend_interpreted = partial(attend_mosaic, interpret=plgpu.InterpretGPUParams())
    return {"mosaic_gpu": attend_interpreted, "xla": attend_xla}


def training_kernels() -> dict[str, Callable]:
    """Attention of training steps on this device."""
    fused = {"cudnn": attend_cudnn} if jax.devices()[0].platform == "gpu" else {}
    return {**fused, "reference": attend}


def training_errors(kernel: Callable, model: TransformerConfig, length: int) -> tuple[float, float]:
    """Errors of causal attention's output and of its gradients, in bfloat16 against float64.

    By norm over the norm of what is right; of the gradients the largest of q's, k's and v's.
    """
    rng = np.random.default_rng(0)
    shapes = [(2, length, heads, model.head_dim) for heads in (model.heads, *[model.kv_heads] * 2)]
    shapes.append(shapes[0])
    inputs = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]

    @jax.jit
    def both(q, k, v, weight):
        out, pull = jax.vjp(lambda *x: kernel(*x, None, True, None), q, k, v)
        return out, *pull(weight)

    found = both(*inputs)
    right = _attention64(*(np.asarray(x, np.float64) for x in inputs))
    errors = [
        float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))
        for a, b in zip(found, right, strict=True)
    ]
    return errors[0], _worst(errors[1:])


def _attention64(q: np.ndarray, k: np.ndarray, v: np.ndarray, weight: np.ndarray) -> tuple:
    """Output, and gradients of (output * weight).sum() by q, k and v."""
    b, t, h, e = q.shape
    group = h // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("bthe,bshe->bhts", q, k) / math.sqrt(e)
    scores = np.where(np.tril(np.ones((t, t), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bthe,bshe->bhts", weight, v)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / math.sqrt(e)
    by_k, by_v = np.einsum("bhts,bthe->bshe", ds, q), np.einsum("bhts,bthe->bshe", p, weight)
    by_k, by_v = (x.reshape(b, t, -1, group, e).sum(3) for x in (by_k, by_v))
    out, by_q = np.einsum("bhts,bshe->bthe", p, v), np.einsum("bhts,bshe->bthe", ds, k)
    return out, by_q, by_k, by_v


def _worst(errors: list[float]) -> float:
    """The largest; infinite where one is no number."""
    worst = float(np.max(errors))
    return worst if math.isfinite(worst) else math.inf
