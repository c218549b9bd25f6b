# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other formats to a folder that Hugging Face libraries and this package read.

Invariant: the target appears whole or not at all, and a tensor of the source is in it, unchanged
but for its type, or is named as left out; what is in it beside them changes no result.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from geojax.config import ConfigError, require
from geojax.data.sources import atomic
from geojax.models.config import TransformerConfig

TOKENIZER = "tokenizer.json"
# Beside the tokenizer, what that library looks for: templates, special tokens, sampling, and the
# parts of a tokenizer that has no file of its own, as Dream's, of which one is made.
_COMPANIONS = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


@dataclass(frozen=True)
class Converted:
    """What was written."""

    config: TransformerConfig
    tensors: int
    weight_bytes: int
    tokenizer: bool
    """Whether there is a tokenizer.json; its source may have had none."""


def convert(
    source: Path,
    target: Path,
    dtype: str = "float32",
    max_shard_bytes: float = 5e9,
    progress: Callable[[str], None] | None = None,
) -> Converted:
    """Write the model at `source` as safetensors, config.json and tokenizer.json into `target`.

    `source` is a run folder, a folder of a Hugging Face checkpoint (safetensors) or a GGUF file;
    `target` must be new or empty; `dtype` is float32 or bfloat16. The parameters are held in
    float32 meanwhile. `progress` receives a line for each slow step and for what is left out.
    Raises ConfigError where the source cannot be used.
    """
    from geojax.models.weights import (
        DTYPES,
        SpecialTokens,
        file_shapes,
        huggingface_tensors,
        load_safetensors,
        read_config,
        read_gguf,
        read_special,
        save_safetensors,
    )
    from geojax.models.weights.bpe_files import read_bpe
    from geojax.trained import read_run

    progress = progress or (lambda line: None)
    source, target = source.expanduser(), target.expanduser()
    require(dtype in DTYPES, f"dtype {dtype!r} cannot be written; use {' or '.join(DTYPES)}")
    require(
        source.is_dir() or source.suffix == ".gguf",
        f"source {source} is neither a folder nor a .gguf file; name the folder of a run, one with "
        "config.json and safetensors, or a GGUF file",
    )
    require(
        not target.exists() or (target.is_dir() and not any(target.iterdir())),
        f"target {target} exists and is not an empty folder; choose another, or remove it",
    )
    progress(f"reading {source}")
    tokenizer, special = None, SpecialTokens()
    if (source / "metrics.jsonl").is_file():
        run, params, special, found = read_run(source)
        config, tokenizer = run.model, found and found.inner
    elif source.is_dir():
        config, special = read_config(source), read_special(source)
        params = load_safetensors(source, config, progress=progress)
    else:
        config, params, tokenizer = read_gguf(source)
    if config.bidirectional and config.shifted and not config.qkv_bias:
        progress("an adapted llama: written as a Dream, whose biases are zero")
        config, params = _as_dream(config, params)
    progress(f"writing {target}")
    try:
        with atomic(target) as temporary:
            save_safetensors(params, config, temporary, max_shard_bytes, dtype, special)
            if tokenizer:
                tokenizer.save(str(temporary / TOKENIZER))
            elif source.is_dir():
                for name in (TOKENIZER, *_COMPANIONS):
                    if (source / name).is_file():
                        shutil.copyfile(source / name, temporary / name)
                if not (source / TOKENIZER).is_file() and (made := read_bpe(source)):
                    made.save(str(temporary / TOKENIZER))
            tokenized = (temporary / TOKENIZER).is_file()
            written = sum(file.stat().st_size for file in temporary.glob("*.safetensors"))
    except OSError as error:
        raise ConfigError(
            f"target {target} cannot be written: {error}; choose a folder with space"
        ) from error
    tensors = len(file_shapes(huggingface_tensors(config), config))
    return Converted(config, tensors, written, tokenized)


def _as_dream(config: TransformerConfig, params: dict[str, Any]) -> tuple[TransformerConfig, Any]:
    """The same function with biases of zero; without them no library has such a model."""
    import numpy as np

    blocks = params["blocks"]
    attention = dict(blocks["attention"])
    for name in ("query", "key", "value"):
        attention[f"{name}_bias"] = np.zeros_like(attention[name], shape=attention[name].shape[::2])
    return replace(config, qkv_bias=True), params | {"blocks": blocks | {"attention": attention}}


def run_convert(source: Path, target: Path, dtype: str) -> None:
    """`geojax convert`: convert, and print what was written. Raises ConfigError on bad input."""
    from rich.console import Console

    from geojax.models.weights.hf_models import hf_model

    console = Console(highlight=False, markup=False)
    say = lambda line: console.print(line, soft_wrap=True)  # noqa: E731
    done = convert(source, target, dtype, progress=say)
    config = done.config
    rows = [
        ("model", f"{hf_model(config).model_type}, {config.layers} layers of width {config.dim}"),
        ("parameters", f"{config.num_params:,}"),
        ("vocabulary", f"{config.vocab_size:,} entries"),
        ("tensors", f"{done.tensors:,}"),
        ("weights", f"{done.weight_bytes:,} bytes of {dtype}"),
        ("tokenizer", TOKENIZER if done.tokenizer else f"none: the source has no {TOKENIZER}"),
        ("folder", str(target)),
    ]
    for label, value in rows:
        console.print(f"  {label:<22}{value}", soft_wrap=True)
