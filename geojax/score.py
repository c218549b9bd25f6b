# SPDX-License-Identifier: Apache-2.0
"""How well a model in a folder predicts held-out text, with its own tokenizer.

Invariant: the figure is of whole sequences from the start of the held-out text, in float32 on one
device, so that it is the same wherever it is measured.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from geojax.config import DataConfig, TokenizerConfig, require
from geojax.data import Batch, ValidSequences, prepare
from geojax.models.transformer import make_apply
from geojax.models.weights import load_safetensors, read_config
from geojax.track.metrics import to_json, write_atomically


def perplexity(
    folder: Path,
    data: DataConfig,
    sequences: int,
    batch: int,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Score the model in `folder` on the first `sequences` held-out sequences of `data`.

    `folder` holds safetensors, config.json and tokenizer.json, which takes the place of
    `data.tokenizer`. Returns sequences, tokens (predicted ones), nats_per_token, standard_error (of
    that mean, by the spread over sequences), perplexity, bits_per_byte (of the predicted text's
    UTF-8) and bytes_per_token. Logits take 4 * batch * data.seq_len * vocabulary bytes.

    Raises ConfigError where the folder or the text cannot be used, sequences are longer than the
    model's context, or text is masked for a model that predicts the next token, or the reverse.
    """
    config = read_config(folder)
    require(
        not config.context or data.seq_len <= config.context,
        f"data.seq_len {data.seq_len} is beyond the model's context {config.context}; lower it",
    )
    require(
        config.causal == (data.masking is None),
        f"data.masking must be {'unset' if config.causal else 'set'} for a {config.family}",
    )
    tokenizer = TokenizerConfig(kind="file", path=str(folder / "tokenizer.json"))
    corpus = prepare(replace(data, tokenizer=tokenizer), config.vocab_size, progress=progress)
    held_out = ValidSequences(corpus, data.seq_len, data.document_mask, data.masking)
    params = load_safetensors(folder, config, place=lambda path, leaf: jnp.asarray(leaf))
    apply = make_apply(config)

    @jax.jit
    def score(params, rows: Batch):
        logits = apply(params, rows.tokens, rows.positions, rows.segments)
        picked = jnp.take_along_axis(logits, rows.targets[..., None], axis=-1)[..., 0]
        nats = jax.nn.logsumexp(logits, axis=-1) - picked
        return jnp.sum(nats * rows.weights, axis=-1)

    nats, tokens, texts = [], [], []
    for rows in held_out.batches(batch, sequences):
        nats.append(np.asarray(score(params, rows), np.float64))
        tokens.append(rows.weights.sum(axis=-1, dtype=np.float64))
        texts.append(rows.targets[rows.weights > 0])
        if progress:
            progress(f"scored {sum(np.count_nonzero(n) for n in tokens):,} sequences")
    return _summary(
        np.concatenate(nats),
        np.concatenate(tokens),
        len(corpus.tokenizer().decode(np.concatenate(texts)).encode()),
    )


def run_eval(
    folder: Path, data: DataConfig, sequences: int, batch: int, json_path: Path | None
) -> None:
    """`geojax eval`: score, and print the figures. Raises ConfigError on bad input."""
    from rich.console import Console

    require(sequences >= 1, f"sequences {sequences} must be at least 1")
    require(batch >= 1, f"batch {batch} must be at least 1")
    require(
        (folder / "config.json").is_file(),
        f"{folder} has no config.json; give a folder that `geojax convert` wrote",
    )
    console = Console(highlight=False)
    found = perplexity(folder, data, sequences, batch, progress=console.print)
    error = found["standard_error"]
    console.print(
        f"perplexity {found['perplexity']:.4g} ({found['nats_per_token']:.4f} +- {error:.4f} nats "
        f"a token, {found['bits_per_byte']:.4f} bits a byte) on {found['tokens']:,} tokens of "
        f"{found['sequences']:,} held-out sequences of {data.seq_len}",
        soft_wrap=True,
    )
    if json_path:
        write_atomically(json_path, json.dumps(to_json(found), indent=2) + "\n")
        console.print(f"wrote {json_path}", soft_wrap=True)


def _summary(nats: np.ndarray, tokens: np.ndarray, text_bytes: int) -> dict[str, Any]:
    """Figures of sequences with `nats` in all over `tokens` each; those without tokens are padding.

    The standard error is that of a ratio of sums over sequences (Cochran 1977, "Sampling
    Techniques"); nan of one sequence.
    """
    count, total = np.count_nonzero(tokens), tokens.sum()
    require(total, "no held-out token bears a loss; raise data.valid_fraction")
    mean = nats.sum() / total
    spread = float(np.sum((nats - mean * tokens) ** 2))
    error = math.sqrt(count / (count - 1) * spread) / total if count > 1 else math.nan
    return {
        "sequences": int(count),
        "tokens": int(total),
        "nats_per_token": float(mean),
        "standard_error": float(error),
        "perplexity": float(np.exp(mean)),
        "bits_per_byte": float(nats.sum() / math.log(2) / max(text_bytes, 1)),
        "bytes_per_token": text_bytes / float(total),
    }
