# SPDX-License-Identifier: Apache-2.0
"""How well a model in a folder predicts held-out text, with its own tokenizer.

Invariant: the figure is of whole sequences from the start of the held-out text, in float32 on one
device, so that it is the same wherever it is measured.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

from geojax.config import DataConfig, TokenizerConfig, default_masking, require
from geojax.data import Batch, Corpus, both_splits, prepare
from geojax.diffusion.exact import is_of_tasks, run_exact
from geojax.models.transformer import make_apply
from geojax.models.weights import load_safetensors, read_special
from geojax.models.weights.special import TOKENIZER
from geojax.track.metrics import NewFile, to_json, write_atomically
from geojax.train.checkpoint import read_params
from geojax.train.evaluate import mean_loss
from geojax.trained import is_run, model_config, tokenizer_path


def perplexity(
    folder: Path,
    data: DataConfig,
    sequences: int,
    batch: int,
    draws: int = 1,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Score the model in `folder` on the first `sequences` held-out sequences of `data`, where
    tokens are masked under `draws` masks each.

    `folder` is a run's, or holds safetensors, config.json and tokenizer.json. Its tokenizer takes
    the place of `data.tokenizer`; a mask that config.json of weights names, of the tokenizer's own.
    Returns sequences, tokens (predicted ones), nats_per_token, standard_error (of that mean, by the
    spread over sequences), perplexity, bits_per_byte (of the predicted text's UTF-8) and
    bytes_per_token. Under masked diffusion the figure is a bound on the likelihood, by Monte Carlo.
    Logits take 4 * batch * data.seq_len * vocabulary bytes.

    Raises ConfigError where the folder or the text cannot be used, sequences are longer than the
    model's context, or text is masked for a model that predicts the next token, or the reverse.
    """
    config = model_config(folder)
    require(
        not config.context or data.seq_len <= config.context,
        f"data.seq_len {data.seq_len} is beyond the model's context {config.context}; lower it",
    )
    require(
        config.causal == (data.masking is None),
        f"data.masking must be {'unset' if config.causal else 'set'} for a {config.family} that "
        f"sees {'one side' if config.causal else 'both sides'}",
    )
    require(
        draws == 1 or data.masking is not None,
        f"draws {draws} are of masks, and nothing is masked; leave them unset",
    )
    require(
        data.source.kind != "tasks",
        "data.source.kind 'tasks' is no text; score a run of them with `geojax eval RUN`",
    )
    params, path, mask = None, folder / TOKENIZER, None
    if is_run(folder):
        params, meta = read_params(folder)
        path = tokenizer_path(meta)
        require(
            path.is_file(),
            f"{path}, the tokenizer of {folder}, is gone from the cache; make it again with "
            "`geojax data` and the run's settings",
        )
    elif not config.causal:
        mask = read_special(folder).mask
    corpus = prepare(
        replace(data, tokenizer=TokenizerConfig(kind="file", path=str(path))),
        config.vocab_size,
        progress=progress,
        mask_id=mask,
    )
    assert isinstance(corpus, Corpus), "text is a corpus"
    _, held_out = both_splits(corpus, data, config.shifted)
    if params is None:
        params = load_safetensors(folder, config, place=lambda _, leaf: jnp.asarray(leaf))
    params = jax.tree.map(jnp.asarray, params)
    apply = make_apply(config)

    @jax.jit
    def score(params, rows: Batch):
        logits = apply(params, rows.tokens, rows.positions, rows.segments)
        picked = jnp.take_along_axis(logits, rows.targets[..., None], axis=-1)[..., 0]
        nats = jax.nn.logsumexp(logits, axis=-1) - picked
        return jnp.sum(nats * rows.weights, axis=-1)

    nats, tokens, texts = [], [], []
    for rows in held_out.batches(batch, sequences, draws=draws):
        nats.append(np.asarray(score(params, rows), np.float64))
        tokens.append(rows.weights.sum(axis=-1, dtype=np.float64))
        texts.append(rows.targets[rows.weights > 0])
        if progress:
            progress(f"scored {sum(np.count_nonzero(n) for n in tokens):,} sequences")
    each = [np.concatenate(x).reshape(draws, -1).mean(0) for x in (nats, tokens)]
    predicted = np.concatenate(texts)
    text_bytes = len(corpus.tokenizer().decode(predicted).encode())
    return _summary(each[0], each[1], text_bytes / max(len(predicted), 1))


