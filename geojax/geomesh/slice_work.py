# SPDX-License-Identifier: Apache-2.0
"""What a slice, a process of its own, holds of the round that is open and of the one after it.

Invariant: its worker's steps are of these samples. What the slice did for a round that ended
without it, or with other samples, is dropped, and its worker begins from what is shared.
"""

from collections.abc import Mapping
from typing import Any

from geojax.geomesh.slice_accounts import Accounts
from geojax.geomesh.sync import Contribution
from geojax.geomesh.wan.samples import Share
from geojax.geomesh.worker import Worker


class OpenWork:
    """Nothing, at first."""

    def __init__(self):
        self.contribution: Contribution | None = None
        """Of the round whose message is under way."""
        self.version = ""
        """Of that message."""
        self.share: Share = ()
        self.ahead: Share = ()
        """Of the round after it."""
        self.sent_round = 0
        """The last one that the slice has gone on from."""
        self.accounts = Accounts()

    def take(self, worker: Worker, number: int, share: Share, ahead: Share) -> bool:
        """These are the samples of round `number`, which is open, and of the one after it. Whether
        the slice had sent its message already, and the round was opened again."""
        if share != self.share:
            worker.end_round()
            self.accounts.drop()
            self.sent_round = 0
        sent = self.sent_round == number
        if sent and ahead != self.ahead:
            worker.go_back()
        self.share, self.ahead = share, ahead
        return sent

    def go_on(self, worker: Worker, number: int) -> None:
        """From round `number`, where it has not yet."""
        if not worker.sent:
            worker.go_on()
            self.sent_round = number

    def merged(self, worker: Worker | None, number: int) -> None:
        """Round `number` is over; the slice stays where it has gone on to, if it was merged."""
        if self.contribution and self.sent_round == number:
            self.contribution, self.share, self.ahead = None, self.ahead, ()
        else:
            self.drop(worker)

    def drop(self, worker: Worker | None) -> None:
        """The work is merged, or lost."""
        self.contribution, self.share, self.ahead, self.sent_round = None, (), (), 0
        self.accounts.drop()
        if worker:
            worker.end_round()

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "share": [[part.start, part.stop] for part in self.share],
            "ahead": [[part.start, part.stop] for part in self.ahead],
            "sent_round": self.sent_round,
            "behind_steps": self.accounts.behind_steps,
            "behind_seconds": self.accounts.behind_seconds,
        }

    def restore(self, facts: Mapping[str, Any]) -> None:
        """What `facts` returned; the message is to be made again."""
        self.share, self.ahead = (
            tuple(range(*part) for part in facts[name]) for name in ("share", "ahead")
        )
        self.sent_round = facts["sent_round"]
        self.accounts.behind_steps = facts["behind_steps"]
        self.accounts.behind_seconds = facts["behind_seconds"]
