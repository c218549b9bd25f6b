# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI's clients read them: a status, and a body of message, type, param and code."""

from typing import Any

INVALID, NO_KEY, TOO_MANY, OURS = (
    "invalid_request_error",
    "authentication_error",
    "rate_limit_error",
    "server_error",
)
_TYPES = {401: NO_KEY, 429: TOO_MANY}


class ApiError(Exception):
    """What a client is told in place of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_seconds: float | None = None,
    ):
        """`param`: the field that is at fault; `retry_seconds`: when to try again."""
        super().__init__(message)
        self.status, self.code = status, code
        self.message, self.param = _whole(message), None if param is None else _whole(param)
        self.retry_seconds = retry_seconds

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, OURS if self.status >= 500 else INVALID)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        found = {}
        if self.retry_seconds is not None:
            found["Retry-After"] = str(max(1, round(self.retry_seconds)))
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found


def _whole(text: str) -> str:
    """Half characters, which JSON may hold and UTF-8 may not, as question marks."""
    return text.encode("utf-8", "replace").decode()


def need(condition: object, message: str, param: str | None = None, code: str | None = None):
    """A bad request unless `condition` holds."""
    if not condition:
        raise ApiError(400, message, code, param)