@dataclass(frozen=True)
class EvalOptions:
    """Perplexity of a model's weights on held-out text, or multiple choice with --tasks; of a model
    of generated tasks, how many it answers right."""

    folder: tyro.conf.Positional[Path]
    """Folder of a run, or of weights that `geojax convert` wrote."""
    data: DataConfig = DataConfig(seq_len=512)
    """Text; the tokenizer is the folder's own."""
    sequences: int = 128
    """Held-out sequences, from the first."""
    batch: int = 4
    """Sequences at once."""
    draws: int = 1
    """Masks that each sequence is scored under, of a model that fills masks."""
    tasks: tuple[str, ...] = ()
    """Tasks of multiple choice, or `all`; docs/eval.md says which there are."""
    items: int = 250
    """Items of each task, always the same ones."""
    samples: int = 0
    """Masks that each choice is scored under, of a diffusion model; 0: 32."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and of the computation."""
    batch_tokens: int = 2048
    """Tokens at once."""
    out: Path | None = None
    """Folder for each item's answer; a second start goes on where the first one stopped."""
    json: NewFile | None = None
    """File for the figures; unset: results.json in --out."""


_OF_PERPLEXITY = ("data", "sequences", "batch", "draws")
_OF_TASKS = ("items", "samples", "dtype", "batch_tokens", "out")


def run_eval(options: EvalOptions) -> None:
    """`geojax eval`: score, and print the figures. Raises ConfigError on bad input."""
    if options.tasks:
        from geojax.choice.command import ChoiceOptions, run_choice

        _require_unset(options, _OF_PERPLEXITY, "with --tasks")
        names = ("folder", "tasks", *_OF_TASKS, "json")
        run_choice(ChoiceOptions(**{name: getattr(options, name) for name in names}))
    elif is_of_tasks(options.folder):
        others = [n for n in (*_OF_PERPLEXITY, *_OF_TASKS) if n != "items"]
        _require_unset(options, others, "for a model of generated tasks")
        run_exact(options.folder, options.items, options.json)
    else:
        _require_unset(options, _OF_TASKS, "without --tasks")
        _run_perplexity(options)


def _require_unset(options: EvalOptions, names: Sequence[str], where: str) -> None:
    for name in names:
        require(
            getattr(options, name) == getattr(EvalOptions, name),
            f"--{name.replace('_', '-')} means nothing {where}; leave it unset",
        )


def _run_perplexity(options: EvalOptions) -> None:
    folder, data, draws = options.folder, options.data, options.draws
    require(options.sequences >= 1, f"sequences {options.sequences} must be at least 1")
    require(options.batch >= 1, f"batch {options.batch} must be at least 1")
    require(draws >= 1, f"draws {draws} must be at least 1")
    require(
        (folder / "config.json").is_file(),
        f"{folder} has no config.json; give the folder of a run, or one that `geojax convert` "
        "wrote",
    )
    console = Console(highlight=False)
    if data.masking is None:
        data = replace(data, masking=default_masking(model_config(folder)))
    found = perplexity(
        folder, data, options.sequences, options.batch, draws, progress=console.print
    )
    error = found["standard_error"]
    bound = data.masking is not None and data.masking.kind == "diffusion"
    console.print(
        f"perplexity {'at most ' if bound else ''}{found['perplexity']:.4g} "
        f"({found['nats_per_token']:.4f} +- {error:.4f} nats a token, "
        f"{found['bits_per_byte']:.4f} bits a byte) on {found['tokens']:,} tokens of "
        f"{found['sequences']:,} held-out sequences of {data.seq_len}",
        soft_wrap=True,
    )
    if options.json:
        write_atomically(options.json, json.dumps(to_json(found), indent=2) + "\n")
        console.print(f"wrote {options.json}", soft_wrap=True)


def _summary(nats: np.ndarray, tokens: np.ndarray, bytes_per_token: float) -> dict[str, Any]:
    """Figures of sequences with `nats` in all over `tokens` each; those without are padding."""
    mean, error = mean_loss(nats, tokens)
    return {
        "sequences": int(np.count_nonzero(tokens)),
        "tokens": round(tokens.sum()),
        "nats_per_token": mean,
        "standard_error": error,
        "perplexity": float(np.exp(mean)),
        "bits_per_byte": mean / math.log(2) / bytes_per_token if bytes_per_token else math.nan,
        "bytes_per_token": bytes_per_token,
    }
