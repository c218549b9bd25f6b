# SPDX-License-Identifier: Apache-2.0
"""How often a model of tasks gives the one right answer, symbol for symbol.

Invariant: every request is one that no training run has seen, answers are greedy, and the figures
follow from the weights alone.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from rich import box
from rich.console import Console
from rich.table import Table

from geojax.config import require
from geojax.config.files import read_config
from geojax.data import TaskSet, tasks
from geojax.diffusion.load import Model, load
from geojax.diffusion.request import Request, SamplingConfig
from geojax.models.weights import read_special
from geojax.models.weights.special import TOKENIZER
from geojax.track.environment import machine
from geojax.track.metrics import to_json, write_atomically

SEEDS = (0, 1, 2)
STEPS = 8
"""Denoising steps of an answer."""
LENGTH = 80
"""Tokens of the longest requests, as preset dlm-tasks trains."""
_BATCH = 64


@dataclass(frozen=True)
class Score:
    """Of one task."""

    task: str
    by_seed: tuple[float, ...]
    """Share of right answers, by seed of the requests."""
    count: int
    """Requests of each seed."""

    @property
    def accuracy(self) -> float:
        return float(np.mean(self.by_seed))

    @property
    def error(self) -> float:
        """Standard error of the accuracy, by the binomial over all requests."""
        share = self.accuracy
        return math.sqrt(share * (1 - share) / (self.count * len(self.by_seed)))


def is_of_tasks(folder: Path) -> bool:
    """Whether the folder, of a run or of weights, holds a model of tasks."""
    if (folder / "metrics.jsonl").is_file():
        return read_config(folder / "config.json").data.source.kind == "tasks"
    if (folder / TOKENIZER).is_file() or not (folder / "config.json").is_file():
        return False
    return read_special(folder).mask == TaskSet.mask_id


def require_tasks(model: Model) -> None:
    """ConfigError unless the model answers tasks."""
    require(
        model.tokenizer is None
        and model.mask_id == tasks.MASK
        and model.config.vocab_size == tasks.VOCAB,
        f"{model.folder} was not trained on tasks; name a run of preset dlm-tasks",
    )


def requests(rows: tasks.TaskRows, steps: int) -> list[Request]:
    """One for each row; blanks of its prefix stay."""
    ask = SamplingConfig(steps=steps, block=0)
    return [
        Request(tokens[: int(length)], ask, ends=False, begin=int(start))
        for tokens, length, start in zip(
            tasks.asked(rows), rows.real.sum(1), rows.answer_start, strict=True
        )
    ]


def right(
    rows: tasks.TaskRows,
    steps: int,
    answer: Callable[[Sequence[Request]], Sequence[np.ndarray]],
) -> Bool[np.ndarray, "b"]:
    """Whether what `answer` makes of each row's request is right; it is given some at a time."""
    decoded, asks = rows.tokens.copy(), requests(rows, steps)
    for start in range(0, len(asks), _BATCH):
        for i, found in enumerate(answer(asks[start : start + _BATCH]), start):
            decoded[i, : len(found)] = found
    return tasks.exact_match(rows, decoded)


def score(model: Model, seq_len: int, count: int, say: Callable[[str], None]) -> list[Score]:
    """Of `count` requests a seed and task, of all lengths that training rows of `seq_len` have."""
    require(count >= 1, f"items {count} must be at least 1")
    sampler = model.sampler()

    def answer(asks: Sequence[Request]) -> list[np.ndarray]:
        return [found.tokens for found in sampler.sample(asks, steps_a_call=STEPS)]

    scores = []
    for task in tasks.TASKS:
        by_seed = [
            float(right(rows, STEPS, answer).mean())
            for rows in (
                tasks.make_examples(task.name, None, count, seed, seq_len) for seed in SEEDS
            )
        ]
        scores.append(Score(task.name, tuple(by_seed), count))
        say(f"scored {task.name}")
    return scores


def run_exact(folder: Path, count: int, json_path: Path | None) -> list[Score]:
    """`geojax eval` of a model of tasks, of the lengths that a run had, or else those of preset
    dlm-tasks: score, and print. Raises ConfigError on bad input."""
    is_run = (folder / "metrics.jsonl").is_file()
    seq_len = read_config(folder / "config.json").data.seq_len if is_run else LENGTH
    console = Console(highlight=False)
    model = load(folder)
    require_tasks(model)
    with console.status("scoring"):
        scores = score(model, seq_len, count, lambda line: None)
    table = Table("task", "exact match", *(f"seed {s}" for s in SEEDS), box=box.SIMPLE_HEAD)
    for s in scores:
        each = (f"{share:.1%}" for share in s.by_seed)
        table.add_row(s.task, f"{s.accuracy:.1%} +- {s.error:.1%}", *each)
    console.print(table)
    console.print(
        f"{count} requests a task and seed, {seq_len // 2} to {seq_len} tokens long; {STEPS} "
        f"denoising steps; weights {model.revision}",
        soft_wrap=True,
    )
    if json_path:
        found: dict[str, Any] = {
            "revision": model.revision,
            "machine": machine(),
            "count": count,
            "seq_len": seq_len,
            "steps": STEPS,
            "tasks": {s.task: {"by_seed": s.by_seed, "error": s.error} for s in scores},
        }
        write_atomically(json_path, json.dumps(to_json(found), indent=2) + "\n")
        console.print(f"wrote {json_path}", soft_wrap=True)
    return scores
