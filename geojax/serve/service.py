# SPDX-License-Identifier: Apache-2.0
"""From the body of a request to tickets.

Invariant: a request that the model or the server's limits do not allow is refused before any of it
is accepted, and names the field; defaults are filled in here and nowhere else.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int32

from geojax.config import ConfigError
from geojax.diffusion.request import SamplingConfig
from geojax.serve.answers import Choice
from geojax.serve.errors import ApiError, need
from geojax.serve.exchange import Exchange
from geojax.serve.loop import EngineLoop
from geojax.serve.metrics import Metrics
from geojax.serve.options import Limits
from geojax.serve.prompts import Prompt, Prompts
from geojax.serve.protocol import ChatRequest, CompletionRequest
from geojax.serve.tenants import Tenant
from geojax.serve.ticket import Ask, Ticket

_BLOCK = 32  # positions, where a request names none


@dataclass(frozen=True)
class Service:
    """One model behind the interface."""

    name: str
    prompts: Prompts
    loop: EngineLoop
    limits: Limits
    metrics: Metrics

    async def open(self, body: CompletionRequest | ChatRequest, tenant: Tenant) -> Exchange:
        """The request's tickets, accepted; ApiError or ConfigError where they are not."""
        self.check_name(body.model)
        self._check(body)
        started = time.monotonic()
        self.loop.arriving += 1
        try:
            return await self._open(body, tenant, started)
        finally:
            self.loop.arriving -= 1

    def check_name(self, name: str | None) -> None:
        """ApiError where it is another model's."""
        if name not in (None, self.name):
            message = f"no model is named {name!r} here; use {self.name!r}"
            raise ApiError(404, message, "model_not_found", "model")

    def _check(self, body: CompletionRequest | ChatRequest) -> None:
        """What needs no tokens: how many answers, and fields that would have no effect."""
        most = min(self.limits.choices, self.loop.pace.queue)
        need(
            body.answers <= most,
            f"{body.answers} answers are asked for at once, and {most} may be; send several "
            "requests",
            "prompt" if body.n in (None, 1) else "n",
        )
        need(
            body.stream or body.stream_options is None,
            "stream_options mean nothing without stream: true; leave them out",
            "stream_options",
        )
        if isinstance(body, ChatRequest):
            name, marked = "prefix_messages", body.prefix_messages
            both = (body.max_tokens, body.max_completion_tokens)
            need(
                None in both or both[0] == both[1],
                f"max_tokens {both[0]} and max_completion_tokens {both[1]} are two names of one "
                "setting; leave one out",
                "max_tokens",
            )
        else:
            name, marked = "prefix_tokens", body.prefix_tokens
        need(
            not (body.exact and marked),
            f"{name} {marked}: nothing is shared where exact is true; leave one of them out",
            name,
        )

    async def _open(
        self, body: CompletionRequest | ChatRequest, tenant: Tenant, started: float
    ) -> Exchange:
        prompts, suffix = await asyncio.to_thread(_read, self.prompts, body)
        each, count = body.n or 1, body.answers
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
        canvas = body.canvas or limits.canvas
        need(
            canvas <= limits.canvas,
            f"a canvas of {canvas} masks is asked for, and {limits.canvas} may be",
            "canvas",
        )
        asked = tokens is not None
        if tokens is None:
            tokens = min(limits.default_tokens, canvas if len(suffix) else limits.tokens)
        need(
            tokens <= limits.tokens,
            f"{tokens} new tokens are asked for, and {limits.tokens} may be",
            "max_tokens",
        )
        need(
            tokens <= canvas or not len(suffix),
            f"{tokens} tokens are asked for before a suffix, which are one canvas, and that has "
            f"{canvas} masks at most; ask for {canvas} or fewer",
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
        policy = body.policy or ("threshold" if body.threshold is not None else "confidence")
        try:
            sampling = SamplingConfig(
                steps=min(body.steps or 0, tokens),
                block=_BLOCK if body.block_length is None else body.block_length,
                policy=policy,
                threshold=0.9 if body.threshold is None else body.threshold,
                temperature=body.temperature or 0.0,
                seed=(secrets.randbits(32) if body.seed is None else body.seed) % 2**32,
            )
        except ConfigError as error:  # its first word is the field
            field = str(error).partition(" ")[0]
            raise ApiError(400, str(error), None, field) from error
        return Ask(
            prompt.ids,
            sampling,
            tokens,
            min(canvas, tokens),
            suffix,
            not body.ignore_eos,
            prompt.ends,
            bool(body.exact),
            body.priority or 0,
            bool(body.stream and body.stream_options and body.stream_options.include_snapshots),
        )


def _read(
    prompts: Prompts, body: CompletionRequest | ChatRequest
) -> tuple[list[Prompt], Int32[np.ndarray, " s"]]:
    """Prompts, and what follows the answers."""
    suffix = np.zeros(0, np.int32)
    if isinstance(body, ChatRequest):
        messages = [message.plain() for message in body.messages]
        try:
            return [prompts.of_chat(messages, body.prefix_messages)], suffix
        except ConfigError as error:
            raise ApiError(400, str(error), None, "messages") from error
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
    return found, prompts.encode(body.suffix, "suffix") if body.suffix else suffix
