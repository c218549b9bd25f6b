# SPDX-License-Identifier: Apache-2.0
"""The byte-level BPE tokenizer of a folder without a tokenizer.json, as Dream's: vocab.json,
merges.txt and the added tokens of tokenizer_config.json.

Invariant: ids are the files'. These do not say how text is cut before merges apply: the name of the
tokenizer's class does, and a class that is not known here gives no tokenizer.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from geojax.config.base import ConfigError, require
from geojax.models.weights.special import read_tokenizer_config, token_text

if TYPE_CHECKING:
    import tokenizers

_QWEN2 = ("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast")
_GPT2 = ("GPT2Tokenizer", "GPT2TokenizerFast")
# Contractions, words with the sign before them, single digits, signs, blanks.
_QWEN2_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_bpe(folder: Path) -> "tokenizers.Tokenizer | None":
    """None where a file is missing, or the tokenizer is of a class that is not known here.

    ConfigError where a file is damaged.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as cuts

    folder = Path(folder)
    named = read_tokenizer_config(folder)
    kind = named.get("tokenizer_class")
    files = [folder / name for name in ("vocab.json", "merges.txt")]
    if kind not in (*_QWEN2, *_GPT2) or not all(file.is_file() for file in files):
        return None
    ids = _vocabulary(files[0])
    added = (named.get("added_tokens_decoder") or {}).items()
    for number, entry in sorted((int(number), entry) for number, entry in added):
        text = str(token_text(entry))
        require(
            ids.setdefault(text, number) == number,
            f"{folder}: token {text!r} is {ids[text]} in vocab.json and {number} in "
            "tokenizer_config.json; fetch both again",
        )
    require(
        len(set(ids.values())) == len(ids),
        f"{folder}: several tokens of vocab.json and tokenizer_config.json have one id; fetch both "
        "again",
    )
    try:
        inner = Tokenizer(models.BPE(ids, _merges(files[1])))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{folder}: its tokenizer cannot be made: {error}") from error
    inner.pre_tokenizer = cuts.ByteLevel(add_prefix_space=False)
    if kind in _QWEN2:
        inner.normalizer = normalizers.NFC()
        raw = cuts.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = cuts.Sequence([cuts.Split(Regex(_QWEN2_CUTS), "isolated"), raw])
    inner.decoder = decoders.ByteLevel()
    for _, entry in added:
        how = entry if isinstance(entry, dict) else {}
        flags = {
            name: bool(how.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized")
        }
        special = bool(how.get("special"))
        add = inner.add_special_tokens if special else inner.add_tokens
        add([AddedToken(str(token_text(entry)), special=special, **flags)])
    return inner


def _vocabulary(file: Path) -> dict[str, int]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be used: {error}; fetch it again") from error
    good = isinstance(found, dict) and all(type(i) is int and i >= 0 for i in found.values())
    require(good, f"{file} is not an object of ids by their tokens; fetch it again")
    return found


def _merges(file: Path) -> list[tuple[str, str]]:
    """Two halves a line, after a line that names the format's version."""
    try:
        lines = file.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be used: {error}; fetch it again") from error
    halves = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not (number == 1 and line.startswith("#version")):
            parts = line.rstrip("\r").split(" ")
            require(len(parts) == 2, f"{file}:{number} {line!r} is not two tokens; fetch it again")
            halves.append((parts[0], parts[1]))
    return halves
