# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint comes from, and what must not have changed when it is read."""

from dataclasses import asdict
from typing import Any

from geojax.config import RunConfig, require
from geojax.data import Corpus, TaskSet


def origin(config: RunConfig, corpus: Corpus | TaskSet) -> dict[str, Any]:
    """Facts of a checkpoint that the run which continues it must share, as JSON."""
    return {
        "slices": [s.name for s in config.slices],
        "corpus": corpus.folder.name,
        "tokenizer": corpus.tokenizer_fingerprint,
        "identity": _identity(config),
    }


def check_origin(
    meta: dict[str, Any],
    config: RunConfig,
    corpus: Corpus | TaskSet,
    any_slices: bool = False,
) -> None:
    """ConfigError where the checkpoint with these facts is of another run. `any_slices`: slices may
    be others, though not none."""
    ours = origin(config, corpus)
    others = any_slices and meta["slices"] and ours["slices"]
    require(
        meta["slices"] == ours["slices"] or others,
        f"slices in config.json are {ours['slices']}, but {meta['slices']} in the checkpoint, of "
        "which each has a state of its own (they may change where all are in one process); put "
        "them back, or take the weights with `geojax convert` and start a new run with --init",
    )
    require(
        (meta["corpus"], meta["tokenizer"]) == (ours["corpus"], ours["tokenizer"]),
        "the text or tokenizer is not what the run began with (corpus "
        f"{ours['corpus']}, tokenizer {ours['tokenizer']}; then {meta['corpus']}, "
        f"{meta['tokenizer']}); put the old ones back, or start a new run",
    )
    for name, value in ours["identity"].items():
        require(
            _same(meta["identity"].get(name, value), value),
            f"{name} in config.json is {value}, but {meta['identity'].get(name)} in the "
            "checkpoint; put it back, or start a new run",
        )


def _same(theirs: Any, ours: Any) -> bool:
    """Settings that an older version did not have are no difference."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return all(ours[name] == value for name, value in theirs.items() if name in ours)
    return theirs == ours


def _plain(name: str, value: Any) -> Any:
    """As JSON has it; a file of the user's own by its name, since folders move."""
    if name == "block":
        return value.rpartition("/")[2]
    return list(value) if isinstance(value, tuple) else value


def _identity(config: RunConfig) -> dict[str, Any]:
    """Settings that the state depends on, by name."""
    parts = {
        "model": asdict(config.model),
        "data": asdict(config.data),
        "exchange": asdict(config.exchange),
    }
    return {
        f"{part}.{name}": _plain(name, value)
        for part, fields in parts.items()
        for name, value in fields.items()
        if name not in ("source", "tokenizer")  # their result is compared
    }
