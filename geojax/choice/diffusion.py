# SPDX-License-Identifier: Apache-2.0
"""Masks of a continuation, for the bound of a model of masked diffusion.

Of n tokens k are hidden, any k of 1..n alike, and each counts n / k: the form of Nie et al. (2025)
whose variance is the least. Invariant: masks are a pure function of (context, n, samples), by
hashes of integers, alike on unlike machines. Choices of one context share their draws: under one
sample those of equal length are hidden at the same places, and of others the same share at places
ranked alike, so that differences between choices have less noise than they.

The numbers k of all samples are spread evenly over 1..n (one u in each of as many parts of [0, 1)),
which leaves the mean as it is and makes it steadier.
"""

import hashlib

import numpy as np
from jaxtyping import Bool, Int32

from geojax.choice.pairs import Pair
from geojax.choice.rows import Row
from geojax.data.masking import GOLDEN, mix


def masks(
    context: Int32[np.ndarray, " c"], n: int, samples: int
) -> list[tuple[Bool[np.ndarray, " n"], float]]:
    """The masks of a continuation of `n` tokens, each once, and what a hidden token counts: n / k,
    times the share of samples that drew the mask."""
    stream = hashlib.sha256(np.asarray(context, "<i4").tobytes()).digest()[:8]
    key = np.array([int.from_bytes(stream, "little")], np.uint64)
    offset = float(mix(key.copy())[0] >> np.uint64(11)) / 2**53
    keys = mix(key + (1 + np.arange(samples, dtype=np.uint64)) * GOLDEN)
    # The hash is a bijection, so no two places of a sample have the same score.
    scores = mix(keys[:, None] + np.arange(n, dtype=np.uint64) * GOLDEN)
    counts = 1 + ((np.arange(samples) + offset) / samples * n).astype(int)
    found: dict[bytes, tuple[np.ndarray, float]] = {}
    for own, count in zip(scores, np.minimum(counts, n), strict=True):
        mask = np.zeros(n, bool)
        mask[np.argsort(own)[:count]] = True
        _, weight = found.get(mask.tobytes(), (mask, 0.0))
        found[mask.tobytes()] = mask, weight + n / count / samples
    return list(found.values())


def row(pair: Pair, mask: Bool[np.ndarray, " n"], mask_id: int, shifted: bool) -> Row:
    """A pair with `mask` of its continuation hidden; a `shifted` model is read a place before."""
    before, n = len(pair.context), len(mask)
    hidden = np.where(mask, np.int32(mask_id), pair.continuation)
    tokens = np.concatenate([pair.context, hidden])
    places = np.arange(before + n, dtype=np.int32)
    reads = before + np.flatnonzero(mask).astype(np.int32) - np.int32(shifted)
    return Row(tokens, places, np.zeros_like(places), reads, pair.continuation[mask])
