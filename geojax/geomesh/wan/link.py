# SPDX-License-Identifier: Apache-2.0
"""A slice's line to the coordinator: two threads that keep in touch, whatever the slice computes.

One says the slice's status when it changes and several times a lease; one reads the journal.
Invariant: a call that fails is made again until it succeeds, or the slice ends.
"""

import logging
import threading
from collections.abc import Callable

from geojax.geomesh.wan.rpc import CallError, Client, Header

log = logging.getLogger("geojax.geomesh")
_BEATS_A_LEASE = 5
_FOLLOW_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 5.0  # between tries
_RETRY_SECONDS = 0.2


class Link:
    """Calls `told` and `read` with the coordinator's replies, and `refused` with its refusal."""

    def __init__(
        self,
        client: Client,
        address: str,
        lease_seconds: float,
        status: Callable[[], Header],
        place: Callable[[], Header],
        told: Callable[[Header, Header], None],
        read: Callable[[Header], None],
        refused: Callable[[str], None],
        say: Callable[[str], None],
    ):
        """`status`: what to tell; `place`: from where to follow."""
        self._client, self._address, self._beat = client, address, lease_seconds / _BEATS_A_LEASE
        self._status, self._place, self._told, self._read = status, place, told, read
        self._refused, self._say = refused, say
        self._news, self._ending = threading.Event(), threading.Event()
        for target in (self._keep_telling, self._keep_following):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    @property
    def ending(self) -> bool:
        return self._ending.is_set()

    def hurry(self) -> None:
        """The status has changed."""
        self._news.set()

    def close(self) -> None:
        """End, and say the status a last time."""
        self._ending.set()
        self._news.set()
        try:
            self._client.call(self._address, "tell", self._status())
        except CallError as error:
            self._say(f"no good-bye to the coordinator at {error}")

    def _keep_telling(self) -> None:
        pause, lost = _RETRY_SECONDS, False
        while not self.ending:
            self._news.clear()
            status = self._status()
            try:
                self._told(status, self._client.call(self._address, "tell", status))
            except CallError as error:
                if self._is_refused(error):
                    return
                if not lost:
                    self._say(f"cannot reach the coordinator at {error}; waiting for it")
                lost = True
                self._ending.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            except Exception as error:
                self._fail(error)
                return
            if lost:
                self._say("the coordinator answers again")
            pause, lost = _RETRY_SECONDS, False
            self._news.wait(self._beat)

    def _keep_following(self) -> None:
        pause = _RETRY_SECONDS
        while not self.ending:
            header = self._place() | {"wait_seconds": _FOLLOW_SECONDS}
            try:
                self._read(self._client.call(self._address, "follow", header, _FOLLOW_SECONDS))
            except CallError as error:
                if self._is_refused(error):
                    return
                self._ending.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            except Exception as error:
                self._fail(error)
                return
            else:
                pause = _RETRY_SECONDS

    def _fail(self, error: Exception) -> None:
        """A fault that trying again does not mend must not leave the slice mute, or deaf."""
        log.error("the line to the coordinator broke", exc_info=error)
        self._refused(f"the line to it broke, {type(error).__name__}: {error}")

    def _is_refused(self, error: CallError) -> bool:
        if error.refused:
            self._refused(str(error))
        return error.refused
