# SPDX-License-Identifier: Apache-2.0
"""The tasks there are, and their items, which come from packages and never from this repository.

Invariant: a task's items are those of one version of one package, in a prompt that says nothing of
the other choices, as ARC, HellaSwag, PIQA and WinoGrande are scored.

BIG-bench asks that its data be in no training text. Nothing here is a source of `geojax data`; keep
it so.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory

from geojax.choice.items import Item, make_item, usable
from geojax.config import ConfigError, require
from geojax.data.sources import atomic, install

EVALS = "evals==3.0.1.post1"
BIGBENCH = "bigbench==1.0.0"
_SIZES = {EVALS: "46 MB", BIGBENCH: "1.8 GB while it is unpacked, which takes minutes"}

_SOCIAL = re.compile(r"(.*\S)\s+A: (.*); B: (.*); C: (.*?)\.?\s*", re.DOTALL)
_LOGIQA = re.compile(
    r"\s*Passage: (.*?)\s*Question: (.*?)\n"
    r"A\. ?A\.(.*)\nB\. ?B\.(.*)\nC\. ?C\.(.*)\nD\. ?D\.(.*)\nAnswer:\s*",
    re.DOTALL,
)


@dataclass(frozen=True)
class Task:
    """Where items are, and how they are read."""

    package: str
    file: str
    """Path inside the package."""
    read: Callable[[str], Iterator[Item]]
    """Of the file's text."""


def load_items(name: str, cache: Path, say: Callable[[str], None] | None = None) -> list[Item]:
    """All usable items of a task; its package is fetched once, and its file kept under `cache`.

    `say` is told of a download. ConfigError for an unknown task, a package that cannot be had, or
    a file that is not what it was.
    """
    task = TASKS[known(name)]
    path = _folder(task.package, cache) / task.file
    if not path.is_file():
        if say:
            say(f"fetching {task.package} once: {_SIZES[task.package]}")
        _fetch(name, task.package, cache)
    try:
        items = [item for item in task.read(path.read_text("utf-8")) if usable(item)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a file of task {name!r} ({type(error).__name__}: {error}); remove it, "
            "and it is fetched again"
        ) from error
    require(items, f"{path} holds no item of task {name!r}; remove it, and it is fetched again")
    return items


def known(name: str) -> str:
    """`name`, where there is such a task; ConfigError with the nearest where there is none."""
    if name not in TASKS:
        near = get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: all, {', '.join(TASKS)}"
        raise ConfigError(f"no task named {name!r}; {hint}")
    return name


def _folder(package: str, cache: Path) -> Path:
    return cache / "packages" / package.replace("==", "-")


def _fetch(name: str, package: str, cache: Path) -> None:
    """Install a package beside its place, and keep the files that tasks read."""
    folder = _folder(package, cache)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        whole = Path(scratch) / "whole"
        install(package, whole, f"task {name!r}", "; other tasks are in other packages")
        for file in [task.file for task in TASKS.values() if task.package == package]:
            require(
                (whole / file).is_file(),
                f"package {package} has no {file}; install the version named here",
            )
            with atomic(folder / file) as temporary:
                shutil.move(whole / file, temporary)


def _social(text: str) -> Iterator[Item]:
    for content, ideal in _dialogues(text):
        question, *choices = _parts(_SOCIAL, content)
        yield make_item(f"Q: {question}\nA:", choices, "ABC".index(ideal))


def _logiqa(text: str) -> Iterator[Item]:
    for content, ideal in _dialogues(text):
        passage, question, *choices = _parts(_LOGIQA, content)
        context = f"Passage: {passage}\nQuestion: {question}\nAnswer:"
        yield make_item(context, choices, "ABCD".index(ideal))


def _parts(form: re.Pattern[str], content: str) -> tuple[str, ...]:
    found = form.fullmatch(content)
    if found is None:
        raise ValueError(f"{content!r} does not list the answers as it did")
    return found.groups()


def _dialogues(text: str) -> Iterator[tuple[str, str]]:
    """(what the user says last, the right letter) of each line of JSON."""
    for line in text.splitlines():
        record = json.loads(line)
        yield record["input"][-1]["content"], record["ideal"]


def _bigbench(text: str) -> Iterator[Item]:
    """Examples with one right choice, in the task's own prompt (Srivastava et al. 2022)."""
    task = json.loads(text)
    before = task.get("task_prefix", "") + task.get("example_input_prefix", "\nQ: ")
    after = task.get("example_output_prefix", "\nA: ")
    for example in task["examples"]:
        choices, scores = zip(*example["target_scores"].items(), strict=True)
        if sorted(scores)[-2:] != [0, 1]:
            continue
        context = f"{before}{example['input'].rstrip()}{after}"
        yield make_item(context, choices, scores.index(1))


def _of_bigbench(folder: str, file: str = "task.json") -> Task:
    return Task(BIGBENCH, f"bigbench/benchmark_tasks/{folder}/{file}", _bigbench)


_DATA = "evals/registry/data"
TASKS: dict[str, Task] = {
    "socialiqa": Task(EVALS, f"{_DATA}/theory_of_mind/socialiqa/test.jsonl", _social),
    "logiqa": Task(EVALS, f"{_DATA}/logiqa/logiqa.jsonl", _logiqa),
    "wikihow_goal": _of_bigbench("goal_step_wikihow/goal_inference"),
    "wikihow_step": _of_bigbench("goal_step_wikihow/step_inference"),
    "winowhy": _of_bigbench("winowhy"),
    "disambiguation_qa": _of_bigbench("disambiguation_qa"),
    "strategyqa": _of_bigbench("strategyqa"),
    "truthful_qa": _of_bigbench("truthful_qa", "task_mc.json"),
    "timedial": _of_bigbench("timedial"),
    "logical_deduction": _of_bigbench("logical_deduction/three_objects"),
}
"""What each asks: docs/eval.md."""
