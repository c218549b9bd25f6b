# SPDX-License-Identifier: Apache-2.0
"""What is asked of a sampler: tokens, some of them masked, and how the masks are filled.

Invariant: a `Request` that exists can be sampled by any model whose vocabulary and context it fits
(`check`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Int32

from geojax.config import require
from geojax.diffusion.choose import POLICIES
from geojax.models.config import TransformerConfig

_COLDEST = 1e-3  # logits divided by less may overflow


@dataclass(frozen=True)
class SamplingConfig:
    """How masks are filled."""

    steps: int = 0
    """Denoising steps in all; 0: one for each mask. More than there are masks count as that many,
    and every block takes one at least. Not of policy threshold, which takes as many as it needs."""
    block: int = 32
    """Positions that are filled before those after them; 0: all masks are one block."""
    policy: str = "confidence"
    """confidence, threshold, margin, entropy or origin; see geojax.diffusion.choose."""
    threshold: float = 0.9
    """threshold: the probability from which on a token is filled."""
    temperature: float = 0.0
    """Of the tokens' distribution; 0: always the likeliest."""
    guidance: float = 0.0
    """Classifier-free guidance against a masked prompt; 0: none, at half the cost."""
    seed: int = 0

    def __post_init__(self):
        require(self.steps >= 0, f"steps {self.steps} must be at least 0")
        require(self.block >= 0, f"block {self.block} must be at least 0")
        require(self.policy in POLICIES, f"policy {self.policy!r} is none of {list(POLICIES)}")
        require(
            self.policy != "threshold" or not self.steps,
            f"steps {self.steps} mean nothing to policy 'threshold'; leave them unset",
        )
        require(
            self.policy == "threshold" or self.threshold == 0.9,
            f"threshold {self.threshold} goes with policy 'threshold' only; leave it unset",
        )
        require(0 < self.threshold <= 1, f"threshold {self.threshold} must lie in (0, 1]")
        require(
            self.temperature == 0 or _COLDEST <= self.temperature < 100,
            f"temperature {self.temperature} must be 0, which is greedy, or lie in [{_COLDEST}, "
            "100); 1 is the model's own",
        )
        require(
            0 <= self.guidance < 100,
            f"guidance {self.guidance} must lie in [0, 100); 0 is none, and 1 or 2 are usual",
        )
        require(0 <= self.seed < 2**32, f"seed {self.seed} must lie in 0..{2**32 - 1}")


@dataclass(frozen=True)
class Request:
    """One sequence to fill."""

    tokens: Sequence[int] | Int32[np.ndarray, " n"]
    """The mask id where a token is wanted."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    ends: bool = True
    """Whether an end-of-text token ends the answer: what is after it is not filled. Only where all
    masks lie at the end; else tokens after them were given, and all are filled."""
    begin: int = 0
    """Masks before this place are part of the prompt, and stay: blanks of a form, say."""


def prompt(
    ids: Sequence[int], canvas: int, mask_id: int, sampling: SamplingConfig | None = None
) -> Request:
    """A request for up to `canvas` tokens after `ids`."""
    require(canvas >= 1, f"{canvas} new tokens were asked for; ask for 1 or more")
    return Request([*ids, *[mask_id] * canvas], sampling or SamplingConfig())


def masks(request: Request, mask_id: int) -> Bool[np.ndarray, " n"]:
    """Which are to be filled."""
    tokens = np.asarray(request.tokens)
    return (tokens == mask_id) & (np.arange(len(tokens)) >= request.begin)


def check(request: Request, model: TransformerConfig, mask_id: int) -> None:
    """ConfigError where `model` cannot fill the request."""
    tokens = np.asarray(request.tokens)
    require(
        tokens.ndim == 1 and len(tokens) and np.issubdtype(tokens.dtype, np.integer),
        f"a request's tokens have shape {tokens.shape} and type {tokens.dtype}; give a list of ids",
    )
    hidden = masks(request, mask_id)
    where = f" from place {request.begin} on" if request.begin else ""
    require(hidden.any(), f"no token{where} is the mask, {mask_id}; say where tokens are wanted")
    require(
        tokens.min() >= 0 and tokens.max() < model.vocab_size,
        f"token {tokens.max() if tokens.min() >= 0 else tokens.min()} is not in 0.."
        f"{model.vocab_size - 1}, the model's vocabulary",
    )
    require(
        not model.context or len(tokens) <= model.context,
        f"the request has {len(tokens)} tokens with those to fill, and the model's context is "
        f"{model.context}; shorten the prompt, or ask for fewer",
    )
    require(
        not model.shifted or not hidden[0],
        "the first token is masked, and a shifted model predicts each from the one before it; "
        "begin with a token, such as the begin-of-text one",
    )
