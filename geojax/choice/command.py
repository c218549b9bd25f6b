# SPDX-License-Identifier: Apache-2.0
"""`geojax eval MODEL --tasks ...`: zero-shot multiple choice, as a table and as JSON."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from geojax.choice.items import pick
from geojax.choice.load import SAMPLES, load_subject
from geojax.choice.rows import BATCH_TOKENS
from geojax.choice.run import ask, describe, summary
from geojax.choice.tasks import TASKS, known, load_items
from geojax.config import require
from geojax.data import cache_dir
from geojax.track.console import format_seconds
from geojax.track.metrics import NewFolder, to_json, write_atomically

ITEMS = 250


@dataclass(frozen=True)
class ChoiceOptions:
    """What `geojax eval` takes with --tasks."""

    folder: Path
    tasks: tuple[str, ...]
    """Names, or `all`."""
    items: int = ITEMS
    samples: int = 0
    """Masks of each choice, of a diffusion model; 0: 32."""
    dtype: str = "float32"
    batch_tokens: int = BATCH_TOKENS
    out: NewFolder | None = None
    json: Path | None = None


def run_choice(options: ChoiceOptions) -> dict[str, Any]:
    """Score the tasks, print the table, and return what the JSON holds.

    Raises ConfigError on bad input.
    """
    require(options.items >= 1, f"items {options.items} must be at least 1")
    require(options.samples >= 0, f"samples {options.samples} must be at least 1, or unset")
    names = list(TASKS) if options.tasks == ("all",) else list(dict.fromkeys(options.tasks))
    for name in names:
        known(name)
    console = Console(highlight=False, markup=False)
    say = lambda line: console.print(line, soft_wrap=True)  # noqa: E731
    subject = load_subject(options.folder, options.dtype)
    score = subject.likelihood(options.samples, options.batch_tokens)
    found = {name: load_items(name, cache_dir(), say) for name in names}
    asked = {name: pick(items, options.items) for name, items in found.items()}
    settings = {
        "dtype": options.dtype,  # first, for weights of another type are others
        "model": subject.fingerprint(),
        "samples": (options.samples or SAMPLES) if subject.diffusion else None,
        "batch_tokens": options.batch_tokens,
    }
    started = time.perf_counter()
    answers = ask(asked, subject.pairs, score, settings, options.out, say)
    results = {
        name: {
            **summary(answers[name]),
            **describe(asked[name], len(found[name])),
            "package": TASKS[name].package,
        }
        for name in names
    }
    for line in table(results):
        say(line)
    say(f"scored in {format_seconds(time.perf_counter() - started)}")
    record = {"folder": str(options.folder), "zero_shot": True, **settings, "tasks": results}
    target = options.json or (options.out / "results.json" if options.out else None)
    if target:
        write_atomically(target, json.dumps(to_json(record), indent=2) + "\n")
        say(f"wrote {target}")
    return record


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Lines: per task accuracy by the log-likelihood and by that a byte, each with its standard
    error, then of a random choice, and of always the commonest answer."""
    width = max(map(len, (*results, "task")))
    lines = [
        f"{'task':<{width}}  {'acc':>14}  {'acc_norm':>14}  {'chance':>6}  {'majority':>8}  "
        f"{'items':>5}  {'cut':>4}"
    ]
    for name, r in results.items():
        lines.append(
            f"{name:<{width}}  {_figure(r, 'acc'):>14}  {_figure(r, 'acc_norm'):>14}  "
            f"{r['chance']:>6.3f}  {r['majority']:>8.3f}  {r['items']:>5}  {r['cut_items']:>4}"
        )
    return lines


def _figure(result: dict[str, Any], name: str) -> str:
    return f"{result[name]:.3f} +- {result[f'{name}_stderr']:.3f}"
