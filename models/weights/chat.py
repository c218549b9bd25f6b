# SPDX-License-Identifier: Apache-2.0
"""Messages of a conversation as the text that a model was taught to answer.

Invariant: a template is a stranger's program; it runs where it can neither reach attributes of
Python's own nor change what it is given.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from geojax.config.base import ConfigError, require
from geojax.models.weights.special import read_special, read_tokenizer_config, token_text

Message = Mapping[str, str]
"""`role` (system, user, assistant) and `content`."""


def render_chat(folder: Path, messages: Sequence[Message], reply: bool = True) -> str:
    """`messages` as text by the template in `folder`, LLaDA's published one where a LLaDA's has
    none; with `reply` up to where the answer begins.

    Raises ConfigError where there is no template, or it refuses the messages.
    """
    return read_chat(folder)(messages, reply)


def read_chat(folder: Path) -> Callable[[Sequence[Message], bool], str]:
    """`render_chat` of a folder whose files are read now; ConfigError where it has no template."""
    template, tokens = read_special(folder).chat_template, _tokens(folder)
    if template is None:
        raise ConfigError(
            f"{folder} has no chat_template, neither in chat_template.jinja nor in "
            "tokenizer_config.json; use weights that were taught to chat, or write the prompt as "
            "plain text"
        )

    def render(messages: Sequence[Message], reply: bool) -> str:
        for i, message in enumerate(messages):
            require(
                isinstance(message.get("role"), str) and isinstance(message.get("content"), str),
                f"message {i} {dict(message)!r} must have a role and a content, both text",
            )
        return render_template(template, messages, reply, tokens, str(folder))

    return render


def render_template(
    template: str, messages: Sequence[Message], reply: bool, tokens: Mapping[str, str], where: str
) -> str:
    """`messages` by a Jinja template that may use `tokens` (bos_token, ...) by name.

    Blocks are trimmed, and loop controls, `raise_exception`, `strftime_now` and plain `tojson` are
    there, as in the library that such templates are written for.
    """
    variables: dict[str, Any] = {"messages": messages, "add_generation_prompt": reply}
    variables |= {"raise_exception": _refuse, "strftime_now": _now, "tools": None, **tokens}
    try:
        return _compiled(template).render(variables)
    except Exception as error:  # whatever a stranger's program runs into
        raise ConfigError(f"{where}: the chat template failed: {error}") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False)


def _tokens(folder: Path) -> dict[str, str]:
    """Texts of the special tokens by name."""
    named = read_tokenizer_config(folder)
    texts = {key: token_text(value) for key, value in named.items() if key.endswith("_token")}
    return {key: text for key, text in texts.items() if isinstance(text, str)}
