# SPDX-License-Identifier: Apache-2.0
"""What a round takes, by slice, where its exchange may go on beside the next round's inner steps.

A slice takes in the result of round k - 1, does the rest of its steps of round k, makes its message
and sends it; while it is under way it does the first steps of round k + 1 ("ahead"), then waits for
the result. A round is over when the last message is with all, so it lasts from one result to the
next; a slice that still does steps ahead by then is late, and takes the result in later.

What the slice that waits least waits is WAN wait, for all; what others wait more, they wait for it.
Invariant: for every slice compute + straggler wait + WAN wait + outer step = the round's seconds.
Nothing else is in them: times are put together from what slices did, not from when they did it, so
that a slice that starts, evaluates or compiles for longer than others makes nobody's wait longer.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """One slice's seconds in a round."""

    rest: float
    """Inner steps after it had taken in the result before."""
    ahead: float
    """Inner steps of the next round, while its message was under way."""
    outer: float
    """Taking in the result before, and making the message."""
    sending: float
    """From then until its message was with all others."""


class RoundTimes(NamedTuple):
    """Seconds of one round, by slice."""

    total: float
    compute: list[float]
    straggler: list[float]
    wan: float
    outer: list[float]
    late: list[float]
    """Of steps ahead that were left to do when the round was over; in the next one's compute."""

    def fields(self, index: int) -> dict[str, float]:
        """Of the record of one slice."""
        return {
            "compute_seconds": self.compute[index],
            "straggler_seconds": self.straggler[index],
            "wan_seconds": self.wan,
            "outer_seconds": self.outer[index],
            "late_seconds": self.late[index],
        }


def round_times(parts: Sequence[Part], late: Sequence[float], closing: float) -> RoundTimes:
    """A round of these parts; `late`: as the round before left them; `closing`: from when the last
    message was with all until slices knew."""
    sent = [left + p.outer + p.rest for left, p in zip(late, parts, strict=True)]
    total = max(s + p.sending for s, p in zip(sent, parts, strict=True)) + closing
    ends = [s + p.ahead for s, p in zip(sent, parts, strict=True)]
    waits = [max(0.0, total - end) for end in ends]
    later = [max(0.0, end - total) for end in ends]
    return RoundTimes(
        total,
        [left + p.rest + p.ahead - more for left, p, more in zip(late, parts, later, strict=True)],
        [wait - min(waits) for wait in waits],
        min(waits),
        [p.outer for p in parts],
        later,
    )


def closing_seconds(parts: Sequence[Part], waited: Sequence[float | None]) -> float:
    """Of a measured round; `waited`: by slice, from its message's being made until it knew that the
    round was over, None where that is not known. No clocks are compared: the slice whose message
    came last waited least beyond its own sending."""
    beyond = [w - p.sending for w, p in zip(waited, parts, strict=True) if w is not None]
    return max(0.0, min(beyond, default=0.0))
