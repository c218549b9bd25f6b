# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a sequence are hidden, behind what, and what each counts in the loss.

Invariant: what happens to a sequence is a pure function of (its tokens, seed, its sample number);
no generator holds a state. Every epoch has other sample numbers and so masks a sequence anew
(dynamic masking, Liu et al. 2019), and a resumed run masks as an uninterrupted one would.

bert: as in Devlin et al. (2019), a fixed share of each sequence's tokens is chosen, at least one,
rather than each by a coin of its own: sequences of one length bear one count of losses. What a
chosen token becomes is drawn for it alone.

diffusion: of n tokens, m are hidden, m being any of 1..n alike, and each counts n / m. That is the
form of Nie et al. (2025) in which their likelihood bound has the least variance: where every token
is hidden with probability t and counts 1 / t, t uniform, the expected loss is the same. The weights
of a sequence add up to n, so a loss divided by them is in nats a token.

All draws are hashes of integers, alike on unlike machines.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, UInt64

from geojax.config import MaskingConfig

# The increment and the finalizer of SplitMix64 (Steele, Lea and Flood 2014).
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Streams beside that of a row's places, which are far fewer.
_NUMBER, _LENGTH = np.uint64(1 << 40), np.uint64(1 << 41)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Masker:
    """Masks sequences that one tokenizer made."""

    config: MaskingConfig
    mask_id: int
    ordinary: Bool[np.ndarray, "vocab"]
    """Ids that may be chosen, and that may replace others."""
    seed: int | None
    """At least 0; None gives the masks of validation, which no seed shares."""

    def __call__(
        self,
        tokens: Int32[np.ndarray, "b T"],
        samples: UInt64[np.ndarray, "b"],
        scored: Bool[np.ndarray, "b T"],
    ) -> tuple[Int32[np.ndarray, "b T"], Float32[np.ndarray, "b T"]]:
        """`tokens` with the chosen ones hidden, and what each of them counts; 0 for the others.

        bert: of the tokens of a row that are `scored` and ordinary, max(1, round(fraction * count))
        are chosen, and count 1; diffusion: any number from 1 on of those that are `scored`. None
        where there are none.
        """
        diffusion = self.config.kind == "diffusion"
        keys = self._keys(samples)
        # The finalizer is a bijection, so no two places of a row have the same score.
        scores = mix(keys[:, None] + np.arange(tokens.shape[1], dtype=np.uint64) * GOLDEN)
        eligible = scored if diffusion else self.ordinary[tokens] & scored
        scores[~eligible] = np.iinfo(np.uint64).max
        there = eligible.sum(1)
        if diffusion:
            count = 1 + below(mix(keys + _NUMBER), there)
        else:
            count = np.maximum(np.rint(self.config.fraction * there).astype(int), 1)
        last = np.sort(scores, 1)[np.arange(len(scores)), count - 1]
        chosen = eligible & (scores <= last[:, None])
        hidden = tokens.copy()
        if diffusion:
            hidden[chosen] = self.mask_id
            return hidden, chosen * (there / count).astype(np.float32)[:, None]
        hidden[chosen] = self._hide(tokens[chosen], scores[chosen])
        return hidden, chosen.astype(np.float32)

    def lengths(self, samples: UInt64[np.ndarray, "b"], seq_len: int) -> Int64[np.ndarray, "b"]:
        """Tokens that are left of each training sequence: `cut` of them end anywhere, from 1 on."""
        whole = np.full(len(samples), seq_len)
        if not self.config.cut or self.seed is None:
            return whole
        bits = mix(self._keys(samples) + _LENGTH)
        share = (bits >> np.uint64(32)) / 2**32
        return np.where(share < self.config.cut, 1 + below(mix(bits + GOLDEN), whole), whole)

    def _keys(self, samples: UInt64[np.ndarray, "b"]) -> UInt64[np.ndarray, "b"]:
        stream = 0 if self.seed is None else self.seed + 1
        return mix(mix(np.array([stream], np.uint64)) + samples * GOLDEN)

    def _hide(self, tokens: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """What chosen `tokens` become; hashed again, since chosen scores are low ones."""
        bits = mix(scores + GOLDEN)
        draw = (bits >> np.uint64(32)) / 2**32
        other = self._ids[below(bits, np.array(len(self._ids)))]
        keep, randomize = self.config.keep, self.config.randomize
        changed = np.where(draw < keep + randomize, other, np.int32(self.mask_id))
        return np.where(draw < keep, tokens, changed)

    @cached_property
    def _ids(self) -> np.ndarray:
        return np.flatnonzero(self.ordinary).astype(np.int32)


def below(bits: UInt64[np.ndarray, "*n"], count: np.ndarray) -> Int64[np.ndarray, "*n"]:
    """A draw from 0..count-1 by the lower half of each hash; 0 where count is 0."""
    place = bits & np.uint64(2**32 - 1)
    return ((place * count.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def mix(x: UInt64[np.ndarray, "*n"]) -> UInt64[np.ndarray, "*n"]:
    """Hash of each uint64, in place."""
    for shift, factor in _ROUNDS:
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x
