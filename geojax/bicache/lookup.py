# SPDX-License-Identifier: Apache-2.0
"""Which part of a prompt is a prefix worth sharing, where the caller does not say.

A prompt whose first pages were seen before, under the same salt, shares as many of them as were:
the second request builds the prefix, the third finds it. A stored prefix that is nearly as long is
preferred to a new one.

Invariant: nothing is remembered of a prompt but hashes of its first pages, `most` of them in all;
where there are more, the oldest go of the salt that has most.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from geojax.bicache.store import Store
from geojax.config import require


class Lookup:
    """Finds prefixes of prompts."""

    def __init__(self, store: Store, page: int, fewest: int, most: int = 65_536):
        """Prefixes of `fewest` tokens or more are shared, in whole pages where they are found
        here; `most` hashes are remembered."""
        require(fewest >= 1, f"the shortest prefix to share, {fewest}, must be at least 1 token")
        self._store, self._page, self._fewest, self._most = store, page, fewest, most
        self._seen: dict[bytes, OrderedDict[bytes, None]] = {}
        self._count = 0

    def segments(
        self,
        prompt: Sequence[int] | Int32[np.ndarray, " n"],
        salt: str,
        builder: str,
        ends: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Tokens of each segment of the prompt's prefix; () where none is worth it.

        `ends`: where the caller says that segments end, such as a conversation's messages; then
        nothing is guessed.
        """
        ids = np.asarray(prompt, np.int32)
        if ends:
            borders = [0, *ends]
            require(
                borders == sorted(set(borders)) and borders[-1] <= len(ids),
                f"segments end at {list(ends)} of {len(ids)} tokens; they must increase, within "
                "the prompt",
            )
            return tuple(np.diff(borders).tolist())
        promoted = self._promote(ids, salt)
        stored = self._store.longest(ids, salt, builder)
        if stored and stored[-1] >= max(promoted - self._page, self._fewest):
            return tuple(np.diff([0, *stored]).tolist())
        return (promoted,) if promoted >= self._fewest else ()

    def _promote(self, ids: np.ndarray, salt: str) -> int:
        """Tokens of the whole pages at the beginning that were seen before."""
        digest, known = hashlib.sha256(), 0
        whose = hashlib.sha256(salt.encode()).digest()
        again, seen = True, self._seen.setdefault(whose, OrderedDict())
        for end in range(self._page, len(ids) + 1, self._page):
            digest.update(ids[end - self._page : end].tobytes())
            key = digest.digest()[:16]
            again = again and key in seen
            known = end if again else known
            self._count += key not in seen
            seen[key] = None
            seen.move_to_end(key)
        while self._count > self._most:
            most = max(self._seen, key=lambda s: len(self._seen[s]))
            self._seen[most].popitem(last=False)
            self._count -= 1
        if not seen:
            del self._seen[whose]
        return known
