# SPDX-License-Identifier: Apache-2.0
"""Server-sent events to one reader.

Invariant: whoever makes the events is told when the reader is gone, or too slow, as soon as that is
known; and a reader holds no more than one event that it has not taken.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # of proxies
]
DONE, WAITING = b"data: [DONE]\n\n", b": waiting\n\n"


def event(data: Any) -> bytes:
    """In ASCII: clients' decoders also end lines at U+2028, U+2029 and U+0085."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


class EventStream(Response):
    """An ASGI response."""

    background: BackgroundTask | None = None

    def __init__(
        self, events: AsyncIterator[bytes], stall_seconds: float, close: Callable[[], None]
    ):
        """`close` is called once, at the end, whatever it was."""
        self._events, self._stall, self._close = events, stall_seconds, close
        self.status_code, self.raw_headers = 200, list(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self._send(send), receive)
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for body in self._events:
            async with asyncio.timeout(self._stall):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone[T](work: Awaitable[T], receive: Receive) -> T | None:
    """What `work` gives; None where the client goes away before, or a send takes too long."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            try:
                return worker.result()
            except TimeoutError:
                return None
        return None
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)
