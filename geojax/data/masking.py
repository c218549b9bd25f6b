# SPDX-License-Identifier: Apache-2.0
"""Masked-language modelling: which tokens of a sequence are hidden, and behind what.

Invariant: what happens to a sequence is a pure function of (its tokens, seed, its sample number);
no generator holds a state. Every epoch has other sample numbers and so masks a sequence anew
(dynamic masking, Liu et al. 2019), and a resumed run masks as an uninterrupted one would.

As in Devlin et al. (2019), a fixed share of each sequence's tokens is chosen, at least one, rather
than each by a coin of its own: sequences of one length bear one count of losses. What a chosen
token becomes is drawn for it alone. All draws are hashes of integers, alike on unlike machines.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt64

from geojax.config import MaskingConfig

# The increment and the finalizer of SplitMix64 (Steele, Lea and Flood 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
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
        real: Bool[np.ndarray, "b T"],
    ) -> tuple[Int32[np.ndarray, "b T"], Float32[np.ndarray, "b T"]]:
        """`tokens` with the chosen ones hidden, and 1 where one was chosen.

        Of the tokens of a row that are `real` and ordinary, max(1, round(fraction * count)) are
        chosen; none where there are none.
        """
        stream = 0 if self.seed is None else self.seed + 1
        keys = _mix(_mix(np.array([stream], np.uint64)) + samples * _GOLDEN)
        # The finalizer is a bijection, so no two places of a row have the same score.
        scores = _mix(keys[:, None] + np.arange(tokens.shape[1], dtype=np.uint64) * _GOLDEN)
        eligible = self.ordinary[tokens] & real
        scores[~eligible] = np.iinfo(np.uint64).max
        count = np.maximum(np.rint(self.config.fraction * eligible.sum(1)).astype(int), 1)
        last = np.sort(scores, 1)[np.arange(len(scores)), count - 1]
        chosen = eligible & (scores <= last[:, None])
        hidden = tokens.copy()
        hidden[chosen] = self._hide(tokens[chosen], scores[chosen])
        return hidden, chosen.astype(np.float32)

    def _hide(self, tokens: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """What chosen `tokens` become; hashed again, since chosen scores are low ones."""
        bits = _mix(scores + _GOLDEN)
        draw, place = (bits >> np.uint64(32)) / 2**32, bits & np.uint64(2**32 - 1)
        other = self._ids[(place * np.uint64(len(self._ids))) >> np.uint64(32)]
        keep, randomize = self.config.keep, self.config.randomize
        changed = np.where(draw < keep + randomize, other, np.int32(self.mask_id))
        return np.where(draw < keep, tokens, changed)

    @cached_property
    def _ids(self) -> np.ndarray:
        return np.flatnonzero(self.ordinary).astype(np.int32)


def _mix(x: np.ndarray) -> np.ndarray:
    """Hash of each uint64, in place."""
    for shift, factor in _ROUNDS:
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x
