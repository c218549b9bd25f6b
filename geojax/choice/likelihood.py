# SPDX-License-Identifier: Apache-2.0
"""How likely a model finds continuations of contexts, whatever kind of model it is.

Invariant: an answer is a function of its pair alone, apart from rounding; its order, and the pairs
asked beside it, change nothing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import DTypeLike

from geojax.choice import causal, diffusion
from geojax.choice.pairs import Pair, fit
from geojax.choice.rows import BATCH_TOKENS, make_reader
from geojax.config import require
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Params, Transformer


class Likelihood(NamedTuple):
    """What a model says of a pair."""

    log: float
    """Natural logarithm of the continuation's probability; under masked diffusion a bound of it
    from below, by Monte Carlo."""
    greedy: bool
    """Whether each of its tokens was the likeliest wherever the model was asked for it."""
    cut: int
    """Tokens of the context, from its start, that the model had no room for."""


type LogLikelihood = Callable[[Sequence[Pair]], list[Likelihood]]


def autoregressive(
    config: TransformerConfig,
    params: Params,
    dtype: DTypeLike = np.float32,
    batch_tokens: int = BATCH_TOKENS,
) -> LogLikelihood:
    """The likelihood of a causal model; choices of one context are computed in one row with it.

    ConfigError for a pair without a context, or beyond the model's.
    """
    require(config.causal, f"a {config.family} sees both sides; score it by diffusion")
    read = make_reader(
        Transformer(config, attend=causal.attend_branches), params, dtype, batch_tokens
    )

    def score(pairs: Sequence[Pair]) -> list[Likelihood]:
        # The last token is predicted, and never an input.
        kept, cuts = fit(pairs, config.context and config.context + 1, needs_context=True)
        rows, owners = causal.pack(kept)
        found = {}
        for (nats, likeliest), owner in zip(read(rows), owners, strict=True):
            for i, own in owner:
                found[i] = -nats[own].sum(dtype=np.float64), likeliest[own].all()
        return [
            Likelihood(float(found[i][0]), bool(found[i][1]), cut) for i, cut in enumerate(cuts)
        ]

    return score


def masked(
    config: TransformerConfig,
    params: Params,
    mask_id: int,
    samples: int,
    dtype: DTypeLike = np.float32,
    batch_tokens: int = BATCH_TOKENS,
) -> LogLikelihood:
    """The bound of a model of masked diffusion from `samples` masks of each continuation, the
    context being visible (Nie et al. 2025).

    Exact in expectation, and without noise for a single token. ConfigError for a pair beyond the
    model's context, or of a shifted model without one.
    """
    require(not config.causal, f"a causal {config.family} fills no masks; score it as it is")
    require(samples >= 1, f"samples {samples} must be at least 1")
    read = make_reader(Transformer(config), params, dtype, batch_tokens)

    def score(pairs: Sequence[Pair]) -> list[Likelihood]:
        kept, cuts = fit(pairs, config.context, needs_context=config.shifted)
        rows, weights, owners = [], [], []
        for i, pair in enumerate(kept):
            for mask, weight in diffusion.masks(pair.context, len(pair.continuation), samples):
                rows.append(diffusion.row(pair, mask, mask_id, config.shifted))
                weights.append(weight)
                owners.append(i)
        logs, greedy = np.zeros(len(pairs)), np.ones(len(pairs), bool)
        for (nats, likeliest), weight, i in zip(read(rows), weights, owners, strict=True):
            logs[i] -= weight * nats.sum(dtype=np.float64)
            greedy[i] &= likeliest.all()
        return [
            Likelihood(float(log), bool(best), cut)
            for log, best, cut in zip(logs, greedy, cuts, strict=True)
        ]

    return score
