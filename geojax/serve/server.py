# SPDX-License-Identifier: Apache-2.0
"""uvicorn, stopped as a server with accepted requests should be.

Invariant: after the first SIGTERM or SIGINT requests are refused with 503 while those that were
accepted are answered, and their readers have what was sent, until there are none or time is over; a
second one ends at once. Nothing waits longer for a call of the engine than some seconds. Where a
request's headers do not come in time its connection is closed.
"""

import asyncio
import math
import socket
import time
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from geojax.config import ConfigError
from geojax.serve.loop import EngineLoop

_CONNECTIONS = 1024  # at once; more are told 503
_HEADER_SECONDS = 10.0  # from a connection's beginning, or a request's, to the end of its headers
_SEND_BYTES = 2**15  # that the system holds for a reader; Linux takes twice as many
_LAST_SECONDS = 5  # for the ends of responses, where no more of the time limit is left
_CALL_SECONDS = 5  # for a call of the engine to end, after the time limit


class Server(uvicorn.Server):
    """Of one engine. `begin` is called once signals are caught, before anything is answered."""

    def __init__(
        self, app: ASGIApp, loop: EngineLoop, drain_seconds: float, begin: Callable[[], None]
    ):
        config = uvicorn.Config(
            app,
            http=_Connection,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            limit_concurrency=_CONNECTIONS,
            server_header=False,
            proxy_headers=False,
        )
        super().__init__(config)
        self._loop, self._drain, self._begin = loop, drain_seconds, begin
        self._until: float | None = None

    def begin_stop(self) -> None:
        """Drain, then end; called again: end at once."""
        now = time.monotonic()
        if self._until is not None:
            self._until = min(self._until, now)
            self.force_exit = self.should_exit
            return
        self._until = now + (self._drain if self._loop.drain() else 0.0)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The handler may interrupt whoever holds the loop's lock, so it only asks.
        asyncio.get_running_loop().call_soon_threadsafe(self.begin_stop)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._begin()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        if self._until is not None and not self.should_exit:
            left = self._until - time.monotonic()
            if left < 0:
                self._loop.stop(0.0)
            nobody = self._loop.idle and left < 0
            if self._loop.finished or nobody or left < -_CALL_SECONDS:
                self.should_exit = True
                self.config.timeout_graceful_shutdown = math.ceil(max(left, _LAST_SECONDS))
        return await super().on_tick(counter)


class _Connection(H11Protocol):
    """uvicorn times bodies of nobody, and connections only between requests."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyrefly: ignore
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_be()
        super().connection_lost(exc)

    def _watch(self) -> None:
        begun = self.cycle is None or self.conn.trailing_data[0]
        if self.conn.their_state is not h11.IDLE or not begun:
            self._let_be()
        elif self._due is None:
            self._due = self.loop.call_later(_HEADER_SECONDS, self.transport.close)

    def _let_be(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


def listen(host: str, port: int, stall_seconds: float) -> socket.socket:
    """A listening socket; ConfigError where the address cannot be had.

    What a reader does not take within `stall_seconds` ends its connection, where the system can;
    and little of that lies in the system's memory, which else may be megabytes a connection.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small parts at once only where the protocol is named; else the end of an answer
    # waits 40 ms for the client to acknowledge what came before.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * stall_seconds))
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        found.bind((host, port))
        found.listen(1024)
    except OSError as error:
        found.close()
        raise ConfigError(
            f"cannot listen at {host} port {port} ({error.strerror or error}); choose another"
        ) from error
    return found
