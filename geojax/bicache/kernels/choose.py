# SPDX-License-Identifier: Apache-2.0
"""Which attention kernel runs: Mosaic GPU, else cuDNN, else XLA.

Invariant: the choice follows from the arguments alone, and says why each better kernel was passed
by; nothing is tried out, and no failure at run time changes it. The one exception is of a variant
that no interpreter can check: `registers_agree`.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from geojax.bicache.kernels import cudnn, mosaic_gpu
from geojax.bicache.kernels.reference import Part, attend_xla

Kernel = Literal["mosaic_gpu", "cudnn", "xla"]

_LOG = logging.getLogger(__name__)
_OUT_LIMIT, _LSE_LIMIT = 2.0**-7, 1e-4
"""What results of 0.1 or so, rounded to bfloat16, and log-sum-exps may differ by."""
_HALVES = mosaic_gpu.DTYPES


class Choice(NamedTuple):
    """A kernel, and why not those before it."""

    kernel: Kernel
    reasons: tuple[str, ...]


def choose(
    platform: str,
    capability: tuple[int, int] | None,
    dtype: str,
    head_size: int,
    prefix_size: int,
    indexed: bool,
) -> Choice:
    """The best kernel that takes heads of `head_size` in `dtype` on this kind of device.

    `capability` is CUDA's, None on other devices; `prefix_size` is what prefixes are padded to.
    `indexed`: every row names its prefix entry.
    """
    reasons = []
    if not (why := _not_mosaic(platform, capability, dtype, head_size, prefix_size)):
        return Choice("mosaic_gpu", ())
    reasons.append(f"mosaic_gpu: {why}")
    if not (why := _not_cudnn(platform, capability, dtype, head_size, indexed)):
        return Choice("cudnn", tuple(reasons))
    reasons.append(f"cudnn: {why}")
    return Choice("xla", tuple(reasons))


def attend(
    q: Float[Array, "b t h e"],
    prefix: Part,
    own: Part,
    index: Int[Array, "b *j"] | None = None,
    *,
    device: jax.Device | None = None,
) -> tuple[Float[Array, "b t h e"], Float[Array, "b h t"]]:
    """`reference.attend_xla` by the kernel for `device`, by default the process's first.

    The choice is logged once.
    """
    device = device or jax.devices()[0]
    choice = choose_for(device, q, prefix, index)
    _log(choice)
    match choice.kernel:
        case "mosaic_gpu":
            registers = registers_agree(device, sort_of(q, prefix, own, index))
            return mosaic_gpu.attend_mosaic(q, prefix, own, index, registers=registers)
        case "cudnn":
            return cudnn.attend_cudnn(q, prefix, own)
        case "xla":
            return attend_xla(q, prefix, own, index)


def choose_for(
    device: jax.Device, q: Float[Array, "b t h e"], prefix: Part, index: Int[Array, "b *j"] | None
) -> Choice:
    """`choose` for arguments of `attend` on `device`."""
    capability = None
    if device.platform == "gpu":
        # AMD's devices name an architecture there.
        major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
        capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    head_size, prefix_size = q.shape[-1], prefix.k.shape[-3]
    indexed = index is not None
    return choose(device.platform, capability, q.dtype.name, head_size, prefix_size, indexed)


class Sort(NamedTuple):
    """Of arguments, as far as it says which instructions the Mosaic kernel has."""

    dtype: str
    head_size: int
    group: int
    """Query heads of a key/value head."""
    prefix_size: int
    """What entries are padded to, at most 264: more are steps of the same kind."""
    links: int | None
    """Entries that a row names, at most 2; None: all rows share one."""
    few: bool
    """Whether one warpgroup takes all rows."""


def sort_of(q: Float[Array, "b t h e"], prefix: Part, own: Part, index) -> Sort:
    group = q.shape[2] // own.k.shape[2]
    few = q.shape[0] * q.shape[1] * group <= mosaic_gpu.GROUP_ROWS
    links = None if index is None else min(index.size // len(q), 2)
    return Sort(q.dtype.name, q.shape[3], group, min(prefix.k.shape[-3], 264), links, few)


@cache
def registers_agree(device: jax.Device, sort: Sort) -> bool:
    """Whether the Mosaic kernel that keeps probabilities in registers gives on `device`, for such
    arguments, what the one gives whose every instruction the interpreter has run. Tried once each,
    on few ragged rows."""
    with ThreadPoolExecutor(1) as pool:  # where no program is being traced
        try:
            out, lse = pool.submit(_registers_off, device, sort).result()
        except Exception as error:
            _LOG.warning("attention: the variant in registers fails, and is left out: %s", error)
            return False
    agree = out <= _OUT_LIMIT and lse <= _LSE_LIMIT
    said = "agrees, and is used" if agree else "DIFFERS, and is left out"
    _LOG.info("attention: the variant in registers %s (%s: %.1e, lse %.1e)", said, sort, out, lse)
    return agree


def _registers_off(device: jax.Device, sort: Sort) -> list[float]:
    """By how much the variant's outputs and log-sum-exps differ, at most."""
    dtype, e, group, size, links, few = sort
    queries = max(32 // group, 1) if few else 160 // group + 1
    lead = () if links is None else (4,)
    shapes = [(2, queries, group, e), *[(*lead, size, 1, e)] * 2, *[(2, 133, 1, e)] * 2]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    q, pk, pv, ok, ov = (jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))
    index, lengths = (), jnp.int32(size * 3 // 4)
    if links is not None:
        index = (jnp.array([[2, 1], [2, 3]], jnp.int32)[:, :links],)
        lengths = jnp.full((2, links), size, jnp.int32).at[1, -1].set(size // 2)
    own = Part(ok, ov, jnp.array([133, 5], jnp.int32))
    args = jax.device_put((q, Part(pk, pv, lengths), own, *index), device)
    known, tried = (
        mosaic_gpu.attend_mosaic(*args, registers=registers) for registers in (False, True)
    )
    return [
        float(np.abs(np.float32(a) - np.float32(b)).max())
        for a, b in zip(known, tried, strict=True)
    ]


@cache
def _log(choice: Choice) -> None:
    because = "; ".join(choice.reasons) or "the first choice"
    _LOG.info("attention over a prefix runs by %s (%s)", choice.kernel, because)


def _not_mosaic(
    platform: str,
    capability: tuple[int, int] | None,
    dtype: str,
    head_size: int,
    prefix_size: int,
) -> str | None:
    if platform != "gpu" or capability is None:
        return f"it is for NVIDIA's Hopper, this is {platform}"
    if capability[0] != 9:
        # Blackwell's tensor cores have other instructions, earlier ones no TMA.
        return f"it is for compute capability 9, this is {capability[0]}.{capability[1]}"
    if dtype not in _HALVES:
        return f"it multiplies {' and '.join(_HALVES)}, not {dtype}"
    if head_size not in mosaic_gpu.HEAD_SIZES:
        return f"it is for head sizes {mosaic_gpu.HEAD_SIZES}, not {head_size}"
    if prefix_size % mosaic_gpu.KEYS_MULTIPLE:
        return f"prefixes are padded to {prefix_size}, no multiple of {mosaic_gpu.KEYS_MULTIPLE}"
    return None


def _not_cudnn(
    platform: str,
    capability: tuple[int, int] | None,
    dtype: str,
    head_size: int,
    indexed: bool,
) -> str | None:
    if platform != "gpu" or capability is None:
        return f"it is for NVIDIA's GPUs, this is {platform}"
    if capability < (8, 0):
        return f"its attention needs compute capability 8, this is {capability[0]}.{capability[1]}"
    if not cudnn.AVAILABLE:
        return "this JAX has no call of it that gives log-sum-exps in float32"
    if indexed:
        return "it takes no index: every row's prefix would be copied"
    if dtype not in _HALVES:
        return f"it multiplies {' and '.join(_HALVES)}, not {dtype}"
    most = 256 if capability >= (9, 0) else 128
    if head_size % 8 or head_size > most:
        return f"it is for head sizes that are multiples of 8 up to {most}, not {head_size}"
    return None
