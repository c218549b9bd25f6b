# SPDX-License-Identifier: Apache-2.0
"""Text, tokenizer and sequences."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from geojax.config.base import STRICT, require


@dataclass(frozen=True)
class SourceConfig:
    """Where text comes from."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    kind: Literal["wiki", "pydoc", "files", "huggingface", "tasks"] = "wiki"
    """wiki: 10,033 Wikipedia extracts from a package; pydoc: Python's own documentation topics;
    files: the user's own; huggingface: a dataset, where `datasets` is installed; tasks: generated
    ones with one right answer (geojax.data.tasks), which need no tokenizer."""
    paths: tuple[str, ...] = ()
    """files: text files, .jsonl files, folders or globs."""
    text_field: str = "text"
    """Field that holds the text, in JSONL records and Hugging Face rows."""
    prompt_field: str = ""
    """Field that holds what the text is an answer to, and that is seen but never predicted; each
    record is then a sequence of its own. Empty: there is none."""
    dataset: str = ""
    """huggingface: name or local folder, as `datasets.load_dataset` takes it."""
    subset: str = ""
    """huggingface: configuration name."""
    split: str = "train"
    """huggingface: split."""

    def __post_init__(self):
        require(
            bool(self.paths) == (self.kind == "files"),
            f"data.source.paths {list(self.paths)} goes with data.source.kind 'files' and only "
            f"with it (kind is {self.kind!r}); set both or neither",
        )
        require(
            self.text_field == "text" or self.kind in ("files", "huggingface"),
            f"data.source.text_field {self.text_field!r} means nothing to kind {self.kind!r}; "
            "leave it unset",
        )
        require(
            not self.prompt_field or self.kind in ("files", "huggingface"),
            f"data.source.prompt_field {self.prompt_field!r} means nothing to kind {self.kind!r}; "
            "leave it unset",
        )
        require(
            not self.prompt_field or self.prompt_field != self.text_field,
            f"data.source.prompt_field and data.source.text_field are both {self.text_field!r}; "
            "name the field of the answer in text_field",
        )
        require(
            self.split == "train" or self.kind == "huggingface",
            f"data.source.split {self.split!r} goes with data.source.kind 'huggingface' only (kind "
            f"is {self.kind!r}); leave it unset",
        )
        require(
            not self.subset or self.kind == "huggingface",
            f"data.source.subset {self.subset!r} goes with data.source.kind 'huggingface' only "
            f"(kind is {self.kind!r}); leave it unset",
        )
        require(
            bool(self.dataset) == (self.kind == "huggingface"),
            f"data.source.dataset {self.dataset!r} goes with data.source.kind 'huggingface' and "
            f"only with it (kind is {self.kind!r}); set both or neither",
        )


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes tokens."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    kind: Literal["bpe", "gpt2", "file"] = "bpe"
    """bpe: byte-level BPE trained on the training split and cached; gpt2: GPT-2's, from its
    package; file: a `tokenizer.json` of the user."""
    vocab_size: int = 512
    """bpe: entries of the vocabulary, end-of-text included."""
    path: str = ""
    """file: the `tokenizer.json`."""

    def __post_init__(self):
        require(
            self.kind != "bpe" or 257 <= self.vocab_size <= 2**20,
            f"data.tokenizer.vocab_size {self.vocab_size} must lie in 257..1048576 (256 bytes and "
            "end-of-text come first)",
        )
        require(
            bool(self.path) == (self.kind == "file"),
            f"data.tokenizer.path {self.path!r} goes with data.tokenizer.kind 'file' and only with "
            f"it (kind is {self.kind!r}); set both or neither",
        )


@dataclass(frozen=True)
class MaskingConfig:
    """Tokens are hidden behind the mask token and predicted where they stand."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    kind: Literal["bert", "diffusion"] = "bert"
    """bert: a fixed share of a sequence (Devlin et al. 2019). diffusion: any number of its tokens
    alike, the loss weighted by their inverse share: a bound on the likelihood (Nie et al. 2025,
    "Large Language Diffusion Models")."""
    fraction: float = 0.15
    """bert: share of a sequence's tokens that are chosen, at least one; end-of-text never is."""
    keep: float = 0.1
    """bert: share of the chosen ones that stay as they are."""
    randomize: float = 0.1
    """bert: share of the chosen ones that become a token drawn from the vocabulary."""
    cut: float = 0.0
    """diffusion: share of the training sequences that are cut to a random length, so that the model
    learns lengths other than data.seq_len (0.01 there)."""

    def __post_init__(self):
        if self.kind == "diffusion":
            for name, default in (("fraction", 0.15), ("keep", 0.1), ("randomize", 0.1)):
                require(
                    getattr(self, name) == default,
                    f"data.masking.{name} {getattr(self, name)} means nothing to data.masking.kind "
                    "'diffusion'; leave it unset",
                )
        require(
            0 <= self.cut <= 1,
            f"data.masking.cut {self.cut} must lie in 0..1; use 0.01",
        )
        require(
            not self.cut or self.kind == "diffusion",
            f"data.masking.cut {self.cut} goes with data.masking.kind 'diffusion' only; leave it "
            "unset",
        )
        require(
            0 < self.fraction <= 1,
            f"data.masking.fraction {self.fraction} must be above 0 and at most 1; use 0.15",
        )
        for name in ("keep", "randomize"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"data.masking.{name} {value} must lie in 0..1; use 0.1")
        require(
            self.keep + self.randomize <= 1,
            f"data.masking.keep {self.keep} and data.masking.randomize {self.randomize} are shares "
            "of the same tokens and add up to more than 1; lower one",
        )


@dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer, and how tokens become sequences."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    source: SourceConfig = SourceConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    seq_len: int = 1024
    """Tokens of a sequence; each is predicted, unless `masking` chooses which."""
    masking: MaskingConfig | None = None
    """Hide tokens and predict those; unset: predict every token from the ones before it."""
    document_mask: bool = False
    """Documents packed into one sequence do not see each other: attention stops at their borders,
    positions restart, and the first token of a document is not predicted from the one before."""
    valid_fraction: float = 0.02
    """Share of documents held out; chosen by a hash of the document, so it never moves."""
    seed: int = 0
    """Order of the training sequences, and their masks."""

    def __post_init__(self):
        examples = self.source.prompt_field or self.source.kind == "tasks"
        require(
            not (self.document_mask and examples),
            "data.document_mask is of documents packed into one sequence, and examples are a "
            "sequence each; leave it unset",
        )
        require(self.seq_len >= 1, f"data.seq_len {self.seq_len} must be at least 1")
        require(
            0 < self.valid_fraction < 1,
            f"data.valid_fraction {self.valid_fraction} must lie between 0 and 1; use 0.02",
        )
        require(0 <= self.seed < 2**32, f"data.seed {self.seed} must lie in 0..{2**32 - 1}")
