# SPDX-License-Identifier: Apache-2.0
"""What is checked of a request before anything of it is read.

Invariant: without a right key no byte of a body under /v1 is read; what is read is bounded in size
and time. Where no key is asked for, a page of another site cannot make a browser ask (the Host
header must name this machine, and bodies must say that they are JSON).
"""

import asyncio
import json
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from geojax.serve.errors import ApiError
from geojax.serve.metrics import Metrics
from geojax.serve.options import Limits, is_loopback
from geojax.serve.tenants import Tenants

_DROPPED = 8  # times the largest body
_HOST = re.compile(r"(?:\[([\da-f:.]+)\]|([\w.-]+))(?::\d*)?")


class Guard:
    """ASGI middleware; leaves the tenant in the scope's state."""

    def __init__(
        self, app: ASGIApp, tenants: Tenants, limits: Limits, metrics: Metrics, local: bool
    ):
        """`local`: only requests whose Host is this machine are answered."""
        self._app, self._tenants, self._limits, self._metrics = app, tenants, limits, metrics
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            body = await self._read(receive)
        except ApiError as error:
            self._metrics.on_refused(error.status)
            await _send_error(send, error)
            return
        if body is None:
            return

        async def receive_again() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            found, body = body, None
            return {"type": "http.request", "body": found, "more_body": False}

        await self._app(scope, receive_again, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None where the client goes away before its end.

        A body that is too large is read and dropped up to some multiple of what it may have: a
        connection that is closed before loses the answer, too.
        """
        most, parts, size = self._limits.body_bytes, [], 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    else:
                        parts.clear()
                    if size > most and (not more or size > _DROPPED * most):
                        raise ApiError(413, f"the body may have {most} bytes", "body_too_large")
                    if not more:
                        return b"".join(parts)
        except TimeoutError as error:
            raise ApiError(408, "the body did not come in time") from error

    def _check(self, scope: Scope) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if self._local and not _names_this_machine(headers.get(b"host", "")):
            raise ApiError(403, "this server answers to names of its own machine only", "bad_host")
        if not scope["path"].startswith("/v1"):
            return
        tenant = self._tenants.of(headers.get(b"authorization"))
        if tenant is None:
            raise ApiError(401, "no right API key; send Authorization: Bearer KEY", "bad_key")
        scope.setdefault("state", {})["tenant"] = tenant


def _names_this_machine(host: str) -> bool:
    """Of a Host header: an address, in brackets where it has colons, or localhost; and a port."""
    found = _HOST.fullmatch(host.lower())
    return bool(found) and is_loopback(found[1] or found[2])


async def _send_error(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers += [(k.lower().encode(), v.encode()) for k, v in error.headers.items()]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
