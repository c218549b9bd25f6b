# SPDX-License-Identifier: Apache-2.0
"""Error feedback of one slice of a run whose messages may be left out.

Invariant: it holds what the messages that were merged did not carry; a message that was left out
leaves it as it was, and where another process sent messages under the slice's name, so that nobody
knows what they left over, it is zero.
"""

import numpy as np

from geojax.geomesh.sync import ErrorFeedback


class SliceFeedback:
    """`value` is None where there is none."""

    def __init__(self, value: ErrorFeedback | None):
        self.value = value
        self.round = 0
        """Up to which it has all that this slice's messages left over."""
        self.settled = 0
        """The last round whose end is known to it."""

    def for_message(self) -> ErrorFeedback | None:
        """A copy, that making a message may write to: it counts once the message is merged."""
        if self.value is None:
            return None
        return ErrorFeedback([x.copy() for x in self.value.own], self.value.shard)

    def merged(self, number: int, value: ErrorFeedback | None) -> None:
        """The message of round `number` was, and left `value`."""
        self.value, self.round = value, number

    def forget(self, number: int) -> None:
        """Messages up to that round were another process's."""
        self.round = number
        if self.value:
            own = [np.zeros_like(x) for x in self.value.own]
            self.value = ErrorFeedback(own, self.value.shard)
