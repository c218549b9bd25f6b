# SPDX-License-Identifier: Apache-2.0
"""The device of a stage's process."""

from typing import Any

import jax

from geojax.meshes.hardware import GPUS, NOMINAL, Gpu
from geojax.platform import detect_gpu


def gpu_name() -> str | None:
    """The key in GPUS of what is here; None for another GPU, or a CPU."""
    return detect_gpu(jax.devices()[0].device_kind)


def sheet() -> Gpu:
    """Its figures; `NOMINAL` where none are known."""
    name = gpu_name()
    return GPUS[name] if name else NOMINAL


def pool_bytes() -> int | None:
    """What arrays may take; None on a CPU, which does not say."""
    return _stats().get("bytes_limit")


def peak_bytes() -> int:
    """The most that arrays of this process have taken so far; 0 on a CPU."""
    return _stats().get("peak_bytes_in_use", 0)


def too_small(wanted_bytes: float) -> str | None:
    """Why `wanted_bytes` do not fit here; None where they do, or nothing says."""
    limit = pool_bytes()
    if limit is None or wanted_bytes <= limit:
        return None
    return f"wants about {wanted_bytes / 1e9:.1f} GB, and {limit / 1e9:.1f} GB are there"


def _stats() -> dict[str, Any]:
    return jax.devices()[0].memory_stats() or {}
