# SPDX-License-Identifier: Apache-2.0
"""How many denoising steps a call of the engine takes, so that it ends in time.

Invariant: at least one. Where a call ends moves no refresh: each row carries its own phase.
"""

from collections.abc import Hashable

_UNKNOWN = 4  # steps, of a shape that never ran
_WATCHED = 2  # steps, where somebody looks at them
_WATCHED_SHARE = 0.1  # of a quantum's time, that such a call may take at least


class Quantum:
    """Learns what a step of each shape takes."""

    def __init__(self, most_seconds: float, most_steps: int):
        self._most_seconds, self._most_steps = most_seconds, most_steps
        self._seconds: dict[Hashable, float] = {}

    def steps(self, shape: Hashable, watched: bool = False) -> int:
        """`watched`: somebody looks at every other step, or ten times a quantum where steps are
        quicker: calls cost others time, too."""
        known = self._seconds.get(shape)
        if known is None:
            return min(_WATCHED if watched else _UNKNOWN, self._most_steps)
        seconds = self._most_seconds * (_WATCHED_SHARE if watched else 1)
        least = _WATCHED if watched else 1
        return min(self._most_steps, max(least, int(seconds / max(known, 1e-9))))

    def learn(self, shape: Hashable, steps: int, seconds: float) -> None:
        """`steps` took `seconds`. A first call may have compiled; the next one corrects that."""
        if not steps:
            return
        new, known = seconds / steps, self._seconds.get(shape)
        far = known is None or new < known / 4
        self._seconds[shape] = new if far or known is None else 0.7 * known + 0.3 * new
