# SPDX-License-Identifier: Apache-2.0
"""What a slice has of the others: its seat among them, whoever in the slice speaks for it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import UInt8

from geojax.geomesh.wan.history import History

Message = UInt8[np.ndarray, "_"]


class Stopped(Exception):  # noqa: N818 - not an error
    """The run is to stop here, saved."""


class Overtaken(Exception):  # noqa: N818 - not an error
    """A round's messages cannot be had any more."""


class Offer(NamedTuple):
    """The state that peers may fetch."""

    epoch: int
    border: int
    digest: str
    arrays: Sequence[np.ndarray]
    """In an order that all slices share; never changed in place."""


KEPT_ROUNDS = 16
"""Whose messages a slice may still be asked for."""


class Seat(Protocol):
    """A slice's processes call the same methods in the same order, and all get the same answers;
    `times`, `unwritten` and `sent_bytes` alone are of the one that speaks."""

    index: int
    """Of the slice."""
    history: History
    """As far as it is known here."""

    @property
    def stopping(self) -> bool:
        """Whether the slice is to stop."""
        ...

    @property
    def phase(self) -> str:
        """What this slice last said that it does."""
        ...

    @property
    def sent_bytes(self) -> int:
        """To peers by this process: messages, those sent again and for others, probes, states."""
        ...

    @property
    def unwritten(self) -> list[dict[str, Any]]:
        """Records that are not known to be written."""
        ...

    def while_waiting(self, beat: Callable[[], None]) -> None:
        """`beat` is called now and then, from here on."""
        ...

    def snapshot(self) -> History:
        """The history as it is now."""
        ...

    def tell(self, **changes: Any) -> None:
        """What this slice does, from now on."""
        ...

    def say(self, text: str) -> None:
        """To whoever reads along."""
        ...

    def record(self, *records: dict[str, Any]) -> None:
        """For the run's records, each with `kind` and `round`; sent until they are written."""
        ...

    def offer(self, offer: Offer) -> None:
        """What peers get when they ask for the state."""
        ...

    def keep_messages(self, most_bytes: int) -> None:
        """For peers that are behind: of the last round, and of up to KEPT_ROUNDS as far as they
        take no more than that."""
        ...

    def wait(self, reached: Callable[[History], bool], seconds: float | None = None) -> bool:
        """Until `reached` is true of the history; False where `seconds` passed before. Stopped;
        RunError where the run cannot go on."""
        ...

    def wait_past(self, epoch: int, number: int) -> None:
        """Until that round is over, or was undone. Stopped; RunError."""
        ...

    def is_past(self, epoch: int, number: int) -> bool:
        """Whether that round is over, or was undone."""
        ...

    def wait_for_the_end(self) -> None:
        """Until every slice has reached the end, or the coordinator has gone."""
        ...

    def send(self, epoch: int, number: int, message: Message) -> None:
        """Begin to send this slice's message of the round to the others in it."""
        ...

    def times(self, number: int, merged: Iterable[int]) -> tuple[float, float | None]:
        """Seconds until this slice's message of a round was with the others that it merged, and
        until the round's end was known here; 0 and None where this process did not send it."""
        ...

    def collect(self, number: int) -> list[Message | None]:
        """Messages of the slices that a round merged, by index, None for the others; those that are
        not here are fetched from whoever has them. Overtaken."""
        ...

    def fetch_state(self, after: int, size_bytes: int) -> tuple[Offer, np.ndarray] | None:
        """A peer's state that is of the history, at a border after that one, and its bytes; None:
        nobody gives one now."""
        ...

    def knows_all(self) -> bool:
        """Whether the addresses of all slices are known; asked within `wait`."""
        ...

    def probe(self, message: Message) -> float:
        """Seconds that sending a message to every peer, at once, takes."""
        ...
