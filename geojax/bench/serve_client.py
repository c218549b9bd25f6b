# SPDX-License-Identifier: Apache-2.0
"""One request of a load, as its client sees it.

Invariant: whatever a server sends, or does not, is a figure or an error of that request alone.
"""

import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx2


@dataclass
class Sent:
    """A request as its client saw it; times in seconds since it was sent."""

    status: int = 0
    first: float = math.nan
    """Until its first text."""
    whole: float = math.nan
    gaps: list[float] = field(default_factory=list)
    """Between chunks of text."""
    given: int = 0
    cached: int = 0
    new: int = 0
    error: str = ""

    @property
    def good(self) -> bool:
        return self.status == 200 and not self.error


async def send(client: httpx2.AsyncClient, body: dict[str, Any]) -> Sent:
    """One stream, read to its end."""
    found, began = Sent(), time.perf_counter()
    last = began
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            found.status = response.status_code
            if found.status != 200:
                found.error = _reason((await response.aread()).decode("utf-8", "replace"))
                return found
            ended = False
            async for line in _lines(response):
                ended |= line == b"data: [DONE]"
                if ended or not line.startswith(b"data: "):
                    continue
                try:
                    text = _take_in(found, line[6:])
                except (ValueError, TypeError, KeyError, AttributeError):
                    said = line.decode("utf-8", "replace")
                    found.error = f"a line that is no chunk of completions: {said}"[:200]
                    return found
                if text:
                    now = time.perf_counter()
                    if math.isnan(found.first):
                        found.first = now - began
                    else:
                        found.gaps.append(now - last)
                    last = now
            if not ended and not found.error:
                found.error = "the stream ended before data: [DONE]"
    except httpx2.HTTPError as error:
        found.error = repr(error)[:200]
    found.whole = time.perf_counter() - began
    return found


def _reason(body: str) -> str:
    """The message of an error in OpenAI's shape; of others, how they begin."""
    try:
        return str(json.loads(body)["error"]["message"])[:200]
    except (ValueError, TypeError, KeyError):
        return body[:200]


async def _lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Without their ends. Lines of text end at more than that, such as U+2028, which JSON may
    hold."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")


def _take_in(found: Sent, data: bytes) -> bool:
    """A chunk's errors and usage; whether it has text."""
    chunk = json.loads(data)
    if "error" in chunk:
        found.error = _reason(data.decode("utf-8", "replace"))
    if usage := chunk.get("usage"):
        found.given, found.new = usage["prompt_tokens"], usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        found.cached = details.get("cached_tokens") or 0
    return any(choice["text"] for choice in chunk.get("choices", ()))
