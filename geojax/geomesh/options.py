# SPDX-License-Identifier: Apache-2.0
"""What a slice's devices may do: the strategies that are measured or modelled, which one runs, and
which are compiled before they do.

Invariant: without CONA a slice has one layout for all batches, that of its config; under CONA each
batch has the strategy that the timing model predicts to be the fastest of all legal ones.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from geojax.config import RunConfig, slice_strategy
from geojax.geomesh.balance import Plan, SliceWork
from geojax.geomesh.clock import naming
from geojax.geomesh.parts import chunk_steps
from geojax.geomesh.worker import Worker
from geojax.meshes.candidates import frontier
from geojax.meshes.strategy import Strategy, parse_strategy
from geojax.train.program import Program
from geojax.train.steering import candidates, local_strategy

MakeProgram = Callable[[tuple[jax.Device, ...], Strategy], Program]
"""Of a slice's devices; the same one each time that it is asked."""


def choices(config: RunConfig, devices: Sequence[tuple[jax.Device, ...]]) -> list[list[Strategy]]:
    """The strategies of each slice that are worth measuring: one a batch, under CONA the one that
    is predicted to be the fastest of all that its devices can take."""
    if config.cona is None:
        batches, micro = config.balance.batch_sizes, config.train.micro_batch
        return [[slice_strategy(s, micro, batch) for batch in batches] for s in config.slices]
    found = []
    for s, row in zip(config.slices, devices, strict=True):
        with naming(s.name):
            found.append([c.strategy for c in frontier(candidates(config, row))])
    return found


def work_strategy(config: RunConfig, index: int, work: SliceWork) -> Strategy:
    """How slice `index` computes its part of a plan here.

    Under CONA and the modelled clock the plan names strategies of the slice's GPUs; here copies on
    its devices share the batch, in two parts or more where there are two sequences, which tell the
    noise apart.
    """
    s = config.slices[index]
    if config.cona and config.clock.kind == "measured":
        return parse_strategy(work.strategy)
    if config.cona and s.devices == 1:
        return local_strategy(config, parse_strategy(work.strategy))
    return slice_strategy(s, config.train.micro_batch, work.batch)


class Preparer:
    """Compiles, beside the rounds, what a plan wants that is likely to be the next."""

    def __init__(self, config: RunConfig, make_program: MakeProgram):
        self._config, self._make_program = config, make_program
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._asked: set[tuple[int, Strategy, int]] = set()

    def prepare(self, plan: Plan, workers: Sequence[Worker]) -> None:
        """Returns at once. What does not compile is tried again, and handled, when a worker takes
        it up; who takes it up before it is ready waits."""
        steps = chunk_steps(self._config, plan)
        for worker in workers:
            strategy = work_strategy(self._config, worker.index, plan.work[worker.index])
            asked = worker.index, strategy, steps
            if asked not in self._asked:
                self._asked.add(asked)
                program = self._make_program(worker.devices, strategy)
                self._compiler.submit(program.compile_all, steps)

    def close(self) -> None:
        """Drop what waits to be compiled."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
