# SPDX-License-Identifier: Apache-2.0
"""From what is certain of tickets to texts, whole or as they come.

Invariant: what was sent is never taken back: text leaves once no later token can change it, neither
by completing a character nor by completing a stop string. Whatever the pace of the reader, the
texts add up to the same answer.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from geojax.serve.errors import ApiError
from geojax.serve.metrics import Metrics
from geojax.serve.prompts import Prompts
from geojax.serve.ticket import Ticket, View

_BROKEN = "\ufffd"  # bytes that are no whole character yet
HIDDEN = "░"
"""Stands for a token that is not there yet."""


@dataclass(eq=False)
class Choice:
    """One answer as its client sees it."""

    index: int
    prompt: int
    """Which of the request's."""
    ticket: Ticket
    prompts: Prompts
    stops: Sequence[str] = ()
    text: str = ""
    """Sent so far."""
    tokens: int = 0
    """Of the answer, up to a stop string."""
    finish: str | None = None
    seen: View | None = None

    def read(self) -> str:
        """What is new and certain; ApiError where there will be no answer."""
        view = self.ticket.view
        if self.finish or view is self.seen:
            return ""
        self.seen = view
        if view.error:
            raise view.error
        text, self.tokens = self.prompts.decode(view.tokens), len(view.tokens)
        if not view.finish:
            text = text.rstrip(_BROKEN)
        stop = self._stop(text)
        if stop is not None:
            text, self.finish = text[:stop], "stop"
            self.tokens = self._tokens_until_stop(view)
            self.ticket.gone = True
        elif view.finish:
            self.finish = view.finish
        else:
            text = text[: len(text) - self._open_stop(text)]
        if not self.finish and not text.startswith(self.text):
            return ""  # a decoder that changes what it said before
        new, self.text = text[len(self.text) :], text
        return new

    def _stop(self, text: str) -> int | None:
        """Where the stop string begins that ends first, of those the longest: the first that a
        reader of single characters would see, however many come at once."""
        ends = ((at + len(s), at) for s in self.stops if (at := text.find(s)) >= 0)
        return min(ends, default=(0, None))[1]

    def _open_stop(self, text: str) -> int:
        """Characters at the end that may begin a stop string."""
        return max(
            (n for s in self.stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0
        )

    def _tokens_until_stop(self, view: View) -> int:
        low, high = 1, len(view.tokens)
        while low < high:
            middle = (low + high) // 2
            text = self.prompts.decode(view.tokens[:middle])
            text = text if view.finish and middle == len(view.tokens) else text.rstrip(_BROKEN)
            low, high = (low, middle) if any(s in text for s in self.stops) else (middle + 1, high)
        return low

    def snapshot(self) -> str:
        """The whole canvas as text, what is not there yet as blocks."""
        view, mask = self.ticket.view, self.prompts.model.mask_id
        parts, ids = [], np.concatenate([view.tokens[: view.before], view.canvas])
        ends = np.isin(ids, self.prompts.model.end_ids) & self.ticket.ask.ends
        if ends.any() and not (ids[: int(ends.argmax())] == mask).any():
            ids = ids[: int(ends.argmax())]
        borders = np.flatnonzero(np.diff(ids == mask)) + 1
        for run in np.split(ids, borders):
            if len(run):
                hidden = run[0] == mask
                parts.append(HIDDEN * len(run) if hidden else self.prompts.decode(run))
        return "".join(parts)

    def facts(self, reuse: str, layers: int) -> dict[str, Any]:
        """What a client may want to know beside the text."""
        ticket, ask = self.ticket, self.ticket.ask
        waited = (ticket.admitted or time.monotonic()) - ticket.arrived
        return {
            "policy": ask.sampling.policy,
            "reuse": "none" if ask.exact else reuse,
            "depth": ticket.depth,
            "layers": layers,
            "prefix_tokens": ticket.prefix,
            "cached_tokens": ticket.cached,
            "steps": ticket.view.steps,
            "seed": ask.sampling.seed,
            "queue_seconds": round(waited, 6),
        }

    def close(self, metrics: Metrics, end: str) -> None:
        """Nobody reads it any more; once. `end`: stop or length where its client was told so; error
        where an error was told, or abort where nothing was."""
        self.ticket.gone = True
        metrics.on_end(self.ticket, end, self.tokens if end in ("stop", "length") else 0)


async def changes(
    choices: Sequence[Choice], changed: asyncio.Event, metrics: Metrics, whole: bool
) -> AsyncIterator[tuple[Choice, str] | None]:
    """Each choice that changed, with its new text; None after ten seconds of nothing.

    `whole`: only those that are over, or may be by a stop string. Ends when all have finished;
    ApiError where one of them failed.
    """
    first = set[int]()
    while not all(choice.finish for choice in choices):
        try:
            async with asyncio.timeout(10):
                await changed.wait()
        except TimeoutError:
            # The engine's thread ends tickets in time, unless a call of it hangs.
            if any(time.monotonic() > c.ticket.deadline + 10 for c in choices if not c.finish):
                raise ApiError(504, "the request's time is over", "deadline_exceeded") from None
            yield None
            continue
        changed.clear()
        for choice in choices:
            view = choice.ticket.view
            if choice.finish or view is choice.seen or (whole and not (view.over or choice.stops)):
                continue
            new = choice.read()
            if new and choice.index not in first:
                first.add(choice.index)
                metrics.on_first(choice.ticket)
            yield choice, new


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of a request: each prompt once."""
    prompts = {c.prompt: c.ticket for c in reversed(choices)}.values()
    given = sum(len(t.ask.prompt) + len(t.ask.suffix) for t in prompts)
    new = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": given,
        "completion_tokens": new,
        "total_tokens": given + new,
        "prompt_tokens_details": {"cached_tokens": sum(t.cached for t in prompts)},
    }
