# SPDX-License-Identifier: Apache-2.0
"""A request that was accepted, and its response: whole, or as events.

Invariant: what is counted of it is what its client was told. A whole response has all answers or an
error; in a stream, what has ended before an error stays the client's.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from geojax.serve.answers import Choice, changes, usage
from geojax.serve.errors import ApiError
from geojax.serve.protocol import ChatRequest, CompletionRequest
from geojax.serve.stream import DONE, WAITING, event

if TYPE_CHECKING:
    from geojax.serve.service import Service

log = logging.getLogger("geojax.serve")


@dataclass(eq=False)
class Exchange:
    """A request that was accepted, and its response."""

    service: "Service"
    body: CompletionRequest | ChatRequest
    choices: Sequence[Choice]
    changed: asyncio.Event
    created: int
    chat: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    told: bool = False
    """Whether choices that have finished are its client's, whatever becomes of the others."""
    failed: bool = False
    """Whether its client was told an error."""

    def close(self) -> None:
        """What is not finished is not wanted any more; clients are counted as told what they
        were."""
        metrics, ends = self.service.metrics, []
        for choice in self.choices:
            unfinished = "error" if self.failed else "abort"
            ends.append((choice.finish if self.told else None) or unfinished)
            choice.close(metrics, ends[-1])
        if self.told and all(choice.finish for choice in self.choices):
            metrics.on_answered(usage(self.choices)["prompt_tokens"])
        self.service.loop.nudge()
        tickets = [choice.ticket for choice in self.choices]
        log.info(
            "%s of %s: %s, %d + %d tokens, %.3f s",
            self.id,
            tickets[0].tenant.name,
            "/".join(sorted(set(ends))),
            sum(len(ticket.ask.prompt) for ticket in tickets),
            sum(choice.tokens for choice in self.choices),
            time.monotonic() - tickets[0].arrived,
        )

    async def whole(self) -> dict[str, Any]:
        """ApiError where one of the answers cannot be given: then none is."""
        metrics = self.service.metrics
        try:
            async for _ in changes(self.choices, self.changed, metrics, whole=True):
                pass
        except Exception:
            self.failed = True
            raise
        self.told, found = True, []
        for choice in self.choices:
            text = {"message": _message(choice.text)} if self.chat else {"text": choice.text}
            found.append(self._choice(choice, text))
        return self._envelope("chat.completion", found) | {"usage": usage(self.choices)}

    async def events(self) -> AsyncIterator[bytes]:
        """Chunks: text that became certain, the reason of each end, and the usage where wanted."""
        self.told, options = True, self.body.stream_options
        shown = bool(options and options.include_snapshots)
        try:
            if self.chat:
                for choice in self.choices:
                    yield self._chunk(choice, {"role": "assistant", "content": ""})
            found = changes(self.choices, self.changed, self.service.metrics, whole=False)
            async for change in found:
                if change is None:
                    yield WAITING
                    continue
                choice, new = change
                if shown:
                    yield self._snapshot(choice)
                if new or choice.finish:
                    yield self._chunk(choice, {"content": new} if self.chat else new)
        except ApiError as error:
            self.failed = True
            yield event(error.body)
            return
        if options and options.include_usage:
            yield event(self._chunk_of([]) | {"usage": usage(self.choices)})
        yield DONE

    def _snapshot(self, choice: Choice) -> bytes:
        view = choice.ticket.view
        shown = {"index": choice.index, "step": view.steps, "text": choice.snapshot()}
        empty: Any = {"delta": {}} if self.chat else {"text": ""}
        content = [{"index": choice.index, "finish_reason": None, "logprobs": None, **empty}]
        return event(self._chunk_of(content) | {"geojax": {"snapshot": shown}})

    def _chunk(self, choice: Choice, new: Any) -> bytes:
        return event(
            self._chunk_of([self._choice(choice, {"delta": new} if self.chat else {"text": new})])
        )

    def _chunk_of(self, choices: list[Any]) -> dict[str, Any]:
        options = self.body.stream_options  # all chunks have a usage where the last one has
        empty = {"usage": None} if options and options.include_usage else {}
        return self._envelope("chat.completion.chunk", choices) | empty

    def _choice(self, choice: Choice, text: dict[str, Any]) -> dict[str, Any]:
        engine = self.service.loop.engine
        found = {"index": choice.index, **text, "logprobs": None, "finish_reason": choice.finish}
        if choice.finish:
            layers = engine.sampler.model.config.layers
            found["geojax"] = choice.facts(engine.policy.name, layers)
        return found

    def _envelope(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.service.name,
            "choices": choices,
        }


def _message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "refusal": None}
