# SPDX-License-Identifier: Apache-2.0
"""Calls to the other slices, at the addresses that the coordinator last named."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import numpy as np

from geojax.config import RunError
from geojax.geomesh.message import version
from geojax.geomesh.wan.rpc import CallError, Client, Header
from geojax.geomesh.wan.seat import Message, Offer


class Place(NamedTuple):
    """Where a slice is."""

    address: str
    incarnation: str
    """Of its process."""


class Peers:
    """Of slice `index`; `say` hears what went wrong."""

    def __init__(
        self, client: Client, names: Sequence[str], index: int, say: Callable[[str], None]
    ):
        self._client, self._names, self._index, self._say = client, names, index, say
        self.places: dict[int, Place] = {}
        """By slice, its own among them; replaced whole."""

    @property
    def all_known(self) -> bool:
        return len(self.places) == len(self._names)

    def process_of(self, other: int) -> str:
        """The incarnation of that slice; empty where it is not known."""
        place = self.places.get(other)
        return place.incarnation if place else ""

    def push(self, other: int, header: Header, message: Message, over: Callable[[], bool]) -> None:
        """Send it this slice's message, until that is `over`. CallError."""
        self._client.push(self.places[other].address, "message", header, message, over)

    def fetch(
        self,
        header: Header,
        merged: Iterable[int],
        size_bytes: int,
        check: Callable[[int, int, Message], None],
    ) -> Message | None:
        """The message that `header` names, in that version, from its sender, or from any other
        slice that was merged with it; None: nobody gives it."""
        index, places = header["slice"], self.places
        for holder in [index, *(i for i in merged if i not in (index, self._index))]:
            place = places.get(holder)
            if place is None or holder == self._index:
                continue
            try:
                _, message = self._client.pull(place.address, "fetch", header, size_bytes)
                check(header["round"], index, message)
            except RunError:
                continue
            if version(message) == header["version"]:
                return message
        return None

    def fetch_state(
        self, wanted: Callable[[int, int], bool], size_bytes: int
    ) -> tuple[Offer, np.ndarray] | None:
        """Of a peer whose place `wanted(epoch, border)` accepts. All are asked where they are, and
        whoever answers first is tried first: one that hangs keeps nobody."""
        others = self._others()
        pool = ThreadPoolExecutor(max(len(others), 1))
        try:
            asked = {pool.submit(self._client.call, a, "border", {}): a for a in others}
            for place in as_completed(asked):
                address = asked[place]
                try:
                    found = place.result()
                    if not wanted(found["epoch"], found["border"]):
                        continue
                    found, data = self._client.pull(address, "state", {}, size_bytes)
                except CallError as error:
                    self._say(f"no state from {error}")
                    continue
                if wanted(found["epoch"], found["border"]):
                    return Offer(found["epoch"], found["border"], found["digest"], ()), data
            return None
        finally:
            pool.shutdown(wait=False)

    def probe(self, message: Message) -> float:
        """As Seat.probe."""
        started = time.perf_counter()
        others = self._others()
        with ThreadPoolExecutor(max(len(others), 1)) as pool:
            for address in others:
                pool.submit(self._quietly, address, message)
        return time.perf_counter() - started

    def _others(self) -> list[str]:
        return [place.address for i, place in sorted(self.places.items()) if i != self._index]

    def _quietly(self, address: str, message: Message) -> None:
        try:
            self._client.push(address, "probe", {}, message)
        except CallError as error:
            self._say(f"cannot send to {error}")
