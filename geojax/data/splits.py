# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a sequence lie: in a stream of text, or in an example with a prompt.

Invariant: sequence s of a split is a pure function of (split, s); what is not there is a zero that
is not real, and only real tokens can be scored.

Shapes: n sequences, T tokens of one; a window has one token more, the last one's target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt


class Windows(NamedTuple):
    """Sequences as they were written, nothing hidden."""

    tokens: Int32[np.ndarray, "n T+1"]
    real: Bool[np.ndarray, "n T+1"]
    """Whether there is a token."""
    scored: Bool[np.ndarray, "n T+1"]
    """Whether it is to be predicted; never a prompt's."""


class Split(Protocol):
    """Training or validation sequences."""

    @property
    def sequences(self) -> int:
        """Sequences there are."""
        ...

    def read(self, numbers: Sequence[int]) -> Windows:
        """The sequences of these numbers."""
        ...


@dataclass(frozen=True)
class Stream:
    """Documents one after another: sequence s is [s T, s T + T + 1)."""

    tokens: UInt[np.ndarray, "_"]
    seq_len: int
    partial: bool
    """Whether a last sequence that is not full counts."""

    @property
    def sequences(self) -> int:
        targets = len(self.tokens) - 1
        return -(-targets // self.seq_len) if self.partial else targets // self.seq_len

    def read(self, numbers: Sequence[int]) -> Windows:
        starts = np.array(numbers, np.int64)[:, None] * self.seq_len
        places = starts + np.arange(self.seq_len + 1)
        real = places < len(self.tokens)
        tokens = self.tokens[np.where(real, places, 0)].astype(np.int32) * real
        return Windows(tokens, real, real)


@dataclass(frozen=True)
class Examples:
    """Prompts with responses, a sequence each: the prompt is seen, the response is predicted."""

    tokens: UInt[np.ndarray, "_"]
    places: Int64[np.ndarray, "sequences 3"]
    """Of each: where it begins, where its response does, and where it ends, with its end-of-text;
    at most T tokens."""
    seq_len: int
    fill_id: int | None = None
    """What follows a response to the end of the sequence, and is predicted too, so that a model
    which fills a canvas learns where to end (Nie et al. 2025); None: nothing."""

    @property
    def sequences(self) -> int:
        return len(self.places)

    def read(self, numbers: Sequence[int]) -> Windows:
        begin, response, end = (x[:, None] for x in self.places[np.array(numbers, np.int64)].T)
        places = begin + np.arange(self.seq_len + 1)
        real = places < end
        tokens = self.tokens[np.where(real, places, 0)].astype(np.int32) * real
        scored = real & (places >= response)
        if self.fill_id is not None:
            filled = ~real & (np.arange(self.seq_len + 1) < self.seq_len)
            tokens = np.where(filled, np.int32(self.fill_id), tokens)
            real, scored = real | filled, scored | filled
        return Windows(tokens, real, scored)
