# SPDX-License-Identifier: Apache-2.0
"""Tasks asked of a model, item by item, and what comes of them.

Invariant: items go in blocks that depend on the task alone, and a block is recorded whole or asked
again, so that a run that was killed ends with the very figures of one that was not; a recorded
answer is never mixed with those of another model, task, type or number of samples.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import batched
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from geojax.choice.items import Item, digest
from geojax.choice.likelihood import LogLikelihood
from geojax.choice.pairs import Pair
from geojax.config import require
from geojax.track.metrics import MetricsWriter, read_records

BLOCK = 32
"""Items asked at once; a killed run loses at most these."""

type Say = Callable[[str], None]
type Encode = Callable[[Sequence[tuple[str, str]]], list[Pair]]


class Answer(NamedTuple):
    """What a model says of an item."""

    item: Item
    log_likelihoods: tuple[float, ...]
    """Of its choices, in nats."""
    cut: int
    """Tokens of the context that there was no room for, at most of any choice."""

    @property
    def correct(self) -> float:
        """1 where the right choice is the likeliest; a tie counts as its share."""
        return _share(self.log_likelihoods, self.item.gold)

    @property
    def correct_norm(self) -> float:
        """The same of the log-likelihood a byte."""
        sizes = self.item.choice_bytes
        return _share(
            [x / size for x, size in zip(self.log_likelihoods, sizes, strict=True)], self.item.gold
        )


def ask(
    tasks: dict[str, list[Item]],
    encode: Encode,
    score: LogLikelihood,
    settings: dict[str, Any],
    out: Path | None = None,
    say: Say | None = None,
) -> dict[str, list[Answer]]:
    """The answers to all items of `tasks`, those recorded in `out`/items.jsonl not asked again.

    `settings` are what an answer depends on beside its item. ConfigError where the file is of
    others.
    """
    path = out and out / "items.jsonl"
    recorded = _recorded(path, settings) if path and path.exists() else None
    if out:
        out.mkdir(parents=True, exist_ok=True)
    answers = {}
    with MetricsWriter(path) if path else nullcontext() as writer:
        if writer and recorded is None:
            writer.write("start", **settings)
        for name, items in tasks.items():
            found: list[Answer] = []
            for block in batched(sorted(items, key=_length), BLOCK):
                known = [(recorded or {}).get((name, item.id)) for item in block]
                if all(known):
                    new = [_restored(i, r) for i, r in zip(block, known, strict=True) if r]
                else:
                    new = _ask(block, encode, score)
                    if writer:
                        for answer in new:
                            _write(writer, name, answer)
                found += new
                if say:
                    say(f"{name}: {len(found)} of {len(items)} items")
            answers[name] = found
    return answers


def summary(answers: Sequence[Answer]) -> dict[str, float]:
    """acc, acc_stderr, acc_norm, acc_norm_stderr; chance: of a random choice; majority: of always
    giving the commonest right answer; items, and how many of them were cut.

    Standard errors are those of a mean over items (Bessel-corrected), NaN of a single one.
    """
    rights = Counter(answer.item.choices[answer.item.gold] for answer in answers)
    figures: dict[str, float] = {}
    for name, values in (
        ("acc", [answer.correct for answer in answers]),
        ("acc_norm", [answer.correct_norm for answer in answers]),
    ):
        figures[name] = float(np.mean(values))
        spread = np.std(values, ddof=1) if len(values) > 1 else math.nan
        figures[f"{name}_stderr"] = float(spread) / math.sqrt(len(values))
    figures["chance"] = float(np.mean([1 / len(answer.item.choices) for answer in answers]))
    figures["majority"] = max(rights.values()) / len(answers)
    figures["items"] = len(answers)
    figures["cut_items"] = sum(answer.cut > 0 for answer in answers)
    return figures


def describe(items: Sequence[Item], source: int) -> dict[str, Any]:
    """Which items were asked: their hash, and how many the source has with duplicates."""
    return {"source_items": source, "items_hash": digest(items)}


def _length(item: Item) -> tuple[int, str]:
    return len(item.context) + max(map(len, item.choices)), item.id


def _ask(block: Sequence[Item], encode: Encode, score: LogLikelihood) -> list[Answer]:
    texts = [(item.context, text) for item in block for text in item.continuations]
    found = iter(score(encode(texts)))
    answers = []
    for item in block:
        own = [next(found) for _ in item.choices]
        answers.append(Answer(item, tuple(x.log for x in own), max(x.cut for x in own)))
    return answers


def _write(writer: MetricsWriter, task: str, answer: Answer) -> None:
    writer.write(
        "item",
        task=task,
        id=answer.item.id,
        gold=answer.item.gold,
        log_likelihoods=list(answer.log_likelihoods),
        choice_bytes=list(answer.item.choice_bytes),
        cut=answer.cut,
    )


def _restored(item: Item, record: dict[str, Any]) -> Answer:
    return Answer(item, tuple(record["log_likelihoods"]), record["cut"])


def _recorded(path: Path, settings: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]] | None:
    """Records of items by (task, id); the first record says of what settings they are, and is
    written before all others. None where there is none."""
    records = read_records(path)
    if not records:
        return None
    for name, value in settings.items():
        before = records[0].get(name)
        require(
            before == value,
            f"{path} holds answers of {name} {before!r}, and this is {value!r}; give another --out",
        )
    return {(r["task"], r["id"]): r for r in records if r["kind"] == "item"}


def _share(values: Sequence[float], gold: int) -> float:
    best = max(values)
    return (values[gold] == best) / sum(value == best for value in values)
