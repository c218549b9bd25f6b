# SPDX-License-Identifier: Apache-2.0
"""Loss and perplexity on held-out sequences, always the same ones."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from geojax.config import EvalConfig, require
from geojax.data import ValidSequences
from geojax.meshes.gradient import SequenceSums


class Evaluation(NamedTuple):
    """Mean over loss-bearing tokens."""

    loss: float
    """In nats a token; of masked diffusion, a bound on it."""
    perplexity: float
    tokens: int
    standard_error: float
    """Of the loss, by the spread over sequences; nan of one sequence."""


def summarize(sums: Iterable[SequenceSums], draws: int = 1) -> Evaluation:
    """The mean over batches of sequences, each of which comes `draws` times, in the same order.

    ConfigError where no token bears a loss.
    """
    rows = [[np.asarray(x, np.float64).reshape(-1) for x in batch] for batch in sums]
    nats, tokens = (
        np.concatenate(column).reshape(draws, -1).mean(0) for column in zip(*rows, strict=True)
    )
    mean, error = mean_loss(nats, tokens)
    perplexity = math.exp(mean) if mean < 700 else math.inf
    return Evaluation(mean, perplexity, round(tokens.sum()), error)


def mean_loss(
    nats: Float64[np.ndarray, "n"], tokens: Float64[np.ndarray, "n"]
) -> tuple[float, float]:
    """Nats a token of sequences with `nats` in all over `tokens`, and its standard error.

    Sequences without tokens are padding. The error is that of a ratio of sums over sequences
    (Cochran 1977, "Sampling Techniques"). ConfigError where no token bears a loss.
    """
    count, total = np.count_nonzero(tokens), tokens.sum()
    require(total, "no held-out token bears a loss; raise data.valid_fraction")
    mean = float(nats.sum() / total)
    spread = float(np.sum((nats - mean * tokens) ** 2))
    error = math.sqrt(count / (count - 1) * spread) / total if count > 1 else math.nan
    return mean, float(error)


def evaluation_record(
    result: Evaluation, config: EvalConfig, valid: ValidSequences
) -> dict[str, Any]:
    """What a run's metrics say of an evaluation, apart from when it was."""
    return {
        "loss": result.loss,
        "standard_error": result.standard_error,
        "perplexity": result.perplexity,
        "bound": valid.masking is not None and valid.masking.kind == "diffusion",
        "sequences": min(config.sequences, valid.sequences - config.first),
    }
