# SPDX-License-Identifier: Apache-2.0
"""A conversation as tokens.

Invariant: only the chat template writes special tokens. What a message says is encoded as text,
whatever it spells, so that nobody can end another's turn or speak as the system.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from geojax.config import ConfigError
from geojax.diffusion.load import Model

type Ids = Int32[np.ndarray, " n"]
type Render = Callable[[Sequence[Mapping[str, str]], bool], str]
"""As `models.weights.read_chat` gives."""


class Outline(NamedTuple):
    """A rendered conversation, taken apart."""

    stands: list[dict[str, str]]
    """The messages, each saying what nobody can guess."""
    between: list[str]
    """What the template wrote itself, before, between and after what messages say."""
    spoken: list[str]

    def borders(self, render: Render, count: int) -> list[int]:
        """Places in the text where each of the first `count` messages has ended, as far as the
        text begins as a conversation of that many would."""
        said = zip(self.spoken, self.stands, strict=True)
        # Between the text and the one of stand-ins, after each message.
        shifts = list(accumulate(len(spoken) - len(stand["content"]) for spoken, stand in said))
        ends = ends_of(render, self.stands, render(self.stands, True), count)
        return [end + shifts[number - 1] for number, end in ends]


def ends_of(
    render: Render, messages: Sequence[Mapping[str, str]], text: str, count: int
) -> list[tuple[int, int]]:
    """Numbers of messages, up to `count`, with which `text` begins as a conversation of that many
    would, and where each ends."""
    found = []
    for number in range(1, count + 1):
        try:
            before = render(messages[:number], False)
        except ConfigError:  # such as a template that wants turns to alternate
            continue
        if text.startswith(before):
            found.append((number, len(before)))
    return found


def outline(render: Render, messages: Sequence[Mapping[str, str]], text: str) -> Outline | None:
    """Of what `messages` are rendered as; None where the template changes what they say, but for
    white space around it."""
    stands = [{**message, "content": secrets.token_hex(16)} for message in messages]
    try:
        between = re.split("|".join(stand["content"] for stand in stands), render(stands, True))
    except ConfigError:  # a template that looks at what is said
        return None
    if len(between) != len(messages) + 1 or not text.startswith(between[0]):
        return None
    spoken, place = list[str](), len(between[0])
    for message, after in zip(messages, between[1:], strict=True):
        content = message["content"]
        said = next(
            (s for s in (content, content.strip()) if text.startswith(s + after, place)), None
        )
        if said is None:
            return None
        spoken.append(said)
        place += len(said) + len(after)
    return Outline(stands, between, spoken) if place == len(text) else None


def encode_chat(
    model: Model,
    found: Outline | None,
    messages: Sequence[Mapping[str, str]],
    text: str,
    borders: Sequence[int] = (),
) -> tuple[Ids, tuple[int, ...]]:
    """Ids of `text`, which `messages` are rendered as, up to where the answer begins; and how many
    of them lie before each of `borders`, increasing places in the text. `found`: its outline.

    ConfigError where a message spells a special token and the template changes what messages say.
    """
    if any(_spells_special(model, message["content"]) for message in messages):
        if found is None:
            raise ConfigError(
                "a message spells a special token, and the chat template changes what messages "
                "say; leave it out"
            )
        return _encode_parts(model, found, borders)
    ids, starts = model.encode_with_starts(text)
    return ids, _increasing(np.searchsorted(starts, borders).tolist())


def _spells_special(model: Model, content: str) -> bool:
    return not np.array_equal(model.encode(content), model.encode(content, special=True))


def _encode_parts(
    model: Model, found: Outline, borders: Sequence[int]
) -> tuple[Ids, tuple[int, ...]]:
    """What messages say as text, what lies between as the template wrote it."""
    mixed = [x for pair in zip_longest(found.between, found.spoken, fillvalue="") for x in pair]
    parts = [(part, i % 2 == 0) for i, part in enumerate(mixed)]
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
