# SPDX-License-Identifier: Apache-2.0
"""Loss and perplexity on held-out sequences, always the same ones."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from geojax.config import require
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
