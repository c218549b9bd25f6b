# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of a GeoMesh run holds, and what must not have changed when it is read.

Invariant: state, position, plan and origin together say what the run does next.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from geojax.config import RunConfig, require
from geojax.data import Corpus
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


def origin(config: RunConfig, corpus: Corpus) -> dict[str, Any]:
    """Facts of a checkpoint that the run which continues it must share, as JSON."""
    return {
        "slices": [s.name for s in config.slices],
        "corpus": corpus.folder.name,
        "tokenizer": corpus.tokenizer_fingerprint,
        "identity": _identity(config),
    }


def check_origin(meta: dict[str, Any], config: RunConfig, corpus: Corpus) -> None:
    """ConfigError where the checkpoint with these facts is of another run."""
    ours = origin(config, corpus)
    require(
        meta["slices"] == ours["slices"],
        f"the checkpoint is of slices {meta['slices']}, the config of {ours['slices']}; resume "
        "with the config that wrote it",
    )
    require(
        (meta["corpus"], meta["tokenizer"]) == (ours["corpus"], ours["tokenizer"]),
        "the text or tokenizer is not what the run began with (corpus "
        f"{ours['corpus']}, tokenizer {ours['tokenizer']}; then {meta['corpus']}, "
        f"{meta['tokenizer']}); put the old ones back, or start a new run",
    )
    for name, value in ours["identity"].items():
        require(
            meta["identity"][name] == value,
            f"{name} in config.json is {value}, but {meta['identity'][name]} in the checkpoint; "
            "put it back, or start a new run",
        )


def _identity(config: RunConfig) -> dict[str, Any]:
    """Settings that the state depends on, by name."""
    parts = {
        "model": asdict(config.model),
        "data": asdict(config.data),
        "exchange": asdict(config.exchange),
    }
    return {
        f"{part}.{name}": list(value) if isinstance(value, tuple) else value
        for part, fields in parts.items()
        for name, value in fields.items()
        if name not in ("source", "tokenizer")  # their result is compared
    }
