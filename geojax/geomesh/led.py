# SPDX-License-Identifier: Apache-2.0
"""The seat of a slice of several processes: the first one's member asks, and all hear the answer.

Invariant: every process follows the same history, decision by decision, and holds the first one's
shared parameters, bit for bit; one that does not ends the slice.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from geojax.config import RunError
from geojax.geomesh.relay import Bytes, Relay
from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.member import Member
from geojax.geomesh.wan.seat import Message, Offer, Overtaken, Stopped

_RAISED: dict[str, type[Exception]] = {
    "Stopped": Stopped,
    "Overtaken": Overtaken,
    "RunError": RunError,
}


class Led:
    """See geojax.geomesh.wan.seat.Seat."""

    def __init__(self, index: int, relay: Relay, member: Member | None):
        """`member`: in the first process, and in no other."""
        assert relay.is_first == (member is not None), "the first process speaks"
        self.index = index
        self.history = History()
        self.phase = "starting"
        self._relay, self._member, self._read = relay, member, 0

    def while_waiting(self, beat: Callable[[], None]) -> None:
        self._relay.beat = beat
        if self._member:
            self._member.while_waiting(beat)

    @property
    def stopping(self) -> bool:
        return self._ask("stopping", lambda member: member.stopping)

    @property
    def unwritten(self) -> list[dict[str, Any]]:
        return self._member.unwritten if self._member else []

    @property
    def sent_bytes(self) -> int:
        return self._member.sent_bytes if self._member else 0

    def snapshot(self) -> History:
        self._ask("snapshot", lambda member: None)
        return self.history.copy()

    def tell(self, **changes: Any) -> None:
        self.phase = changes.get("phase", self.phase)
        if self._member:
            self._member.tell(**changes)

    def say(self, text: str) -> None:
        if self._member:
            self._member.say(text)

    def record(self, *records: dict[str, Any]) -> None:
        if self._member:
            self._member.record(*records)

    def offer(self, offer: Offer) -> None:
        theirs = self._ask("offer", lambda member: offer.digest)
        if theirs != offer.digest:
            raise RunError(
                f"after round {offer.border} this process holds other shared parameters than the "
                "first process of its slice; look for memory errors or mixed versions, and start "
                "the slice again"
            )
        if self._member:
            self._member.offer(offer)

    def wait(self, reached: Callable[[History], bool], seconds: float | None = None) -> bool:
        return self._ask("wait", lambda member: member.wait(reached, seconds))

    def wait_past(self, epoch: int, number: int) -> None:
        self._ask("wait_past", lambda member: member.wait_past(epoch, number))

    def is_past(self, epoch: int, number: int) -> bool:
        self._ask("is_past", lambda member: None)
        return self.history.epoch != epoch or self.history.round >= number

    def wait_for_the_end(self) -> None:
        self._ask("wait_for_the_end", lambda member: member.wait_for_the_end())

    def send(self, epoch: int, number: int, message: Message) -> None:
        if self._member:
            self._member.send(epoch, number, message)

    def times(self, number: int, merged: Iterable[int]) -> tuple[float, float | None]:
        return self._member.times(number, merged) if self._member else (0.0, None)

    def collect(self, number: int) -> list[Message | None]:
        def ask(member: Member) -> tuple[list[bool], list[Bytes]]:
            row = member.collect(number)
            return [m is not None for m in row], [m for m in row if m is not None]

        there, messages = self._ask_for_bytes("collect", ask)
        found = iter(messages)
        return [next(found) if here else None for here in there]

    def keep_messages(self, most_bytes: int) -> None:
        if self._member:
            self._member.keep_messages(most_bytes)

    def fetch_state(self, after: int, size_bytes: int) -> tuple[Offer, np.ndarray] | None:
        def ask(member: Member) -> tuple[Any, Sequence[Bytes]]:
            found = member.fetch_state(after, size_bytes)
            return ([*found[0][:3]], [found[1]]) if found else (None, [])

        place, arrays = self._ask_for_bytes("fetch_state", ask)
        if not place:
            return None
        epoch, border, digest = place
        return Offer(epoch, border, digest, ()), arrays[0]

    def knows_all(self) -> bool:
        assert self._member, "asked within `wait`, which the first process answers"
        return self._member.knows_all()

    def probe(self, message: Message) -> float:
        return self._ask("probe", lambda member: member.probe(message))

    def _ask(self, what: str, ask: Callable[[Member], Any]) -> Any:
        return self._ask_for_bytes(what, lambda member: (ask(member), ()))[0]

    def _ask_for_bytes(
        self, what: str, ask: Callable[[Member], tuple[Any, Sequence[Bytes]]]
    ) -> tuple[Any, Sequence[Bytes]]:
        """The member's answer, or what it raised; and what is new in the journal."""

        def asked() -> tuple[Any, Sequence[Bytes]]:
            assert self._member, "in the first process"
            answer, arrays, raised = None, (), None
            try:
                answer, arrays = ask(self._member)
            except (Stopped, Overtaken, RunError) as error:
                kind = next(k for k, v in _RAISED.items() if isinstance(error, v))
                raised = [kind, str(error)]
            return [what, answer, raised, self._member.entries(self._read)], arrays

        (asked_for, answer, raised, entries), arrays = self._relay.first(asked)
        if asked_for != what:
            raise RunError(
                f"this process asks for {what!r} and the first process of its slice for "
                f"{asked_for!r}; they run different versions or configs"
            )
        for entry in entries:
            self.history.add(entry)
        self._read += len(entries)
        if raised:
            raise _RAISED[raised[0]](raised[1])
        return answer, arrays
