# SPDX-License-Identifier: Apache-2.0
"""What slices can do, measured here: seconds a step and bytes by batch, after compilation.

Invariant: what does not compile, or runs out of memory, is left out; the rest is measured.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from geojax.config import ConfigError, RunConfig
from geojax.data import empty_batch
from geojax.geomesh.balance import Option, SliceProfile
from geojax.geomesh.options import MakeProgram
from geojax.meshes.aot import compiled_memory
from geojax.meshes.strategy import Strategy
from geojax.models.transformer import Params
from geojax.train.agree import READY, first_chooses, reason, worst
from geojax.train.engine import FOREIGN
from geojax.train.program import Program
from geojax.train.step import TrainState, init_state

_LOG = logging.getLogger(__name__)
_SECONDS = 0.3  # of steps to time, about
_FIRST_STEPS, _MOST_STEPS = 3, 10_000


def measured_profiles(
    config: RunConfig,
    devices: Sequence[tuple[jax.Device, ...]],
    strategies: Sequence[Sequence[Strategy]],
    make_program: MakeProgram,
    params: Params,
) -> list[SliceProfile]:
    """Profiles of the local slices by the `strategies` of each; slices on the same devices by the
    same strategies share one measurement. ConfigError where a slice can run none of its own.
    """
    measured: dict[Any, Option | str] = {}
    options = []
    for s, row, choices in zip(config.slices, devices, strategies, strict=True):
        for strategy in choices:
            if (row, strategy) not in measured:
                measured[row, strategy] = _try(config, row, strategy, make_program, params)
        found = {strategy: measured[row, strategy] for strategy in choices}
        failed = {str(k): why for k, why in found.items() if isinstance(why, str)}
        for name, why in failed.items():
            _LOG.warning("slice %s does without %s, which failed: %s", s.name, name, why)
        if len(failed) == len(found):
            raise ConfigError(
                f"slice {s.name}: none of {', '.join(failed)} ran here; the last: {why}; give it "
                "smaller batches, or more devices"
            )
        options.append(tuple(x for x in found.values() if isinstance(x, Option)))
    sharers = Counter(device for row in devices for device in row)
    profiles = []
    for s, row, row_options in zip(config.slices, devices, options, strict=True):
        limit = _memory_limit(row)
        if limit is not None:  # slices that share a device keep their states on it side by side
            limit //= max(sharers[device] for device in row)
        profiles.append(SliceProfile(s.name, row_options, limit))
    return profiles


def _try(
    config: RunConfig,
    row: tuple[jax.Device, ...],
    strategy: Strategy,
    make_program: MakeProgram,
    params: Params,
) -> Option | str:
    """As measured; or why it could not be. Nothing of a failure stays but its text: its frames
    would hold arrays."""
    try:
        return _measure(config, make_program(row, strategy), params)
    except jax.errors.JaxRuntimeError as failure:
        return reason(failure)


def _measure(config: RunConfig, program: Program, params: Params) -> Option | str:
    strategy = program.strategy
    failed = None
    try:
        program.compile(1)
    except jax.errors.JaxRuntimeError as failure:
        failed = reason(failure)
    if worst(failed) != READY:  # the processes that could would wait for the others in a step
        return failed or FOREIGN
    rows = len(program.local_sequences or range(strategy.global_batch))
    batch = empty_batch((1, rows), config.data.seq_len)
    tokens = np.random.default_rng(0).integers(
        0, config.model.vocab_size, batch.tokens.shape, np.int32
    )
    weights = np.ones_like(batch.weights)
    positions = np.broadcast_to(np.arange(config.data.seq_len, dtype=np.int32), tokens.shape)
    batch = batch._replace(tokens=tokens, targets=tokens, weights=weights, positions=positions)
    chunk = program.put_chunk(batch)
    state = program.put_state(init_state(params, config.train))
    limited = _memory_limit(program.devices) is not None
    peak = compiled_memory(program.compile(1)).total_bytes if limited else 0

    def step(state: TrainState) -> TrainState:
        return jax.block_until_ready(program.run(state, chunk, 1, 0.0, 0.0, 0))[0]

    def steps(state: TrainState, count: int) -> tuple[TrainState, float]:
        started = time.perf_counter()
        for _ in range(count):
            state = step(state)
        return state, time.perf_counter() - started

    state, seconds = steps(step(state), _FIRST_STEPS)
    wanted = math.ceil(_FIRST_STEPS * (_SECONDS / seconds - 1))
    more = first_chooses(min(max(wanted, 0), _MOST_STEPS))  # the same in all processes
    seconds += steps(state, more)[1]
    return Option(strategy.global_batch, seconds / (_FIRST_STEPS + more), peak, str(strategy))


def _memory_limit(devices: Sequence[jax.Device]) -> int | None:
    """What the first of them that is this process's tells; None on CPU, where nothing is measured
    against it."""
    stats = next(d for d in devices if d.process_index == jax.process_index()).memory_stats()
    return stats.get("bytes_limit") if stats else None
