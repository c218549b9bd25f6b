# SPDX-License-Identifier: Apache-2.0
"""Ids that mean something to a model beside its text, and ids that it must never write.

Invariant: an id is what the checkpoint's own files say, else what the model is published with where
the vocabulary is the published one, else None; it always lies in the vocabulary.
"""

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool

from geojax.config.base import ConfigError, require

if TYPE_CHECKING:
    import tokenizers

TOKENIZER = "tokenizer.json"
_NAMES = ("mask", "eos", "pad", "bos")


@dataclass(frozen=True)
class SpecialTokens:
    """What a checkpoint says of its special tokens."""

    mask: int | None = None
    """Stands where a token is still to be found."""
    eos: int | None = None
    """Ends a text; the first where there are several."""
    pad: int | None = None
    bos: int | None = None
    undecodable: tuple[tuple[int, int], ...] = ()
    """(first, last + 1) of ids that are in the model's vocabulary, but not in the tokenizer's."""
    chat_template: str | None = None
    """Jinja that makes text of messages."""

    def ids(self) -> dict[str, int]:
        """The ids that there are, by their keys in config.json."""
        found = {f"{name}_token_id": getattr(self, name) for name in _NAMES}
        return {key: value for key, value in found.items() if value is not None}


# By model_type: the vocabulary that it is published with, and its ids.
_PUBLISHED = {
    "llada": (
        126_464,
        SpecialTokens(126_336, 126_081, 126_081, 126_080, ((126_349, 126_464),)),
    ),
    "Dream": (
        152_064,
        SpecialTokens(151_666, 151_643, 151_643, 151_643, ((151_667, 152_064),)),
    ),
}
LLADA_CHAT_TEMPLATE = (
    "{{ bos_token or '<|startoftext|>' }}{% for message in messages %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Gives the text that LLaDA's published one gives."""


def read_special(folder: Path) -> SpecialTokens:
    """Of a checkpoint's folder: config.json, then generation_config.json, then the tokens that
    tokenizer_config.json names, by the ids of tokenizer.json.

    Raises ConfigError where a file is damaged or an id lies outside of the vocabulary.
    """
    folder = Path(folder)
    config, named = _read(folder / "config.json"), read_tokenizer_config(folder)
    vocab_size = config.get("embedding_size") or config.get("vocab_size") or 0
    size, published = _PUBLISHED.get(str(config.get("model_type")), (0, SpecialTokens()))
    if size != vocab_size:
        published = SpecialTokens()
    sources = [config, _read(folder / "generation_config.json")]
    vocabulary = _vocabulary(folder / TOKENIZER)
    added = named.get("added_tokens_decoder") or {}
    ids = vocabulary | {str(token_text(entry)): int(number) for number, entry in added.items()}
    found = {}
    for name in _NAMES:
        given = (_first(source.get(f"{name}_token_id")) for source in sources)
        value = next((x for x in given if x is not None), None)
        if value is None:
            value = ids.get(token_text(named.get(f"{name}_token")) or "")
        found[name] = getattr(published, name) if value is None else value
        require(
            found[name] is None or (type(found[name]) is int and 0 <= found[name] < vocab_size),
            f"{folder}: {name}_token_id {found[name]!r} is no id of the vocabulary of "
            f"{vocab_size}; correct it in config.json",
        )
    undecodable = published.undecodable
    if vocabulary:
        undecodable = _gaps(set(ids.values()), vocab_size)
    template = chat_template(folder, named)
    if template is None and config.get("model_type") == "llada":
        template = LLADA_CHAT_TEMPLATE
    return replace(published, **found, undecodable=undecodable, chat_template=template)


def forbidden_ids(
    special: SpecialTokens, tokenizer: "tokenizers.Tokenizer | None", vocab_size: int
) -> Bool[np.ndarray, "vocab_size"]:
    """Which ids a sampler must not pick: the mask, and what the tokenizer cannot decode."""
    forbidden = np.zeros(vocab_size, bool)
    if special.mask is not None:
        forbidden[special.mask] = True
    ranges = special.undecodable
    if tokenizer is not None:
        known = set(tokenizer.get_vocab(with_added_tokens=True).values())
        ranges = (*ranges, *_gaps(known, vocab_size))
    for first, end in ranges:
        forbidden[first:end] = True
    return forbidden


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """`folder`/tokenizer_config.json; empty where there is none. ConfigError where what is read of
    it here, tokens and templates, has another form."""
    path = Path(folder) / "tokenizer_config.json"
    found = _read(path)
    added = found.get("added_tokens_decoder") or {}
    forms = {
        "added_tokens_decoder": (
            isinstance(added, dict)
            and all(key.isdecimal() and _is_token(entry) for key, entry in added.items()),
            "an object of tokens by their ids",
        ),
        "chat_template": (
            _is_template(found.get("chat_template")),
            "text, or a list of named ones",
        ),
    }
    for name in _NAMES:
        entry = found.get(f"{name}_token")
        forms[f"{name}_token"] = (entry is None or _is_token(entry), "a token")
    for key, (good, form) in forms.items():
        value = repr(found.get(key))
        value = value if len(value) < 80 else f"{value[:77]}..."
        require(good, f"{path}: {key} {value} is not {form}; fetch the file again, or correct it")
    return found


def _is_token(entry: Any) -> bool:
    return isinstance(entry.get("content") if isinstance(entry, dict) else entry, str)


def _is_template(found: Any) -> bool:
    if not isinstance(found, list):
        return found is None or isinstance(found, str)
    return all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in found
    )


def token_text(entry: Any) -> str | None:
    """A token in tokenizer_config.json: its text, or an object with it."""
    return entry.get("content") if isinstance(entry, dict) else entry


def chat_template(folder: Path, named: dict[str, Any]) -> str | None:
    """The template of a folder: a file of its own, or in its tokenizer_config.json, where of
    several it is the one named default; None where there is none. ConfigError where the file is no
    text."""
    file = Path(folder) / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is not UTF-8 text: {error}; fetch it again") from error
    template = named.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be used: {error}; fetch it again") from error
    require(isinstance(found, dict), f"{path} is not a JSON object; fetch it again")
    return found


def _first(value: Any) -> Any:
    """The one that counts; some files say -1 where there is none."""
    value = value[0] if isinstance(value, list) and value else value
    return None if value == -1 else value


def _vocabulary(path: Path) -> dict[str, int]:
    """Tokens of a tokenizer.json; empty where there is none."""
    if not path.is_file():
        return {}
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path} is not a tokenizer.json of `tokenizers`: {error}") from error
    return tokenizer.get_vocab(with_added_tokens=True)


def _gaps(known: set[int], vocab_size: int) -> tuple[tuple[int, int], ...]:
    """Ranges of ids that are not `known`."""
    edges = [-1, *sorted(i for i in known if i < vocab_size), vocab_size]
    return tuple((low + 1, high) for low, high in pairwise(edges) if high > low + 1)
