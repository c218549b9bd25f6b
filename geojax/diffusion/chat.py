# SPDX-License-Identifier: Apache-2.0
"""A conversation as tokens.

Invariant: only the chat template writes special tokens. What a message says is encoded as text,
whatever it spells, so that nobody can end another's turn or speak as the system.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import numpy as np
from jaxtyping import Int32

from geojax.config import require
from geojax.diffusion.load import Model

type Ids = Int32[np.ndarray, " n"]
type Render = Callable[[Sequence[Mapping[str, str]], bool], str]
"""As `models.weights.read_chat` gives."""


def encode_chat(
    model: Model,
    render: Render,
    messages: Sequence[Mapping[str, str]],
    text: str,
    borders: Sequence[int] = (),
) -> tuple[Ids, tuple[int, ...]]:
    """Ids of `text`, which `messages` are rendered as, up to where the answer begins; and how many
    of them lie before each of `borders`, increasing places in the text.

    ConfigError where a message spells a special token and the template changes what messages say.
    """
    if any(_spells_special(model, message["content"]) for message in messages):
        return _encode_parts(model, render, messages, text, borders)
    ids, starts = model.encode_with_starts(text)
    return ids, _increasing(np.searchsorted(starts, borders).tolist())


def _spells_special(model: Model, content: str) -> bool:
    return not np.array_equal(model.encode(content), model.encode(content, special=True))


def _encode_parts(
    model: Model,
    render: Render,
    messages: Sequence[Mapping[str, str]],
    text: str,
    borders: Sequence[int],
) -> tuple[Ids, tuple[int, ...]]:
    """What messages say as text, what lies between as the template wrote it."""
    # The template shows what is its own around stand-ins that nobody can guess.
    names = [secrets.token_hex(16) for _ in messages]
    stands = [{**m, "content": name} for m, name in zip(messages, names, strict=True)]
    between = re.split("|".join(names), render(stands, True))
    parts: list[tuple[str, bool]] = []
    whole = [message["content"] for message in messages]
    for spoken in (whole, [content.strip() for content in whole]):
        mixed = [x for pair in zip_longest(between, spoken, fillvalue="") for x in pair]
        if "".join(mixed) == text:
            parts = [(part, i % 2 == 0) for i, part in enumerate(mixed)]
    require(
        parts,
        "a message spells a special token, and the chat template changes what messages say; "
        "leave it out",
    )
    ids: list[Ids] = []
    ends, place, left = [], 0, list(borders)
    for part, special in parts:
        while left and place < left[0] <= place + len(part):
            cut = left.pop(0) - place
            ids.append(model.encode(part[:cut], special))
            ends.append(sum(map(len, ids)))
            place, part = place + cut, part[cut:]
        ids.append(model.encode(part, special))
        place += len(part)
    return np.concatenate(ids).astype(np.int32), _increasing(ends)


def _increasing(ends: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({end for end in ends if end > 0}))
