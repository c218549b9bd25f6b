# SPDX-License-Identifier: Apache-2.0
"""Corpora: a source tokenised ahead of time, as two memory-mapped token streams.

Invariant: a corpus folder exists whole or not at all, its name follows from the documents, the
tokenizer and the split, and which side a document is on depends on its text, or its prompt where it
has one, and `valid_fraction` alone. A stream is every document's ids, those of its prompt first,
followed by end-of-text, in the order of the source; tokens are masked when it is read, so that runs
with and without masking share a corpus.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import batched
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int64, UInt

from geojax.config import ConfigError, DataConfig, MaskingConfig, require
from geojax.data.sources import Document, atomic, iter_documents
from geojax.data.splits import Examples, Split, Stream
from geojax.data.task_set import TaskSet, prepare_tasks
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
    train_examples: Int64[np.ndarray, "_ 3"] | None = None
    """Where each document, its answer and its end lie, if documents have prompts."""
    valid_examples: Int64[np.ndarray, "_ 3"] | None = None
    own_mask: int | None = None
    """The mask of the model that it was prepared for, where that has one of its own."""

    @property
    def sequences(self) -> int:
        """Training sequences an epoch; the last one's targets end within the stream."""
        return self.split("train", self.seq_len).sequences

    def split(self, name: Literal["train", "valid"], seq_len: int) -> Split:
        """Its sequences. Under diffusion, end-of-text follows an answer to the sequence's end."""
        tokens = self.train if name == "train" else self.valid
        examples = self.train_examples if name == "train" else self.valid_examples
        if examples is None:
            return Stream(tokens, seq_len, partial=name == "valid")
        filled = self.masking is not None and self.masking.kind == "diffusion"
        return Examples(tokens, examples, seq_len, self.eos_id if filled else None)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        return read_tokenizer(self.folder / "tokenizer.json")

    @cached_property
    def mask_id(self) -> int:
        """Id that hides a token; beyond `vocab_size` where the tokenizer has no mask token."""
        return self.tokenizer().mask_id if self.own_mask is None else self.own_mask

    @cached_property
    def ordinary(self) -> Bool[np.ndarray, "vocab_size"]:
        """Whether an id stands for text, so that it may be masked, and may replace another."""
        ordinary = self.tokenizer().ordinary
        return ordinary & (np.arange(len(ordinary)) != self.mask_id)

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
    mask_id: int | None = None,
) -> Corpus | TaskSet:
    """The corpus of `config` for a model of `vocab_size` entries, from `cache` where it is there.

    `progress` receives a line for each slow step. `known`: identity of a corpus made before, which
    is taken without a look at its source if the cache still holds it. `mask_id`: the model's, where
    not the tokenizer says it. Raises ConfigError when the
    source or tokenizer cannot be used, a split is empty, training text is shorter than one
    sequence, or the tokenizer, with its mask token where text is masked, has more entries than the
    model.
    """
    if config.source.kind == "tasks":
        return prepare_tasks(config.seq_len, config.masking, vocab_size)
    cache = cache or cache_dir()
    progress = progress or (lambda line: None)
    if known and (cache / "corpora" / known).is_dir():
        return _load(cache / "corpora" / known, config, mask_id)
    progress(f"reading {config.source.kind}")
    try:
        folder = cache / "corpora" / _fingerprint(config, cache)
        if not folder.exists():
            _write(folder, config, vocab_size, cache, progress, mask_id)
    except OSError as error:
        raise ConfigError(
            f"cache {cache} cannot be used: {error}; set GEOJAX_CACHE to a folder with space that "
            "can be written"
        ) from error
    corpus = _load(folder, config, mask_id)
    _require_vocab(corpus, vocab_size, config, mask_id)
    _require_whole(corpus, config)
    require(
        corpus.sequences >= 1,
        f"the training split has {len(corpus.train)} tokens, fewer than one sequence of "
        f"data.seq_len {config.seq_len} and its last target; lower data.seq_len or add text",
    )
    return corpus


def _place(document: Document) -> float:
    """Where a document falls in [0, 1); validation lies below `valid_fraction`. All answers to one
    prompt are on one side."""
    decides = document.prompt or document.text
    return int.from_bytes(hashlib.sha256(decides.encode()).digest()[:6], "big") / 2**48


def _whole(document: Document) -> str:
    """What the tokenizer is trained on, and what names a corpus."""
    return f"{document.prompt}\0{document.text}" if document.prompt else document.text


