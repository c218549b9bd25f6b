# SPDX-License-Identifier: Apache-2.0
"""From the body of a request to tickets, and from tickets to the body of a response.

Invariant: a request that the model or the server's limits do not allow is refused before any of it
is accepted, and names the field; defaults are filled in here and nowhere else.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Int32

from geojax.diffusion.request import SamplingConfig
from geojax.serve.answers import Choice, changes, usage
from geojax.serve.errors import ApiError, need
from geojax.serve.loop import EngineLoop
from geojax.serve.metrics import Metrics
from geojax.serve.options import Limits
from geojax.serve.prompts import Prompt, Prompts
from geojax.serve.protocol import ChatRequest, CompletionRequest
from geojax.serve.stream import DONE, WAITING, event
from geojax.serve.tenants import Tenant
from geojax.serve.ticket import Ask, Ticket

log = logging.getLogger("geojax.serve")
_BLOCK = 32  # positions, where a request names none


@dataclass(frozen=True)
class Service:
    """One model behind the interface."""

    name: str
    prompts: Prompts
    loop: EngineLoop
    limits: Limits
    metrics: Metrics

    async def open(self, body: CompletionRequest | ChatRequest, tenant: Tenant) -> "Exchange":
        """The request's tickets, accepted; ApiError or ConfigError where they are not."""
        need(
            body.model in (None, self.name),
            f"no model is named {body.model!r} here; use {self.name!r}",
            "model",
        )
        started = time.monotonic()
        self.loop.arriving += 1
        try:
            return await self._open(body, tenant, started)
        finally:
            self.loop.arriving -= 1

    async def _open(
        self, body: CompletionRequest | ChatRequest, tenant: Tenant, started: float
    ) -> "Exchange":
        prompts, suffix = await asyncio.to_thread(_read, self.prompts, body)
        each = body.n or 1
        count = each * len(prompts)
        need(
            count <= self.limits.choices,
            f"{count} answers are asked for at once, and {self.limits.choices} may be; send "
            "several requests",
            "n",
        )
        asks = [self._ask(body, prompt, suffix) for prompt in prompts]
        changed, loop = asyncio.Event(), asyncio.get_running_loop()
        seconds = min(body.deadline_seconds or np.inf, self.limits.request_seconds)
        choices = []
        for index in range(count):
            ask = asks[index // each]
            seed = (ask.sampling.seed + index % each) % 2**32
            ask = replace(ask, sampling=replace(ask.sampling, seed=seed))
            ticket = Ticket(
                ask,
                tenant,
                started,
                started + seconds,
                lambda: loop.call_soon_threadsafe(changed.set),
            )
            choices.append(Choice(index, index // each, ticket, self.prompts, body.stops))
        self.loop.submit([choice.ticket for choice in choices])
        chat = isinstance(body, ChatRequest)
        return Exchange(self, body, choices, changed, int(time.time()), chat)

    def _ask(self, body: CompletionRequest | ChatRequest, prompt: Prompt, suffix) -> Ask:
        limits, config = self.limits, self.prompts.model.config
        given = len(prompt.ids) + len(suffix)
        need(
            given <= limits.prompt_tokens,
            f"the prompt has {given} tokens, and {limits.prompt_tokens} may be",
            "messages" if isinstance(body, ChatRequest) else "prompt",
            "context_length_exceeded",
        )
        tokens = body.max_tokens
        if isinstance(body, ChatRequest):
            tokens = body.max_completion_tokens or tokens
        asked = tokens is not None
        tokens = tokens if tokens is not None else limits.default_tokens
        need(
            tokens <= limits.tokens,
            f"{tokens} new tokens are asked for, and {limits.tokens} may be",
            "max_tokens",
        )
        room = config.context - given if config.context else tokens
        need(
            room >= (tokens if asked else 1),
            f"the prompt's {given} tokens and {tokens if asked else 1} new ones are more than the "
            f"model's context of {config.context}",
            "max_tokens",
            "context_length_exceeded",
        )
        tokens = min(tokens, room)
        canvas = body.canvas or limits.canvas
        need(
            canvas <= limits.canvas,
            f"a canvas of {canvas} masks is asked for, and {limits.canvas} may be",
            "canvas",
        )
        policy = body.policy or ("threshold" if body.threshold is not None else "confidence")
        sampling = SamplingConfig(
            steps=min(body.steps or 0, tokens),
            block=_BLOCK if body.block_length is None else body.block_length,
            policy=policy,
            threshold=0.9 if body.threshold is None else body.threshold,
            temperature=body.temperature or 0.0,
            seed=(secrets.randbits(32) if body.seed is None else body.seed) % 2**32,
        )
        return Ask(
            prompt.ids,
            sampling,
            tokens,
            min(canvas, tokens),
            suffix,
            not body.ignore_eos,
            prompt.ends,
            body.exact,
            body.priority,
            bool(body.stream and body.stream_options and body.stream_options.include_snapshots),
        )


def _read(
    prompts: Prompts, body: CompletionRequest | ChatRequest
) -> tuple[list[Prompt], Int32[np.ndarray, " s"]]:
    """Prompts, and what follows the answers."""
    suffix = np.zeros(0, np.int32)
    if isinstance(body, ChatRequest):
        messages = [message.plain() for message in body.messages]
        return [prompts.of_chat(messages, body.prefix_messages)], suffix
    given = body.prompt
    if isinstance(given, str):
        found = [prompts.of_text(given)]
    elif isinstance(given[0], int):
        found = [prompts.of_ids(given)]  # pyrefly: ignore
    else:
        found = [prompts.of_text(x) if isinstance(x, str) else prompts.of_ids(x) for x in given]
    if (marked := body.prefix_tokens) is not None:
        shifted = prompts.model.config.shifted
        for prompt in found:
            most = max(len(prompt.ids) - shifted, 0)
            need(
                marked <= most,
                f"prefix_tokens {marked}: a prompt has {most} tokens that can be shared",
                "prefix_tokens",
            )
        found = [prompt._replace(ends=(marked,) if marked else ()) for prompt in found]
    return found, prompts.encode(body.suffix) if body.suffix else suffix


@dataclass(frozen=True)
class Exchange:
    """A request that was accepted, and its response."""

    service: Service
    body: CompletionRequest | ChatRequest
    choices: Sequence[Choice]
    changed: asyncio.Event
    created: int
    chat: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    def close(self) -> None:
        """What is not finished is not wanted any more."""
        for choice in self.choices:
            choice.close(self.service.metrics)
        self.service.loop.nudge()
        tickets = [choice.ticket for choice in self.choices]
        log.info(
            "%s of %s: %s, %d + %d tokens, %.3f s",
            self.id,
            tickets[0].tenant.name,
            "/".join(sorted({choice.outcome for choice in self.choices})),
            sum(len(ticket.ask.prompt) for ticket in tickets),
            sum(choice.tokens for choice in self.choices),
            time.monotonic() - tickets[0].arrived,
        )

    async def whole(self) -> dict[str, Any]:
        metrics = self.service.metrics
        async for _ in changes(self.choices, self.changed, metrics, whole=True):
            pass
        found = []
        for choice in self.choices:
            text = {"message": _message(choice.text)} if self.chat else {"text": choice.text}
            found.append(self._choice(choice, text))
        return self._envelope("chat.completion", found) | {"usage": usage(self.choices)}

    async def events(self) -> AsyncIterator[bytes]:
        """Chunks: text that became certain, the reason of each end, and the usage where wanted."""
        options = self.body.stream_options
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
        return self._envelope("chat.completion.chunk", choices)

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
