# SPDX-License-Identifier: Apache-2.0
"""Whether a run that was disturbed came out right, and what that cost it, from its files.

Invariant: what is checked is said by slices themselves, each for itself: the parameters in the
checkpoint that it saved last, and the samples that it says it took; the journal says what it was
given, and who was merged.
"""

import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from geojax.config import CheckpointConfig, RunConfig
from geojax.geomesh.agreed import Agreed
from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.samples import Share
from geojax.track.metrics import Record


@dataclass(frozen=True)
class Final:
    """What a slice saved last."""

    round: int
    """After which."""
    hash: str
    """Of the parameters and the outer optimizer's state."""


def read_history(folder: Path) -> History:
    """Of a run folder's journal."""
    history = History()
    for line in (folder / "journal.jsonl").read_bytes().split(b"\n")[:-1]:
        history.add(json.loads(line))
    return history


def read_finals(folder: Path, names: Iterable[str]) -> dict[str, Final]:
    """By slice, of those that have a whole checkpoint."""
    from geojax.train.checkpoint import Checkpoints

    found = {}
    for name in names:
        place = folder / "slices" / name / "checkpoints"
        if not place.is_dir():
            continue
        with Checkpoints(place, CheckpointConfig(), reads_only=True) as checkpoints:
            if not checkpoints.empty:
                state, meta = checkpoints.restore(None)
                shared = state["params"], state["outer_opt_state"]
                found[name] = Final(meta["border"], _hash(shared))
    return found


def _hash(tree: Any) -> str:
    import jax
    import numpy as np

    result = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        result.update(jax.tree_util.keystr(path).encode())
        result.update(np.ascontiguousarray(leaf).tobytes())
    return result.hexdigest()


def hash_problem(finals: Mapping[str, Final], last_round: int, merged: Sequence[str]) -> str:
    """What is wrong with the final parameters, in words; empty: those of all slices that were in
    the last round, and of any other that has its result, are equal."""
    for name in merged:
        if name not in finals or finals[name].round != last_round:
            saved = f"round {finals[name].round}" if name in finals else "nothing"
            return f"slice {name} was in round {last_round} and has saved {saved}"
    at_end = {name: final.hash for name, final in finals.items() if final.round == last_round}
    if len(set(at_end.values())) > 1:
        usual = Counter(at_end.values()).most_common(1)[0][0]
        odd = [name for name, found in at_end.items() if found != usual]
        return f"the final parameters of {', '.join(odd)} differ from the others'"
    return ""


def merged_shares(config: RunConfig, history: History) -> list[dict[str, Share]]:
    """The samples that each round merged, by slice, as the journal gave them out."""
    names, agreed, found = [s.name for s in config.slices], Agreed(config, None), []
    for number in range(1, history.round + 1):
        agreed.follow(history, number - 1)
        shares = agreed.open(history.members_of(number)).shares
        merged = history.rounds[number - 1]["merged"]
        found.append({names[i]: shares[i] for i in merged})
    return found


def sample_problem(rounds: Sequence[Mapping[str, Share]], records: Iterable[Record]) -> str:
    """What is wrong with the samples, in words; empty: rounds merged every one from the first to
    the last once, and slices took those that the journal gave them. `records`: of metrics.jsonl."""
    parts = sorted(
        (
            (part, number)
            for number, row in enumerate(rounds, 1)
            for s in row.values()
            for part in s
        ),
        key=lambda x: x[0].start,
    )
    expected = 0
    for part, number in parts:
        if part.start > expected:
            return f"no round merged samples {expected} to {part.start - 1}"
        if part.start < expected:
            return f"round {number} merged samples again, from {part.start} on"
        expected = part.stop
    told = 0
    for record in records:
        if record["kind"] == "slice" and record.get("merged"):
            number, name = record["round"], record["slice"]
            given = rounds[number - 1].get(name, ()) if number <= len(rounds) else ()
            took = tuple(range(*part) for part in record["took"])
            told += 1
            if took != given:
                return f"round {number}: slice {name} took {took}, and was given {given}"
    return "" if told else "no slice says which samples it took"


def round_seconds(closed: Sequence[float]) -> list[float]:
    """Of each round but the first, from when rounds were over."""
    return [after - before for before, after in pairwise(closed)]


def time_lost(closed: Sequence[float], disturbed: int) -> float:
    """Seconds that the disturbed round, and the one after it, took over the usual; `closed` is when
    each was over, from round 1."""
    lengths = dict(enumerate(round_seconds(closed), 2))
    near = (disturbed, disturbed + 1)
    usual = statistics.median([s for n, s in lengths.items() if n not in near] or lengths.values())
    return sum(lengths[n] - usual for n in near if n in lengths)
