# SPDX-License-Identifier: Apache-2.0
"""What slices can do, measured here: seconds a step and bytes by batch, after compilation."""

import time
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from geojax.config import RunConfig
from geojax.data import Batch
from geojax.geomesh.balance import Option, SliceProfile
from geojax.meshes.axes import DATA, data_mesh
from geojax.models.transformer import Params
from geojax.train.step import InnerLoop, init_state

_SECONDS = 0.3  # of steps to time, at least


def measured_profiles(
    config: RunConfig,
    devices: Sequence[tuple[jax.Device, ...]],
    loop: InnerLoop,
    params: Params,
) -> list[SliceProfile]:
    """Profiles of the local slices; slices on the same devices share one measurement."""
    measured = {
        row: tuple(_measure(config, row, loop, params, b) for b in config.balance.batch_sizes)
        for row in dict.fromkeys(devices)
    }
    sharers = Counter(device for row in devices for device in row)
    profiles = []
    for s, row in zip(config.slices, devices, strict=True):
        limit = _memory_limit(row[0])
        if limit is not None:  # slices that share a device keep their states on it side by side
            limit //= max(sharers[device] for device in row)
        profiles.append(SliceProfile(s.name, measured[row], limit))
    return profiles


def _measure(
    config: RunConfig,
    devices: tuple[jax.Device, ...],
    loop: InnerLoop,
    params: Params,
    batch: int,
) -> Option:
    mesh = data_mesh(devices)
    micro = (config.train.micro_batch or batch // len(devices)) * len(devices)
    shape = (1, batch // micro, micro, config.data.seq_len)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
    positions = np.broadcast_to(np.arange(config.data.seq_len, dtype=np.int32), shape)
    chunk = Batch(tokens, tokens, np.ones(shape, np.float32), np.zeros_like(tokens), positions)
    chunk = jax.device_put(chunk, NamedSharding(mesh, PartitionSpec(None, None, DATA)))
    state = init_state(jax.tree.map(np.array, params), config.train)
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    limited = _memory_limit(devices[0]) is not None
    peak = _peak_bytes(loop.lower(state, chunk, 1, 0.0, 0.0, 0).compile()) if limited else 0
    state = jax.block_until_ready(loop(state, chunk, 1, 0.0, 0.0, 0))[0]
    started, steps = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < _SECONDS or steps < 3:
        state = jax.block_until_ready(loop(state, chunk, 1, 0.0, 0.0, 0))[0]
        steps += 1
    return Option(batch, seconds / steps, peak, f"dp{len(devices)}")


def _peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Of one device: arguments, results and temporaries, donated buffers counted once."""
    memory = compiled.memory_analysis()
    assert memory is not None, "a backend that tells its limit tells what a program needs"
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _memory_limit(device: jax.Device) -> int | None:
    """What the device tells; None on CPU, where nothing is measured against it."""
    stats = device.memory_stats()
    return stats.get("bytes_limit") if stats else None
