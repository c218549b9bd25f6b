# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of one slice, whose processes are its own, holds beside its arrays.

Invariant: with the journal it says what the slice does next, in the middle of a round too, in
however many processes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from geojax.config import RunConfig, require
from geojax.data import Corpus, TaskSet
from geojax.geomesh.checkpoint import abstract_slice, checkpoint_tree
from geojax.geomesh.outer import OuterCopy
from geojax.geomesh.slice_feedback import SliceFeedback
from geojax.geomesh.slice_work import OpenWork
from geojax.geomesh.sync import ErrorFeedback
from geojax.geomesh.worker import Worker
from geojax.train.checkpoint import Checkpoints
from geojax.train.origin import check_origin, origin


class Saved(NamedTuple):
    """What was read from a checkpoint."""

    kept: dict[str, Any]
    """Arrays of the slice alone."""
    meta: dict[str, Any]

    @property
    def round(self) -> int:
        """That it was made in."""
        return self.meta["border"] + 1

    def is_of(self, epoch: int, border: int) -> bool:
        """Whether it holds the state at that border."""
        return (self.meta["epoch"], self.meta["border"]) == (epoch, border)

    def of_another_round(self) -> "Saved":
        """The same, where its round was undone, or is one that others have ended."""
        return self._replace(meta=self.meta | {"mid_round": False})

    def in_round(self, number: int) -> bool:
        """Whether it holds work of that round."""
        return self.meta["mid_round"] and self.round == number

    def give(self, worker: Worker, outer: OuterCopy, number: int, open_work: OpenWork) -> None:
        """To a worker that stands before round `number`, or in it."""
        kept, facts = self.kept, self.meta
        if not self.in_round(number):
            kept, facts = kept | {"params": outer.params}, {"progress": {}, "sent": None}
        worker.restore(kept, outer, facts)
        if self.meta["batch"] != worker.work.batch:
            worker.state = worker.program.carry_over(worker.state, self.meta["batch"])
        if self.in_round(number):
            open_work.restore(self.meta)


def save(
    checkpoints: Checkpoints,
    config: RunConfig,
    corpus: Corpus | TaskSet,
    worker: Worker,
    open_work: OpenWork,
    place: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    mid_round: bool,
) -> None:
    """`place`: epoch, border and what else the slice must know of itself; `records`: not known to
    be written. All processes of the slice call this."""
    meta = origin(config, corpus) | {
        "slice": worker.work.name,
        "mid_round": mid_round,
        **place,
        **worker.facts(),
        **open_work.facts(),
        "batch": worker.work.batch,
        "records": list(records),
    }
    checkpoints.save(checkpoint_tree([worker], mid_round), meta)


def restore(
    checkpoints: Checkpoints,
    config: RunConfig,
    corpus: Corpus | TaskSet,
    name: str,
    outer: OuterCopy,
    feedback: SliceFeedback,
) -> Saved:
    """Of slice `name`; the shared state and the error feedback are set to what they were.
    ConfigError where the checkpoint is of another run or slice."""
    meta = checkpoints.meta()
    check_origin(meta, config, corpus)
    require(
        meta["slice"] == name,
        f"the checkpoint is of slice {meta['slice']}, and this is {name}; give each slice a "
        "folder of its own",
    )
    sent = meta["sent"] is not None
    abstract = abstract_slice(name, outer, feedback.value, config.train, meta["mid_round"], sent)
    state, meta = checkpoints.restore(abstract)
    shared = jax.tree.map(np.array, (state["params"], state["outer_opt_state"]))
    outer.params, outer.opt_state = shared
    kept = state["slices"][name]
    feedback.settled, feedback.round = meta["border"], meta["feedback_round"]
    if feedback.value:
        feedback.value = ErrorFeedback(kept["feedback"], feedback.value.shard)
    return Saved(kept, meta)
