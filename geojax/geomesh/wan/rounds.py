# SPDX-License-Identifier: Apache-2.0
"""The life of a slice: catch up with the journal, work, send, go on or wait, apply, again.

Invariant: the shared state of a slice changes by the messages of rounds that are over, in order, or
by taking a peer's whole state, and by nothing else; work of a round that did not merge it is thrown
away, with its error feedback as before.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from geojax.geomesh.message import version
from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.seat import KEPT_ROUNDS, Message, Offer, Overtaken, Seat

_LOOK_SECONDS = 0.5  # between looks for a peer with the state


class Replica(Protocol):
    """State and work of one slice."""

    epoch: int
    border: int
    """Of the shared state."""
    state_bytes: int
    """Of the shared state on the wire."""

    def digest(self) -> str:
        """Of the shared state."""
        ...

    def arrays(self) -> Sequence[np.ndarray]:
        """The shared state."""
        ...

    def facts(self, member: Seat) -> Mapping[str, Any]:
        """What all slices must know of this one before the first plan."""
        ...

    def follow(self, history: History) -> None:
        """The decisions up to the border, all of them."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the run is over at this border."""
        ...

    def work(self, members: Sequence[int]) -> None:
        """What is left of the next round's inner steps, with these slices in it. Stopped."""
        ...

    def message(self) -> tuple[Message, Mapping[str, Any]]:
        """Of the work that is done, with facts for everybody."""
        ...

    def go_on(self) -> bool:
        """The first inner steps of the round after it, whose slices are not known yet, while the
        message is under way; whether there are any. Stopped."""
        ...

    def settle(self, number: int, merged: str, history: History) -> None:
        """The round is over; `merged`: with this version of the slice's message, which may be of a
        process before this one; empty: without. Said once or more."""
        ...

    def apply(self, number: int, row: Sequence[Message | None], history: History) -> None:
        """Merge the messages of a round that is over."""
        ...

    def adopt(self, data: np.ndarray, border: int, history: History) -> None:
        """Take over a peer's shared state."""
        ...

    def reached(self, history: History) -> None:
        """The slice stands at a new border, to which it has followed."""
        ...


def run_rounds(member: Seat, replica: Replica) -> None:
    """To the end of the run. Stopped, with the replica as it then is; RunError."""
    member.keep_messages(replica.state_bytes)
    _say_where(member, replica, "starting")
    member.wait(lambda h: True)
    if member.history.start is None and not replica.border:
        facts = dict(replica.facts(member))
        _say_where(member, replica, "standby", facts=facts)
        member.wait(lambda h: h.start is not None)
        _say_where(member, replica, "starting")
    ahead = False
    while True:
        members = _catch_up(member, replica)
        if replica.finished:
            _say_where(member, replica, "done")
            member.wait_for_the_end()
            return
        epoch, number = replica.epoch, replica.border + 1
        if member.index not in members:
            _say_where(member, replica, "standby")
            member.wait_past(epoch, number)
            continue
        # A slice that has gone on did not begin when the round was opened, but before.
        if not (ahead and member.phase == "waiting"):
            _say_where(member, replica, "working")
        replica.work(members)
        message, facts = replica.message()
        if ahead := not member.is_past(epoch, number):
            member.send(epoch, number, message)
            _say_where(member, replica, "waiting", facts=dict(facts), sent=version(message))
            ahead = replica.go_on()
        member.wait_past(epoch, number)
        history = member.snapshot()
        if history.epoch == epoch:
            replica.settle(number, history.version(number, member.index), history)


def _catch_up(member: Seat, replica: Replica) -> tuple[int, ...]:
    """To the newest border; the members of the open round."""
    while True:
        history = member.snapshot()
        valid = history.holds(replica.epoch, replica.border)
        number = replica.border + 1
        if valid and number <= history.round:
            valid = history.rounds[number - 1]["digest"] == replica.digest()
            if not valid:
                member.say(f"the shared parameters after round {number - 1} differ here")
        if valid:
            replica.epoch = history.epoch
            if replica.border == history.round:
                replica.follow(history)
                member.offer(
                    Offer(replica.epoch, replica.border, replica.digest(), replica.arrays())
                )
                replica.reached(history)
                if not member.is_past(replica.epoch, number):
                    return history.members
                continue
            near = replica.border >= history.round - KEPT_ROUNDS
            if near and _by_messages(member, replica, history):
                continue
        _by_state(member, replica, history, valid)


def _by_messages(member: Seat, replica: Replica, history: History) -> bool:
    number = replica.border + 1
    try:
        row = member.collect(number)
    except Overtaken:
        return False
    replica.settle(number, history.version(number, member.index), history)
    replica.apply(number, row, history)
    replica.border = number
    return True


def _by_state(member: Seat, replica: Replica, history: History, valid: bool) -> None:
    """A peer's state, if anybody has a newer one now; else some time passes."""
    _say_where(member, replica, "syncing")
    if valid:  # the round in which this slice may have been is not forgotten
        number = replica.border + 1
        replica.settle(number, history.version(number, member.index), history)
    before = replica.border if history.holds(replica.epoch, replica.border) else -1
    found = member.fetch_state(before, replica.state_bytes)
    if found is None:
        member.wait(lambda h: h.round > history.round or h.epoch > history.epoch, _LOOK_SECONDS)
        return
    offer, data = found
    history = member.snapshot()
    replica.adopt(data, offer.border, history)
    if replica.digest() != offer.digest:
        member.say("a peer's state was damaged on the way")
        replica.epoch, replica.border = -1, 0  # of no history
        return
    replica.epoch, replica.border = offer.epoch, offer.border
    member.say(f"took the shared state after round {offer.border} from a peer")


def _say_where(member: Seat, replica: Replica, phase: str, **more: Any) -> None:
    place = {"epoch": replica.epoch, "border": replica.border, "digest": replica.digest()}
    member.tell(phase=phase, **place, **more)
