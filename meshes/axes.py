# SPDX-License-Identifier: Apache-2.0
"""Names of mesh axes, defined once, and the meshes that slices run on."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from geojax.meshes.strategy import Strategy

DATA = "dp"
"""Sequences of a batch are spread over it; parameters are copies."""
TENSOR = "tp"
"""Heads, MLP width and vocabulary are spread over it."""
PIPELINE = "pp"
"""Layers are spread over it."""
SLICE = "slice"
"""Slices that exchange pseudo-gradients."""


def data_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """One slice's devices, data-parallel."""
    return Mesh(np.asarray(devices), (DATA,), axis_types=(AxisType.Auto,))


def strategy_mesh(strategy: Strategy, devices: Sequence[jax.Device]) -> Mesh:
    """Devices as (pp, dp, tp): neighbours share layers, where most is sent.

    ValueError where their number is not the strategy's.
    """
    if len(devices) != strategy.devices:
        raise ValueError(
            f"strategy {strategy} wants {strategy.devices} devices, and was given {len(devices)}"
        )
    shape = (strategy.pp, strategy.dp, strategy.tp)
    axes = (PIPELINE, DATA, TENSOR)
    return Mesh(np.asarray(devices).reshape(shape), axes, axis_types=(AxisType.Auto,) * 3)


def slice_mesh(leaders: Sequence[jax.Device]) -> Mesh:
    """One leader device a slice (or a group of slices that share it)."""
    return Mesh(np.asarray(leaders), (SLICE,), axis_types=(AxisType.Auto,))


def assign_devices(
    wanted: Sequence[int], devices: Sequence[jax.Device]
) -> list[tuple[jax.Device, ...]]:
    """Devices of each slice: its own where there are enough for all, else shared in turn.

    ValueError where one slice alone wants more devices than there are.
    """
    if max(wanted) > len(devices):
        raise ValueError(
            f"a slice wants {max(wanted)} devices, and there are {len(devices)}; lower "
            "slices.N.devices, or on CPU set XLA_FLAGS=--xla_force_host_platform_device_count="
            f"{max(wanted)}"
        )
    assigned, start = [], 0
    for count in wanted:
        if start + count > len(devices):
            start = 0
        assigned.append(tuple(devices[start : start + count]))
        start += count
    return assigned
