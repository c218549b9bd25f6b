# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of a GeoMesh run holds.

Invariant: state, position, plan and origin together say what the run does next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from geojax.geomesh.worker import Worker


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
    lost_rounds: int = 0
    """In a row that no slice could join."""
    wall_seconds: float = 0.0
    """Real time, over all processes that worked on the run."""


def checkpoint_tree(workers: Sequence[Worker], mid_round: bool) -> dict[str, Any]:
    """The arrays of a checkpoint. The copies of the shared state are equal, so one is kept."""
    shared = workers[0].outer
    return {
        "params": shared.params,
        "outer_opt_state": shared.opt_state,
        "slices": {w.work.name: w.checkpoint(mid_round) for w in workers},
    }
