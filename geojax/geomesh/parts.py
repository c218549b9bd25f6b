# SPDX-License-Identifier: Apache-2.0
"""What runs of slices need whether these are in one process or in several."""

from typing import Any

from geojax.config import RunConfig, require
from geojax.data import Corpus, TaskSet, TrainSequences, ValidSequences, both_splits
from geojax.geomesh.balance import Plan
from geojax.geomesh.worker import Worker
from geojax.train.evaluate import evaluation_record

CHUNK_STEPS = 32  # inner steps between looks at `stop`, at most
_CHUNK_SECONDS = 5.0  # the same, where the seconds of a step are known


def read_splits(
    config: RunConfig, corpus: Corpus | TaskSet
) -> tuple[TrainSequences, ValidSequences]:
    """The sequences of a run. ConfigError where there are too few."""
    train, valid = both_splits(corpus, config.data, config.model.shifted)
    corpus.require_batch(max(config.slice_batches))
    require(
        config.eval.first < valid.sequences,
        f"eval.first {config.eval.first}: there are {valid.sequences} held-out "
        "sequences; lower it, or raise data.valid_fraction",
    )
    return train, valid


def chunk_steps(config: RunConfig, plan: Plan) -> int:
    """The same for all slices, so that those of one batch size share one compiled loop, and a
    function of the plan, so that a resumed run has it too."""
    steps = min(CHUNK_STEPS, max(w.inner_steps for w in plan.work))
    if config.clock.kind == "modelled":
        return steps
    slowest = max(w.seconds_per_step for w in plan.work)
    return max(1, min(steps, int(_CHUNK_SECONDS / slowest)))


def evaluate_shared(worker: Worker, valid: ValidSequences, config: RunConfig) -> dict[str, Any]:
    """What an evaluation of the shared parameters gives, on the worker's devices."""
    program, wanted = worker.program, config.eval
    result = program.evaluate(
        program.put_params(worker.outer.params),
        lambda rows: valid.batches(rows, wanted.sequences, wanted.first, wanted.draws),
        wanted.batch,
        wanted.draws,
    )
    return evaluation_record(result, wanted, valid)


def lost_rounds_message(config: RunConfig, rounds: int) -> str:
    """Of the error that ends a run without progress."""
    return (
        f"no slice could join the last {rounds} rounds (train.anomalies.max_lost_rounds "
        f"{config.train.anomalies.max_lost_rounds}); look at the data, lower "
        "train.optimizer.learning_rate in the run's config.json and resume, or start anew"
    )
