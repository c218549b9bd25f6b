# SPDX-License-Identifier: Apache-2.0
"""Corpora: a source tokenised ahead of time, as two memory-mapped token streams.

Invariant: a corpus folder exists whole or not at all, its name follows from the documents, the
tokenizer and the split, and which side a document is on depends on its text and `valid_fraction`
alone. A stream is every document's ids followed by end-of-text, in the order of the source; tokens
are masked when it is read, so that runs with and without masking share a corpus.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt

from geojax.config import ConfigError, DataConfig, MaskingConfig, require
from geojax.data.sources import atomic, iter_documents
from geojax.data.tokenizer import Tokenizer, load_tokenizer, read_tokenizer, tokenizer_key

FORMAT = 1  # raised when the same settings would give another stream
_DOCUMENTS_A_CALL = 4096


@dataclass(frozen=True)
class Corpus:
    """Token streams of the two splits, and what is known of them."""

    folder: Path
    seq_len: int
    """Tokens of a sequence, of the config that this corpus was prepared for."""
    train: UInt[np.ndarray, "_"]
    valid: UInt[np.ndarray, "_"]
    train_documents: int
    valid_documents: int
    text_bytes: int
    """UTF-8 bytes of both splits."""
    vocab_size: int
    """Entries of the tokenizer; the model may have more."""
    eos_id: int
    tokenizer_fingerprint: str
    masking: MaskingConfig | None = None
    """Of the config that this corpus was prepared for."""

    @property
    def sequences(self) -> int:
        """Training sequences an epoch; the last one's targets end within the stream."""
        return (len(self.train) - 1) // self.seq_len

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        return read_tokenizer(self.folder / "tokenizer.json")

    @cached_property
    def mask_id(self) -> int:
        """Id that hides a token; beyond `vocab_size` where the tokenizer has no mask token."""
        return self.tokenizer().mask_id

    @cached_property
    def ordinary(self) -> Bool[np.ndarray, "vocab_size"]:
        """Whether an id stands for text, so that it may be masked, and may replace another."""
        return self.tokenizer().ordinary

    def require_batch(self, batch: int) -> None:
        """Raise ConfigError where one epoch is shorter than a batch of `batch` sequences."""
        require(
            self.sequences >= batch,
            f"the corpus holds {self.sequences} training sequences of data.seq_len {self.seq_len}, "
            f"fewer than one batch of {batch}; lower balance.batch_sizes or data.seq_len, or add "
            "text",
        )


def cache_dir() -> Path:
    """Where packages, tokenizers and corpora are kept: GEOJAX_CACHE, or ~/.cache/geojax."""
    return Path(os.environ.get("GEOJAX_CACHE") or "~/.cache/geojax").expanduser()


def prepare(
    config: DataConfig,
    vocab_size: int,
    cache: Path | None = None,
    progress: Callable[[str], None] | None = None,
    known: str | None = None,
) -> Corpus:
    """The corpus of `config` for a model of `vocab_size` entries, from `cache` where it is there.

    `progress` receives a line for each slow step. `known`: identity of a corpus made before, which
    is taken without a look at its source if the cache still holds it. Raises ConfigError when the
    source or tokenizer cannot be used, a split is empty, training text is shorter than one
    sequence, or the tokenizer, with its mask token where text is masked, has more entries than the
    model.
    """
    cache = cache or cache_dir()
    progress = progress or (lambda line: None)
    if known and (cache / "corpora" / known).is_dir():
        return _load(cache / "corpora" / known, config)
    progress(f"reading {config.source.kind}")
    try:
        folder = cache / "corpora" / _fingerprint(config, cache)
        if not folder.exists():
            _write(folder, config, vocab_size, cache, progress)
    except OSError as error:
        raise ConfigError(
            f"cache {cache} cannot be used: {error}; set GEOJAX_CACHE to a folder with space that "
            "can be written"
        ) from error
    corpus = _load(folder, config)
    _require_vocab(corpus, vocab_size, config)
    require(
        corpus.sequences >= 1,
        f"the training split has {len(corpus.train)} tokens, fewer than one sequence of "
        f"data.seq_len {config.seq_len} and its last target; lower data.seq_len or add text",
    )
    return corpus


