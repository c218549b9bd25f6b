# SPDX-License-Identifier: Apache-2.0
"""What a run trained, for whoever uses it afterwards."""

from pathlib import Path
from typing import Any

from geojax.config import RunConfig
from geojax.config.files import read_config
from geojax.data import TaskSet, Tokenizer, cache_dir, read_tokenizer
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Params
from geojax.models.weights import SpecialTokens
from geojax.models.weights import read_config as read_weights_config
from geojax.models.weights.special import TOKENIZER
from geojax.train.checkpoint import read_params


def read_run(folder: Path | str) -> tuple[RunConfig, Params, SpecialTokens, Tokenizer | None]:
    """Config, parameters, special tokens and tokenizer of a run, from its newest checkpoint and
    cached text; no tokenizer where the text is no longer there, or there was none."""
    folder = Path(folder)
    config = read_config(folder / "config.json")
    params, meta = read_params(folder)
    if config.data.source.kind == "tasks":
        return config, params, SpecialTokens(mask=TaskSet.mask_id, eos=TaskSet.eos_id), None
    path = tokenizer_path(meta)
    if not path.is_file():
        return config, params, SpecialTokens(), None
    tokenizer = read_tokenizer(path)
    mask = None if config.model.causal else tokenizer.mask_id
    return config, params, SpecialTokens(mask=mask, eos=tokenizer.eos_id), tokenizer


def is_run(folder: Path) -> bool:
    """Whether the folder is a run's; else it may hold weights."""
    return (folder / "metrics.jsonl").is_file()


def model_config(folder: Path) -> TransformerConfig:
    """Of the model in a run folder or in one of weights; ConfigError where there is none."""
    if is_run(folder):
        return read_config(folder / "config.json").model
    return read_weights_config(folder)


def tokenizer_path(meta: dict[str, Any]) -> Path:
    """The file of a run's tokenizer, by its checkpoint's facts; it may be gone from the cache."""
    return cache_dir() / "corpora" / meta["corpus"] / TOKENIZER
