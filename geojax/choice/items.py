# SPDX-License-Identifier: Apache-2.0
"""Questions with several answers, one of them right, and which of a task's are asked.

Invariant: an item's id is a hash of its text, and which items are asked is a function of their ids
alone, so that every machine asks the same ones, whatever the order of a source or its duplicates.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One question; a choice follows its context after a space."""

    context: str
    """Without space at its ends."""
    choices: tuple[str, ...]
    gold: int
    """Place of the right one among `choices`."""
    id: str
    """First 16 hex digits of the SHA-256 of context and choices."""

    @property
    def continuations(self) -> tuple[str, ...]:
        return tuple(f" {choice}" for choice in self.choices)

    @property
    def choice_bytes(self) -> tuple[int, ...]:
        """Of UTF-8, without the space before them."""
        return tuple(len(choice.encode()) for choice in self.choices)


def make_item(context: str, choices: Iterable[str], gold: int) -> Item:
    """An item of stripped texts."""
    context, choices = context.strip(), tuple(choice.strip() for choice in choices)
    text = json.dumps([context, choices], ensure_ascii=False)
    return Item(context, choices, gold, hashlib.sha256(text.encode()).hexdigest()[:16])


def usable(item: Item) -> bool:
    """Whether it has a question, and two or more choices that differ."""
    return bool(item.context) and all(item.choices) and len(set(item.choices)) > 1


def pick(items: Iterable[Item], count: int) -> list[Item]:
    """The `count` items of the lowest ids, or all there are; each text once, and none that is
    there with two right answers."""
    unique: dict[str, Item] = {}
    doubtful = set()
    for item in items:
        if unique.setdefault(item.id, item).gold != item.gold:
            doubtful.add(item.id)
    return [unique[id] for id in sorted(unique.keys() - doubtful)[:count]]


def digest(items: Sequence[Item]) -> str:
    """Names a set of items: first 16 hex digits of the SHA-256 of their ids in order."""
    return hashlib.sha256("\n".join(item.id for item in items).encode()).hexdigest()[:16]
