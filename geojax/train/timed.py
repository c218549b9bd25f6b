# SPDX-License-Identifier: Apache-2.0
"""Steps of a program, timed here.

Invariant: seconds are of whole steps on random tokens after compilation, each waited for.
"""

import time
from statistics import median
from typing import NamedTuple

import jax
import numpy as np

from geojax.data import Batch, empty_batch
from geojax.train.program import Program
from geojax.train.step import TrainState


class Timed(NamedTuple):
    """What compiling and running a program took."""

    compile_seconds: float
    step_seconds: list[float]

    @property
    def seconds(self) -> float:
        """Of a step, the median."""
        return median(self.step_seconds)

    @property
    def spread(self) -> float:
        """Slowest less fastest step, as a share of the median one."""
        return (max(self.step_seconds) - min(self.step_seconds)) / self.seconds


def random_batch(program: Program) -> Batch:
    """A host chunk of one step: random tokens, each its own target."""
    task, strategy = program.task, program.strategy
    batch = empty_batch((1, strategy.global_batch), task.seq_len)
    tokens = np.random.default_rng(0).integers(
        0, task.model.vocab_size, batch.tokens.shape, np.int32
    )
    positions = np.broadcast_to(np.arange(task.seq_len, dtype=np.int32), tokens.shape)
    return batch._replace(
        tokens=tokens,
        targets=tokens,
        weights=np.ones_like(batch.weights),
        positions=positions,
    )


def one_step(program: Program, state: TrainState, chunk: Batch) -> TrainState:
    """The state after a step of rate 0, waited for."""
    return jax.block_until_ready(program.run(state, chunk, 1, 0.0, 0.0, 0)[0])


def time_steps(program: Program, steps: int, seed: int = 0) -> Timed:
    """Compile, and time `steps` steps from fresh parameters."""
    chunk = program.put_chunk(random_batch(program))
    started = time.perf_counter()
    program.compile(1)
    compiled = time.perf_counter() - started
    state = program.init(seed)
    state = one_step(program, state, chunk)  # the first allocates
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        state = one_step(program, state, chunk)
        times.append(time.perf_counter() - started)
    return Timed(compiled, times)
