# SPDX-License-Identifier: Apache-2.0
"""Loss and perplexity on held-out sequences, always the same ones."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from geojax.config import EvalConfig, require
from geojax.data import ValidSequences
from geojax.meshes.gradient import LossSums


class Evaluation(NamedTuple):
    """Mean over loss-bearing tokens."""

    loss: float
    """In nats a token."""
    perplexity: float
    tokens: int


def summarize(sums: Iterable[LossSums]) -> Evaluation:
    """The mean of batches' sums; ConfigError where no token bears a loss."""
    pairs = [(float(nats), float(tokens)) for nats, tokens in sums]
    nats, tokens = (sum(column) for column in zip(*pairs, strict=True))
    require(tokens, "no held-out token bears a loss; raise data.valid_fraction")
    mean = nats / tokens
    return Evaluation(mean, math.exp(mean) if mean < 700 else math.inf, int(tokens))


def evaluation_record(
    result: Evaluation, config: EvalConfig, valid: ValidSequences
) -> dict[str, Any]:
    """What a run's metrics say of an evaluation, apart from when it was."""
    return {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "sequences": min(config.sequences, valid.sequences - config.first),
    }
