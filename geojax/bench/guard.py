# SPDX-License-Identifier: Apache-2.0
"""What the guard saves of requests that a table of depths is wrong for.

The depths are those that every task but one bears, and bounds are profiled on those. Requests of
the one that was left out, whose prefixes have blanks that only their private part explains, are
failures that nobody foresaw; all others should go on undisturbed.

Resumable: what was answered lies in the folder, a file for each task and share.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from geojax.bench.bicache import SHARES, known_cell, right_by
from geojax.bench.guard_table import LEFT_OUT, Watch, alarm_line, watch_table
from geojax.bicache.depth import Depths, Guard
from geojax.bicache.engine import Engine, Sizes
from geojax.bicache.policy import get_policy
from geojax.bicache.profile import profile_share
from geojax.bicache.table import guard_of, task_requests
from geojax.config import require
from geojax.data import TaskSet, tasks
from geojax.diffusion.exact import LENGTH, STEPS, require_tasks
from geojax.diffusion.load import Model, load
from geojax.models.transformer import Transformer
from geojax.track.environment import made_by
from geojax.track.metrics import NewFile, NewFolder, to_json, write_atomically


@dataclass(frozen=True)
class GuardOptions:
    """What the guard saves of requests that a table of depths is wrong for, on tasks. Resumable."""

    model: tyro.conf.Positional[Path]
    """Folder of a diffusion model of tasks, such as a run of preset dlm-tasks."""
    out: NewFolder = Path("runs/bench-guard")
    """Folder of what was answered."""
    depth: int = 4
    """Layers that all prefixes are shared in, but too many for task fill."""
    count: int = 500
    """Requests of each task and share."""
    every: int = 4
    """Steps from one refresh to the next."""
    json: NewFile | None = None
    """File for the figures; unset: guard.json in the folder."""


def run_guard(options: GuardOptions) -> list[Watch]:
    """Answer requests with and without a guard, and print the table. ConfigError on bad input."""
    model, console = load(options.model), Console(highlight=False)
    require_tasks(model)
    layers = model.config.layers
    require(
        0 < options.depth < layers,
        f"depth {options.depth} must lie in 1..{layers - 1}, where hidden states are kept",
    )
    require(options.count >= 1, f"count {options.count} must be at least 1")
    get_policy("refresh", options.every)
    options.out.mkdir(parents=True, exist_ok=True)
    names = [task.name for task in tasks.TASKS]
    guard = _profiled(model, [n for n in names if n != LEFT_OUT], options.depth)
    found = []
    for name in names:
        for share in SHARES:
            found.append(_cached(model, guard, name, share, options))
            console.print(f"answered {name}, prefix {share:.0%}")
    console.print(watch_table(found))
    console.print(f"  {alarm_line(found)}")
    content = made_by("none") | {"revision": model.revision, "every": options.every}
    content |= {"watches": [asdict(w) for w in found]}
    path = options.json or options.out / "guard.json"
    write_atomically(path, json.dumps(to_json(content), indent=2) + "\n")
    console.print(f"wrote {path}", soft_wrap=True)
    return found


def _profiled(model: Model, names: Sequence[str], depth: int) -> Guard:
    """Bounds for that depth, over requests of these tasks with all shares."""
    profiles = []
    for share in SHARES:
        sequences, first_mask, kinds = task_requests(names, share, 32, LENGTH)
        prefix = round(share * LENGTH)
        profiles.append(
            profile_share(
                Transformer(model.config),
                model.params,
                sequences,
                prefix,
                model.mask_id,
                first_mask=first_mask,
                kinds=kinds,
            )
        )
    return guard_of(profiles, Depths(((0.0, depth),)))


def _cached(model: Model, guard: Guard, name: str, share: float, options: GuardOptions) -> Watch:
    path = options.out / f"{name}-{share}-depth{options.depth}-every{options.every}.json"
    facts: dict[str, Any] = {"count": options.count, "revision": model.revision}
    facts |= {"tasks": TaskSet.folder.name, "bounds": [list(bound) for bound in guard.bounds]}
    known = known_cell(path, facts)
    if "watch" in known:
        return Watch(**known["watch"])
    found = _watch(model, guard, name, share, options)
    write_atomically(path, json.dumps(facts | {"watch": asdict(found)}) + "\n")
    return found


def _watch(model: Model, guard: Guard, name: str, share: float, options: GuardOptions) -> Watch:
    rows = tasks.make_examples(name, share, options.count, 0, LENGTH)
    depths, sizes = Depths(((0.0, options.depth),)), Sizes(2e8, 2e7, page=16)

    def answers(policy: str, watching: Guard | None) -> tuple[Engine, np.ndarray]:
        engine = Engine(
            model.sampler(), get_policy(policy, options.every), sizes, depths, guard=watching
        )
        return engine, right_by(engine, rows, STEPS)

    _, plain = answers("refresh", None)
    _, shared = answers("bicache", None)
    engine, guarded = answers("bicache", guard)
    lost = plain & ~shared
    work = engine.work
    return Watch(
        name,
        share,
        options.depth,
        options.count,
        float(plain.mean()),
        float(shared.mean()),
        float(guarded.mean()),
        float(guarded[lost].mean()) if lost.any() else None,
        engine.retreats,
        work["probes"] / (work["suffix"] + work["prefix"]),
    )
