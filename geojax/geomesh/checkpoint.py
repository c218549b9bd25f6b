# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of a GeoMesh run holds.

Invariant: state, position, plan and origin together say what the run does next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from geojax.config import TrainConfig
from geojax.geomesh.outer import OuterCopy
from geojax.geomesh.sync import ErrorFeedback
from geojax.geomesh.worker import Worker
from geojax.train.checkpoint import by_name
from geojax.train.step import init_state


@dataclass
class Position:
    """How far a run is, at its last round border; saved with every checkpoint."""

    round: int = 0
    cursor: int = 0
    """Next global sample."""
    seconds: float = 0.0
    """On the run's clock."""
    inner_seconds: float = 0.0
    """Real time of the inner steps since then."""
    late: list[float] = field(default_factory=list)
    """By slice, seconds of steps ahead that were left to do at that border; empty: none."""
    behind: list[int] = field(default_factory=list)
    """By slice, steps of the open round that go beside the exchange before; empty: none."""
    lost_rounds: int = 0
    """In a row that no slice could join."""
    wall_seconds: float = 0.0
    """Real time, over all processes that worked on the run."""


def take_over(workers: Sequence[Worker], stored: Any) -> None:
    """At a round's border, from a checkpoint of other slices, as it is read without shapes.

    What is shared is everybody's; a slice of the same name gets its inner optimizer's state and
    error feedback back, and any other begins with fresh ones. Feedback of parts of the merge, which
    are others, is gone.
    """
    leaves = by_name(stored)
    there = stored["slices"]

    def like(template: Any, prefix: str) -> Any:
        names = by_name(template)
        found = [np.array(leaves[f"{prefix}{name}"]) for name in names]
        return jax.tree.unflatten(jax.tree.structure(template), found)

    outer = workers[0].outer
    for worker in workers:
        shared = OuterCopy(like(outer.params, "params/"), like(outer.opt_state, "outer_opt_state/"))
        kept = worker.checkpoint(mid_round=False)
        kept.pop("shard_feedback", None)
        if worker.work.name in there:
            kept = like(kept, f"slices/{worker.work.name}/")
        worker.restore(kept, shared, worker.facts())


def abstract_slice(
    name: str,
    outer: OuterCopy,
    feedback: ErrorFeedback | None,
    train: TrainConfig,
    mid_round: bool,
    sent: bool,
) -> dict[str, Any]:
    """Shapes of what `checkpoint_tree` returns for one slice, whatever its plan. `sent`: whether it
    had gone on."""

    def tree() -> dict[str, Any]:
        state = init_state(outer.params, train)
        kept: dict[str, Any] = {
            "opt_state": state.opt_state,
            "step": state.step,
            "mean_loss": state.mean_loss,
        }
        if feedback:
            kept["feedback"] = feedback.own
        if mid_round:
            kept["params"] = state.params
        if sent:
            kept["sent"] = jax.tree.leaves(outer.params)
        shared = {"params": outer.params, "outer_opt_state": outer.opt_state}
        return shared | {"slices": {name: kept}}

    return jax.eval_shape(tree)


def checkpoint_tree(workers: Sequence[Worker], mid_round: bool) -> dict[str, Any]:
    """The arrays of a checkpoint. The copies of the shared state are equal, so one is kept."""
    shared = workers[0].outer
    return {
        "params": shared.params,
        "outer_opt_state": shared.opt_state,
        "slices": {w.work.name: w.checkpoint(mid_round) for w in workers},
    }
