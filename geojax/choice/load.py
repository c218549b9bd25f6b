# SPDX-License-Identifier: Apache-2.0
"""A model to be scored, with its text, from a run or from converted weights."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from geojax.choice.likelihood import LogLikelihood, autoregressive, masked
from geojax.choice.pairs import Pair, encode
from geojax.choice.rows import BATCH_TOKENS
from geojax.config import files, require
from geojax.convert import TOKENIZER
from geojax.data import Tokenizer, read_tokenizer
from geojax.diffusion.load import DTYPES, find_tokenizer, revision
from geojax.diffusion.load import Model as DiffusionModel
from geojax.diffusion.load import load as load_diffusion
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Params
from geojax.models.weights import load_safetensors, read_config, read_special
from geojax.train.checkpoint import read_params
from geojax.trained import tokenizer_path

SAMPLES = 32


@dataclass(frozen=True)
class Subject:
    """A model with a tokenizer."""

    config: TransformerConfig
    params: Params
    tokenizer: Tokenizer
    empty: int
    """Stands in place of a context without text: begin-of-text, else end-of-text."""
    diffusion: DiffusionModel | None
    """Of a model that fills masks."""

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """Ids of (context, continuation); before them what the tokenizer begins every text with."""
        begin = self.tokenizer.inner.encode("", add_special_tokens=True).ids
        return encode(texts, self.tokenizer, begin, self.empty)

    def likelihood(self, samples: int = 0, batch_tokens: int = BATCH_TOKENS) -> LogLikelihood:
        """How the model scores pairs; `samples` (0: 32) are of masks, ConfigError for others."""
        require(batch_tokens >= 1, f"batch_tokens {batch_tokens} must be at least 1")
        kind = jax.tree.leaves(self.params)[0].dtype
        if self.diffusion:
            mask = self.diffusion.mask_id
            return masked(self.config, self.params, mask, samples or SAMPLES, kind, batch_tokens)
        require(
            not samples,
            f"samples {samples} are of masks, and a causal {self.config.family} has none; leave "
            "them unset",
        )
        return autoregressive(self.config, self.params, kind, batch_tokens)

    def fingerprint(self) -> str:
        """Names the model and its tokenizer: 16 hex digits of the SHA-256 of the shape, of all
        parameters, and of the tokenizer."""
        parts = (self.config, self.tokenizer.fingerprint, revision(self.params))
        return hashlib.sha256("".join(map(str, parts)).encode()).hexdigest()[:16]


def load_subject(folder: Path, dtype: str = "float32") -> Subject:
    """The causal or diffusion model in a run folder, or in one that `geojax convert` wrote, its
    parameters in `dtype` on the default device.

    ConfigError where there is none, it has no tokenizer, or it is a bert.
    """
    require(dtype in DTYPES, f"dtype {dtype!r} is none of {list(DTYPES)}")
    kind = DTYPES[dtype]
    folder = folder.expanduser()
    require(folder.is_dir(), f"{folder} is not a folder; name that of a run or of weights")
    is_run = (folder / "metrics.jsonl").is_file()
    run = files.read_config(folder / "config.json") if is_run else None
    require(
        run is None or run.data.source.kind != "tasks",
        f"{folder} was trained on generated tasks, which have no text; score it by `geojax eval "
        f"{folder}`, or name a model of text",
    )
    config = run.model if run else read_config(folder)
    require(
        config.family != "bert",
        f"{folder} holds a bert, which fills few masks at a time and gives no likelihood of a "
        "text; name a causal model, or one of masked diffusion",
    )
    model = None
    if not config.causal:
        model = load_diffusion(folder, kind)
        params = model.params
        tokenizer = _of_run(model) if is_run else _of_weights(folder)
    elif is_run:
        params, meta = read_params(folder)
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, kind), params)
        tokenizer = _tokenizer(tokenizer_path(meta))
    else:
        tokenizer = _of_weights(folder)
        params = load_safetensors(folder, config, kind, place=lambda _, leaf: jnp.asarray(leaf))
    begin = None if is_run else read_special(folder).bos
    return Subject(config, params, tokenizer, tokenizer.eos_id if begin is None else begin, model)


def _tokenizer(path: Path) -> Tokenizer:
    require(
        path.is_file(),
        f"{path}, the model's tokenizer, is not there; put it beside its weights, or make a run's "
        "again with `geojax data` and the run's settings",
    )
    return read_tokenizer(path)


def _of_weights(folder: Path) -> Tokenizer:
    return find_tokenizer(folder) or _tokenizer(folder / TOKENIZER)


def _of_run(model: DiffusionModel) -> Tokenizer:
    assert model.tokenizer is not None, "every run has a text"
    assert model.special.eos is not None, "and documents that end"
    return Tokenizer(model.tokenizer, model.special.eos)