def _place(text: str) -> float:
    """Where a document falls in [0, 1); validation lies below `valid_fraction`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def _fingerprint(config: DataConfig, cache: Path) -> str:
    """Read the source once: check that both splits have documents, and name the corpus."""
    digest = hashlib.sha256(
        f"{FORMAT} {tokenizer_key(config.tokenizer)} {config.valid_fraction}".encode()
    )
    places = []
    for text in iter_documents(config.source, cache):
        digest.update(hashlib.sha256(text.encode()).digest())
        places.append(_place(text))
    require(places, f"data.source {config.source.kind!r} holds no documents; add text")
    distinct = sorted(set(places))
    require(
        len(distinct) > 1,
        f"data.source {config.source.kind!r} holds one document, which cannot be split for "
        "validation; separate documents by blank lines (a text file is split there), or add text",
    )
    held_out = sum(place < config.valid_fraction for place in places)
    require(
        0 < held_out < len(places),
        f"data.valid_fraction {config.valid_fraction} holds out {held_out} of {len(places)} "
        f"documents; use {_between(distinct):.6g}, or add text",
    )
    return digest.hexdigest()[:16]


def _between(places: list[float]) -> float:
    """A fraction that parts sorted distinct `places`: near a tenth of them are below it."""
    first = max(len(places) // 10, 1)
    return (places[first - 1] + places[first]) / 2


def _documents(config: DataConfig, cache: Path, valid: bool) -> Iterator[str]:
    for text in iter_documents(config.source, cache):
        if (_place(text) < config.valid_fraction) == valid:
            yield text


def _write(
    folder: Path,
    config: DataConfig,
    vocab_size: int,
    cache: Path,
    progress: Callable[[str], None],
) -> None:
    progress(f"making the {config.tokenizer.kind} tokenizer")
    tokenizer = load_tokenizer(
        config.tokenizer, partial(_documents, config, cache, valid=False), cache
    )
    _require_vocab(tokenizer, vocab_size, config)
    # Every id is below the tokenizer's vocab_size, so none can wrap around.
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    meta: dict[str, Any] = {
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "text_bytes": 0,
    }
    with atomic(folder) as temporary:
        temporary.mkdir()
        tokenizer.save(temporary / "tokenizer.json")
        for split in ("train", "valid"):
            documents = tokens = 0
            with (temporary / f"{split}.bin").open("wb") as file:
                texts = _documents(config, cache, valid=split == "valid")
                for group in batched(texts, _DOCUMENTS_A_CALL):
                    for ids in tokenizer.encode_batch(list(group)):
                        file.write(np.append(ids, tokenizer.eos_id).astype(dtype).tobytes())
                        tokens += len(ids) + 1
                    documents += len(group)
                    meta["text_bytes"] += sum(len(text.encode()) for text in group)
                    progress(f"tokenising {split}: {documents:,} documents, {tokens:,} tokens")
            meta |= {f"{split}_documents": documents, f"{split}_tokens": tokens}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def _load(folder: Path, config: DataConfig) -> Corpus:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        dtype = meta.pop("dtype")
        streams = {}
        for split in ("train", "valid"):
            streams[split] = np.memmap(folder / f"{split}.bin", dtype, mode="r")
            if len(streams[split]) != meta.pop(f"{split}_tokens"):
                raise ValueError(f"{split}.bin has another length than meta.json says")
        return Corpus(
            folder=folder,
            seq_len=config.seq_len,
            train=streams["train"],
            valid=streams["valid"],
            masking=config.masking,
            **meta,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"corpus {folder} is damaged ({error}); delete the folder and run again"
        ) from error


def _require_vocab(ids: Tokenizer | Corpus, model_size: int, config: DataConfig) -> None:
    needed = max(ids.vocab_size, ids.mask_id + 1) if config.masking else ids.vocab_size
    mask = f" and no mask token, which takes id {needed - 1}" if needed > ids.vocab_size else ""
    require(
        needed <= model_size,
        f"the tokenizer has ids up to {ids.vocab_size - 1}{mask}, beyond model.vocab_size "
        f"{model_size}; set model.vocab_size to at least {needed}, or choose a smaller tokenizer",
    )
