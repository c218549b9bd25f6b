# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: OpenAI's fields, and those of diffusion beside them.

Invariant: a field that is accepted has its effect. What this server cannot do is refused unless it
is asked for neutrally (top_p 1, logprobs null); what changes no answer (user, metadata) is ignored
by name; any other field is an error.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from geojax.diffusion.choose import POLICIES

_Text = Annotated[str, Field(min_length=1, max_length=256)]
_Id = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _must(be: str) -> WrapValidator:
    """One error for a field that may have several forms, rather than one for each form."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("form", "must be {be}", {"be": be}) from error

    return WrapValidator(check)


_Stop = Annotated[
    _Text | Annotated[list[_Text], Field(max_length=16)] | None,
    _must("a text of 1 to 256 characters, or at most 16 of them"),
]
_Prompt = Annotated[
    str
    | Annotated[list[str], Field(min_length=1, max_length=128)]
    | Annotated[list[_Id], Field(min_length=1)]
    | Annotated[
        list[Annotated[list[_Id], Field(min_length=1)]], Field(min_length=1, max_length=128)
    ],
    _must("a text, a list of 1 to 128 texts, ids of tokens, or a list of 1 to 128 lists of ids"),
]
_Nothing = Annotated[list[Any], Field(max_length=0)] | None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    """A last chunk with the usage and no choice."""
    include_obfuscation: bool = False
    """Ignored."""
    continuous_usage_stats: Literal[False] | None = None
    include_snapshots: bool = False
    """Also after each step or two the whole canvas, as `geojax.snapshot` of a chunk whose text is
    empty."""


class _Ask(_Strict):
    """What both interfaces have."""

    model: str | None = None
    """The served model's name; unset: that."""
    temperature: float | None = Field(default=None, ge=0, lt=100)
    """0, the default: always the likeliest token."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Its lowest 32 bits; choice i of n takes seed + i. Unset: a random one."""
    n: int | None = Field(default=None, ge=1, le=128)
    """Answers to each prompt."""
    stop: _Stop = None
    """Texts that end an answer, and are no part of it."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    """End-of-text does not end an answer."""
    priority: int | None = Field(default=None, ge=-10, le=10)
    """Lower ones first, among requests of the same key; unset: 0."""

    # Of diffusion.
    steps: int | None = Field(default=None, ge=1, le=2**20)
    """Denoising steps of the whole answer; unset: one for each token."""
    block_length: int | None = Field(default=None, ge=0, le=2**20)
    """Positions that are filled before those after them; 0: the canvas."""
    policy: Literal[POLICIES] | None = None  # pyrefly: ignore
    """Which positions a step fills; see docs/diffusion.md."""
    threshold: float | None = Field(default=None, gt=0, le=1)
    """Policy threshold, which it implies."""
    canvas: int | None = Field(default=None, ge=1, le=2**20)
    """Masks at once; a longer answer grows by so many."""
    exact: bool | None = None
    """Nothing is reused for it."""
    deadline_seconds: float | None = Field(default=None, gt=0)
    """Until its end; the server's own limit holds as well."""

    # Accepted where they ask for nothing.
    top_p: Annotated[float, Field(ge=1, le=1)] | None = None
    top_k: Literal[-1, 0] | None = None
    min_p: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    # Ignored.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """What is shared is found by content."""
    prompt_cache_retention: str | None = None

    @property
    def _count(self) -> int:
        """Prompts."""
        return 1

    @property
    def answers(self) -> int:
        """That are asked for."""
        return (self.n or 1) * self._count

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(_Ask):
    """Of /v1/completions."""

    prompt: _Prompt
    """A text, texts, the ids of one or of several."""
    suffix: str | None = None
    """Text after the answer; then max_tokens are filled between, all of them."""
    max_tokens: int | None = Field(default=None, ge=1, le=2**20)
    prefix_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Tokens of each prompt that other requests share, 0: none; unset: as many as are found."""
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    logprobs: Literal[False] | None = None

    @property
    def _count(self) -> int:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return 1 if one else len(self.prompt)


class Part(_Strict):
    """Of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | list[Part], _must('a text, or a list of parts {"type": "text", "text": TEXT}')
    ]
    name: str | None = None
    """Ignored."""

    # What an answer's message has beside its content, as clients send it back.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: _Nothing = None
    tool_calls: _Nothing = None

    def plain(self) -> dict[str, str]:
        """As chat templates read it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(_Ask):
    """Of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=256)
    max_tokens: int | None = Field(default=None, ge=1, le=2**20)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**20)
    """The same, as newer clients write it."""
    prefix_messages: int | None = Field(default=None, ge=0, le=256)
    """Messages from the first on that other requests share; unset: all before the last of the
    user's."""
    tools: _Nothing = None
    parallel_tool_calls: bool | None = None
    """Ignored: there are none."""
    modalities: list[Literal["text"]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
