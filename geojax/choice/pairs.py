# SPDX-License-Identifier: Apache-2.0
"""Contexts and continuations, as text and as ids.

Invariant: ids are those of the usual harness for causal models (Gao et al., lm-eval): white space
at a context's end belongs to the continuation, both are encoded as one text, and what lies beyond
the context's own tokens is the continuation.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from geojax.config import require
from geojax.data import Tokenizer


class Pair(NamedTuple):
    """Ids of a context and of what may follow it."""

    context: Int32[np.ndarray, " n"]
    continuation: Int32[np.ndarray, " m"]


def encode(
    texts: Sequence[tuple[str, str]], tokenizer: Tokenizer, begin: Sequence[int], empty: int
) -> list[Pair]:
    """Pairs of (context, continuation); `begin` stands before every context, and the id `empty`
    in place of one without text where `begin` is empty."""
    split = []
    for context, continuation in texts:
        kept = context.rstrip()
        split.append((kept, context[len(kept) :] + continuation))
    contexts = list({context: None for context, _ in split})
    alone = dict(zip(contexts, tokenizer.encode_batch(contexts), strict=True))
    whole = tokenizer.encode_batch([context + continuation for context, continuation in split])
    pairs = []
    for (context, _), ids in zip(split, whole, strict=True):
        before = [*begin, *alone[context]] or [empty]
        pairs.append(Pair(np.array(before, np.int32), ids[len(alone[context]) :]))
    return pairs


def fit(pairs: Sequence[Pair], most: int, needs_context: bool) -> tuple[list[Pair], list[int]]:
    """Pairs of at most `most` tokens (0: any), cut from the left, and how many each lost.

    ConfigError for a continuation without a token, or one that does not fit whole.
    """
    kept, cuts = [], []
    for context, continuation in pairs:
        room = most - len(continuation) if most else len(context)
        require(len(continuation), "a continuation has no token; give one with text")
        require(
            len(context) or not needs_context,
            "a context has no token, and the model predicts each token from those before; give "
            "one, such as the end-of-text token",
        )
        require(
            room >= needs_context,
            f"a continuation has {len(continuation)} tokens, and of the model's context of {most} "
            f"it can have {most - needs_context}; give a shorter one",
        )
        cut = max(len(context) - room, 0)
        kept.append(Pair(np.asarray(context, np.int32)[cut:], np.asarray(continuation, np.int32)))
        cuts.append(cut)
    return kept, cuts


def windows(ids: Iterable[int], empty: int, most: int) -> list[Pair]:
    """Pairs that predict every token of a text once; the first follows the id `empty`.

    `most` tokens are predicted of each but the last, which has before it as many tokens as fill
    its window.
    """
    tokens = np.array([empty, *ids], np.int32)
    pairs = []
    for start in range(1, len(tokens), most):
        end = min(start + most, len(tokens))
        pairs.append(Pair(tokens[max(end - most - 1, 0) : start], tokens[start:end]))
    return pairs
