# SPDX-License-Identifier: Apache-2.0
"""What a loop over slices begins with: text, devices, programs, parameters, plan.

Invariant: the same config gives the same slices, parameters and plan as a GeoMesh run's, so that
methods differ in their loop alone.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np

from geojax.config import ConfigError, RunConfig, require
from geojax.data import Corpus, TaskSet, both_splits
from geojax.geomesh.clock import modelled_exchange_seconds, modelled_profiles, traffic
from geojax.geomesh.options import work_strategy
from geojax.geomesh.outer import OuterCopy
from geojax.geomesh.steering import first_plan
from geojax.geomesh.worker import RoundProgress, Worker
from geojax.meshes.axes import assign_devices
from geojax.meshes.network import Network
from geojax.meshes.wan import get_wan
from geojax.models.transformer import Params
from geojax.train.evaluate import evaluation_record
from geojax.train.initial import host_params
from geojax.train.program import Program
from geojax.train.steering import make_task

CHUNK_STEPS = 32
"""Inner steps handed to a slice's devices at once, at most."""


class Setup:
    """A run's slices before their first step."""

    def __init__(self, config: RunConfig, corpus: Corpus | TaskSet):
        """ConfigError where text or devices do not do."""
        self.config = config
        self.sequences, self._valid = both_splits(corpus, config.data, config.model.shifted)
        corpus.require_batch(max(config.slice_batches))
        require(
            config.eval.first < self._valid.sequences,
            f"eval.first {config.eval.first}: there are {self._valid.sequences} held-out "
            "sequences; lower it, or raise data.valid_fraction",
        )
        self.traffic = traffic(config)
        self.exchange_seconds = modelled_exchange_seconds(config, self.traffic.payload_bytes)
        self.plan = first_plan(config, modelled_profiles(config), self.exchange_seconds)
        self.network = Network(get_wan(config.clock.wan), tuple(s.region for s in config.slices))
        self.params: Params = host_params(config, resumed=False)
        try:
            self._devices = assign_devices([s.devices for s in config.slices], jax.local_devices())
        except ValueError as error:
            raise ConfigError(str(error)) from error
        task = make_task(config)
        self._program = cache(lambda row, strategy: Program(task, strategy, row))

    @property
    def chunk_steps(self) -> int:
        """The same for all slices, so that those of one batch share one compiled loop."""
        return min(CHUNK_STEPS, max(w.inner_steps for w in self.plan.work))

    def worker(self, index: int) -> Worker:
        """Slice `index`, compiled, at the initial parameters."""
        work = self.plan.work[index]
        program = self._program(self._devices[index], work_strategy(self.config, index, work))
        outer = OuterCopy(jax.tree.map(np.array, self.params), ())
        worker = Worker(index, work, self.chunk_steps, program, outer, None)
        worker.compile()
        return worker

    def evaluate(self, program: Program, params: Params) -> dict[str, Any]:
        """Fields of an `eval` record, apart from when it was."""
        config = self.config.eval
        result = program.evaluate(
            program.put_params(params),
            lambda rows: self._valid.batches(rows, config.sequences, config.first, config.draws),
            config.batch,
            config.draws,
        )
        return evaluation_record(result, config, self._valid)


def run_steps(
    worker: Worker,
    setup: Setup,
    first_sample: int,
    steps: int,
    span: tuple[float, float],
    beat: Callable[[], None],
) -> RoundProgress:
    """`steps` inner steps of a slice from where it is; `span`: progress of the run over them."""
    worker.work = replace(worker.work, inner_steps=steps)
    worker.progress = RoundProgress()
    share = range(first_sample, first_sample + worker.work.sequences)

    def go_on() -> bool:
        beat()
        return False

    worker.run(setup.sequences, share, span, go_on)
    done = worker.progress
    worker.end_round()  # the next begins from what is shared, where the method says so
    return done


def added(a: RoundProgress, b: RoundProgress) -> RoundProgress:
    """Steps of both; noise is not measured."""
    names = ("done", "loss", "tokens", "grad_norm", "steps", "skipped", "compute_seconds")
    return RoundProgress(**{name: getattr(a, name) + getattr(b, name) for name in names})
