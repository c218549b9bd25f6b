# SPDX-License-Identifier: Apache-2.0
"""What reuse of prefixes costs in accuracy, on tasks with one right answer.

Every policy answers the same requests, so differences are paired. A request's prefix is its own, as
in a conversation, and is built as a store builds it. The bound beside a loss is one-sided, 95 %, by
the normal approximation of the paired differences.

Depths are tried one by one where reuse in all layers costs something; else, and without `sweep`,
only the first, and that of the table. Resumable: what was answered lies in the folder, a file for
each cell of the table.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from geojax.bench.bicache_table import Cell, Result, loss_tables
from geojax.bicache.depth import Depths
from geojax.bicache.engine import Engine, Job, Sizes
from geojax.bicache.policy import get_policy
from geojax.bicache.store import Builder
from geojax.bicache.table import read_table
from geojax.config import require
from geojax.data import TaskSet, tasks
from geojax.diffusion.exact import LENGTH, STEPS, require_tasks, right
from geojax.diffusion.load import Model, load
from geojax.diffusion.request import Request
from geojax.track.environment import made_by
from geojax.track.metrics import NewFile, NewFolder, to_json, write_atomically

SHARES = (0.5, 0.7, 0.9)
HARMLESS = 0.018
"""Loss, as an upper bound, under which reuse in all layers shows that no depth costs anything."""
_Z = 1.645  # one-sided 95 %


@dataclass(frozen=True)
class BicacheOptions:
    """What reuse of prefixes costs in accuracy, on tasks with one right answer. Resumable."""

    model: tyro.conf.Positional[Path]
    """Folder of a diffusion model of tasks, such as a run of preset dlm-tasks."""
    out: NewFolder = Path("runs/bench-bicache")
    """Folder of what was answered."""
    count: int = 2_000
    """Requests of each task and share."""
    seq_len: int = LENGTH
    """Tokens of a request."""
    steps: int = STEPS
    """Denoising steps."""
    every: int = 4
    """Steps from one refresh to the next, of policies that refresh."""
    depths: Path | None = None
    """Table that `geojax profile depth` wrote; unset: fixed depths alone."""
    builder: Builder = "prefix"
    """How prefixes are built."""
    tasks: tuple[str, ...] = ()
    """Which; unset: all."""
    sweep: bool = True
    """Try every depth where reuse in all layers costs something; else the first, and the table's,
    everywhere."""
    json: NewFile | None = None
    """File for the figures; unset: bicache.json in the folder."""


def run_bicache(options: BicacheOptions) -> list[Result]:
    """Answer requests of each task and share under all policies; tables of losses.

    ConfigError where the model is not one of tasks.
    """
    count, seq_len, folder = options.count, options.seq_len, options.out
    require(count >= 2, f"count {count} must be at least 2")
    get_policy("refresh", options.every)
    model = load(options.model)
    require_tasks(model)
    depths = None
    if options.depths:
        depths, _ = read_table(options.depths, model.revision, options.builder)
    names = [task.name for task in tasks.TASKS]
    wrong = [name for name in options.tasks if name not in names]
    require(not wrong, f"no task is named {wrong[:1]}; use {names}")
    console = Console(highlight=False)
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for task in options.tasks or names:
        for share in SHARES:
            rows = tasks.make_examples(task, share, count, 0, seq_len)
            plain, harmless = None, False
            asked = {1, depths.at(share)} if depths else {1}
            for cell in cells(
                task, share, options.every, depths, model.config.layers, options.builder
            ):
                few = harmless or not options.sweep
                if cell.policy == "bicache" and cell.depth not in asked and few:
                    continue
                right = _cached(folder, cell, model, rows, options.steps)
                plain = right if plain is None else plain
                results.append(compare(cell, right, plain))
                if cell.policy == "full":
                    harmless = results[-1].bound <= HARMLESS
            (table,) = loss_tables(
                [r for r in results if (r.cell.task, r.cell.share) == (task, share)]
            )
            console.print(table)
    content = made_by("none") | {
        "examples": count,
        "seq_len": seq_len,
        "steps": options.steps,
        "depths": {str(share): depths.at(share) for share in SHARES} if depths else {},
        "results": [asdict(result) for result in results],
    }
    path = options.json or folder / "bicache.json"
    write_atomically(path, json.dumps(to_json(content), indent=2) + "\n")
    console.print(f"wrote {path}")
    return results


def cells(
    task: str, share: float, every: int, depths: Depths | None, layers: int, builder: Builder
) -> Iterator[Cell]:
    """The first reuses nothing."""
    yield Cell(task, share, "none", None, None)
    yield Cell(task, share, "refresh", every, None)
    yield Cell(task, share, "prefix", None, None)
    yield Cell(task, share, "dual", None, None)
    yield Cell(task, share, "full", None, layers, builder)
    if depths is not None:
        yield Cell(task, share, "bicache-dual", None, depths.at(share), builder)
    for depth in range(1, layers):
        yield Cell(task, share, "bicache", every, depth, builder)


def answer(cell: Cell, model: Model, rows: tasks.TaskRows, steps: int) -> np.ndarray:
    """Whether each row's answer is right [b]."""
    depths = Depths(((0.0, cell.depth or 0),))
    engine = Engine(
        model.sampler(),
        get_policy(cell.policy, cell.every),
        Sizes(2e8, 2e7, page=16),
        depths,
        cell.builder,
    )
    return right_by(engine, rows, steps)


def right_by(engine: Engine, rows: tasks.TaskRows, steps: int) -> np.ndarray:
    """Whether the engine's answers are right [b]; all rows have prefixes of one length, each its
    own, and none is stored from one batch to the next."""
    prefix = int(rows.prefix_len[0])

    def answer(asks: Sequence[Request]) -> list[np.ndarray]:
        found = engine.answer([Job(ask, (prefix,)) for ask in asks])
        engine.store.purge()
        return [x.tokens for x in found]

    return right(rows, steps, answer)


def _cached(folder: Path, cell: Cell, model: Model, rows: tasks.TaskRows, steps: int) -> np.ndarray:
    path = folder / f"{cell.name}.json"
    facts: dict[str, Any] = {
        "count": len(rows.tokens),
        "steps": steps,
        "seq_len": rows.tokens.shape[1],
    }
    facts |= {"revision": model.revision, "tasks": TaskSet.folder.name}
    known = known_cell(path, facts).get("right", [])
    if len(known) == len(rows.tokens):
        return np.array(known, bool)
    right = answer(cell, model, rows, steps)
    content: dict[str, Any] = facts | {"right": right.astype(int).tolist()}
    write_atomically(path, json.dumps(content) + "\n")
    return right


def known_cell(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What a file of answers says, where it is of these facts; {} where it is of others, or cannot
    be read: then they are answered again."""
    try:
        known = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        return {}
    same = isinstance(known, dict) and {name: known.get(name) for name in facts} == facts
    return known if same else {}


def compare(cell: Cell, right: np.ndarray, plain: np.ndarray) -> Result:
    """Of answers that are right or not, paired."""
    share, count = float(right.mean()), len(right)
    losses = plain.astype(float) - right
    spread = float(losses.std(ddof=1)) / math.sqrt(count)
    return Result(
        cell,
        share,
        math.sqrt(share * (1 - share) / count),
        float(losses.mean()),
        # Where no answer differs, the rule of three: 3 / n bounds what was never seen.
        max(float(losses.mean()) + _Z * spread, 3 / count),
    )
