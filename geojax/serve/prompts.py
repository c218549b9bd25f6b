# SPDX-License-Identifier: Apache-2.0
"""Text in and out: prompts and conversations as tokens, with where their shared prefix ends.

Invariant: as in geojax.diffusion.chat, what a client says is encoded as text, whatever it spells.
"""

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from geojax.diffusion.chat import encode_chat, ends_of, outline
from geojax.diffusion.load import Model
from geojax.models.weights import read_chat
from geojax.serve.errors import need

_Message = dict[str, str]


class Prompt(NamedTuple):
    ids: Int32[np.ndarray, " n"]
    ends: tuple[int, ...] | None = None
    """As in Ask.prefix_ends."""


class Prompts:
    """A model's text. Threads may share it."""

    def __init__(self, model: Model):
        self.model = model
        self._lock = threading.Lock()

    def of_text(self, text: str) -> Prompt:
        return Prompt(self._begin(self.encode(text)))

    def of_ids(self, ids: Sequence[int]) -> Prompt:
        """ApiError where the model has no such id, or one is the mask."""
        size, mask = self.model.config.vocab_size, self.model.mask_id
        wrong = next((i for i in ids if i >= size), None)
        need(wrong is None, f"token {wrong} is not in 0..{size - 1}, the vocabulary", "prompt")
        need(mask not in ids, f"token {mask} is the mask; ask for tokens with max_tokens", "prompt")
        return Prompt(np.array(ids, np.int32))

    def of_chat(self, messages: Sequence[_Message], prefix: int | None) -> Prompt:
        """`prefix`: messages that are shared; None: those before the last of the user's.

        ConfigError where the model has no template, or it refuses the messages.
        """
        for message in messages:
            _need_whole(message["content"], "messages")
        text = self._chat(messages, True)
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        shared = (users[-1] if users else 0) if prefix is None else prefix
        need(
            shared <= len(messages),
            f"prefix_messages {shared}: there are {len(messages)} messages",
            "prefix_messages",
        )
        found = outline(self._chat, messages, text)
        if found:
            borders = found.borders(self._chat, shared)
        else:
            borders = [end for _, end in ends_of(self._chat, messages, text, shared)]
        with self._lock:
            ids, ends = encode_chat(self.model, found, messages, text, borders)
        # Nothing before the last message of the user's: what other requests began with may be.
        return Prompt(ids, ends if ends or prefix == 0 else None)

    def encode(self, text: str, field: str = "prompt") -> Int32[np.ndarray, " n"]:
        """`field`: the request's, for an ApiError."""
        _need_whole(text, field)
        with self._lock:
            return self.model.encode(text)

    def decode(self, ids: Int32[np.ndarray, " n"]) -> str:
        return self.model.decode(ids)

    @cached_property
    def _chat(self):
        return read_chat(self.model.folder)

    def _begin(self, ids: Int32[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        """Where there is no token, a model that predicts the next one needs a first."""
        if len(ids) or not self.model.config.shifted:
            return ids
        special = self.model.special
        first = special.bos if special.bos is not None else special.eos
        need(first is not None, "an empty prompt: this model needs a first token", "prompt")
        return np.array([first], np.int32)


def _need_whole(text: str, field: str) -> None:
    """ApiError where a text has half of a surrogate pair, as JSON may."""
    try:
        text.encode()
    except UnicodeEncodeError:
        need(False, f"{field}: a text is not Unicode: it has half of a surrogate pair", field)
