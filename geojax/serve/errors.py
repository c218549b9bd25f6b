# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI's clients read them: a status, and a body of message, type, param and code."""

import json
from collections.abc import Mapping
from typing import Any

INVALID, NO_KEY, TOO_MANY, OURS = (
    "invalid_request_error",
    "authentication_error",
    "rate_limit_error",
    "server_error",
)
_SHOWN = 60  # characters of a value that is wrong
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
        # The same again would end the same way; OpenAI's client heeds this.
        if self.status == 504 or self.code == "failed":
            found["x-should-retry"] = "false"
        return found


def invalid(error: Mapping[str, Any]) -> ApiError:
    """Of an error of pydantic's about a body: the field, what it must be, and what it is."""
    kind, place = error["type"], ".".join(str(part) for part in error["loc"][1:])
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error['ctx']['error']}, character {place}")
    if not place:
        return ApiError(
            400, "the body is no JSON object; send one, and Content-Type: application/json"
        )
    if kind == "missing":
        return ApiError(400, f"{place}: it is missing, and is needed", None, place)
    if kind == "extra_forbidden":
        return ApiError(400, f"{place}: there is no such field; leave it out", None, place)
    return ApiError(400, f"{place}: {error['msg']}; it is {_short(error['input'])}", None, place)


def _short(value: Any) -> str:
    """As JSON, and how it begins where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _whole(text: str) -> str:
    """Half characters, which JSON may hold and UTF-8 may not, as question marks."""
    return text.encode("utf-8", "replace").decode()


def need(condition: object, message: str, param: str | None = None, code: str | None = None):
    """A bad request unless `condition` holds."""
    if not condition:
        raise ApiError(400, message, code, param)