def _fingerprint(config: DataConfig, cache: Path) -> str:
    """Read the source once: check that both splits have documents, and name the corpus."""
    digest = hashlib.sha256(
        f"{FORMAT} {tokenizer_key(config.tokenizer)} {config.valid_fraction}".encode()
    )
    if config.source.prompt_field:
        digest.update(b"examples")
    places = []
    for document in iter_documents(config.source, cache):
        digest.update(hashlib.sha256(_whole(document).encode()).digest())
        places.append(_place(document))
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


def _documents(config: DataConfig, cache: Path, valid: bool) -> Iterator[Document]:
    for document in iter_documents(config.source, cache):
        if (_place(document) < config.valid_fraction) == valid:
            yield document


def _texts(config: DataConfig, cache: Path) -> Iterator[str]:
    """Of the training split."""
    for document in _documents(config, cache, valid=False):
        yield from filter(None, (document.prompt, document.text))


def _write(
    folder: Path,
    config: DataConfig,
    vocab_size: int,
    cache: Path,
    progress: Callable[[str], None],
    mask_id: int | None,
) -> None:
    progress(f"making the {config.tokenizer.kind} tokenizer")
    tokenizer = load_tokenizer(config.tokenizer, partial(_texts, config, cache), cache)
    _require_vocab(tokenizer, vocab_size, config, mask_id)
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
            places, tokens = list[tuple[int, int, int]](), 0
            with (temporary / f"{split}.bin").open("wb") as file:
                texts = _documents(config, cache, valid=split == "valid")
                for group in batched(texts, _DOCUMENTS_A_CALL):
                    prompts = tokenizer.encode_batch([document.prompt for document in group])
                    answers = tokenizer.encode_batch([document.text for document in group])
                    for prompt, answer in zip(prompts, answers, strict=True):
                        ids = np.concatenate([prompt, answer, [tokenizer.eos_id]])
                        file.write(ids.astype(dtype).tobytes())
                        places.append((tokens, tokens + len(prompt), tokens + len(ids)))
                        tokens += len(ids)
                    meta["text_bytes"] += sum(
                        len(d.prompt.encode() + d.text.encode()) for d in group
                    )
                    progress(f"tokenising {split}: {len(places):,} documents, {tokens:,} tokens")
            if config.source.prompt_field:
                np.save(temporary / f"{split}_examples.npy", np.array(places, np.int64))
            meta |= {f"{split}_documents": len(places), f"{split}_tokens": tokens}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def _load(folder: Path, config: DataConfig, mask_id: int | None) -> Corpus:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        dtype = meta.pop("dtype")
        streams, examples = {}, {}
        for split in ("train", "valid"):
            streams[split] = np.memmap(folder / f"{split}.bin", dtype, mode="r")
            if len(streams[split]) != meta.pop(f"{split}_tokens"):
                raise ValueError(f"{split}.bin has another length than meta.json says")
            if config.source.prompt_field:
                examples[f"{split}_examples"] = np.load(folder / f"{split}_examples.npy")
        return Corpus(
            folder=folder,
            seq_len=config.seq_len,
            train=streams["train"],
            valid=streams["valid"],
            masking=config.masking,
            own_mask=mask_id,
            **examples,
            **meta,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"corpus {folder} is damaged ({error}); delete the folder and run again"
        ) from error


def _require_whole(corpus: Corpus, config: DataConfig) -> None:
    """No example is cut: what it ends in may be what matters."""
    for split in (corpus.train_examples, corpus.valid_examples):
        if split is not None:
            lengths = split[:, 2] - split[:, 0]
            longest = int(lengths.argmax())
            require(
                lengths[longest] <= config.seq_len,
                f"example {longest} has {lengths[longest]} tokens with its prompt and end-of-text, "
                f"more than data.seq_len {config.seq_len} ({np.sum(lengths > config.seq_len)} of "
                f"{len(lengths)} have); set data.seq_len to {lengths[longest]}, or leave long ones "
                "out of the data",
            )


def _require_vocab(
    ids: Tokenizer | Corpus, model_size: int, config: DataConfig, mask_id: int | None
) -> None:
    mask_id = ids.mask_id if mask_id is None else mask_id
    needed = max(ids.vocab_size, mask_id + 1) if config.masking else ids.vocab_size
    mask = f" and no mask token, which takes id {needed - 1}" if needed > ids.vocab_size else ""
    require(
        needed <= model_size,
        f"the tokenizer has ids up to {ids.vocab_size - 1}{mask}, beyond model.vocab_size "
        f"{model_size}; set model.vocab_size to at least {needed}, or choose a smaller tokenizer",
    )
