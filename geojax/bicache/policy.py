# SPDX-License-Identifier: Apache-2.0
"""What is reused between denoising steps and between requests.

With P prefix tokens of S, L layers, and b the layers below which a prefix's keys and values come
from a pass over the prefix alone:

| policy | between requests | between steps |
|---|---|---|
| none | nothing | nothing |
| refresh | nothing | the prefix's keys and values, made anew every k steps |
| full | the prefix's keys and values in all layers, as autoregressive servers do | the same |
| prefix | nothing | those of all tokens before the block, made anew at its start (Fast-dLLM) |
| dual | nothing | those of all tokens outside of the block, made anew at its start (Fast-dLLM) |
| bicache | the prefix's below layer b, and its hidden state there | above it, made anew every k |
| bicache-dual | the same | those of all tokens outside of the block |

Invariant: a policy says what is computed, never for whom: rows of a batch follow it one by one.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from geojax.config import ConfigError, require

Reach = Literal["suffix", "rest", "block"]
"""Rows that run between refreshes: all after the prefix, those from the block on, or the block."""


@dataclass(frozen=True)
class Policy:
    name: str
    shared: bool
    """Whether a store's keys and values stand for the prefix in shallow layers."""
    window: Reach
    every: int
    """Steps from one refresh to the next; 0: only where a block begins."""
    whole: bool = False
    """Whether shallow means all layers."""

    def __post_init__(self):
        require(self.every >= 0, f"refresh interval {self.every} must be at least 0")


_KNOWN = {
    "none": Policy("none", False, "suffix", 1),
    "refresh": Policy("refresh", False, "suffix", 16),
    "full": Policy("full", True, "suffix", 0, whole=True),
    "prefix": Policy("prefix", False, "rest", 0),
    "dual": Policy("dual", False, "block", 0),
    "bicache": Policy("bicache", True, "suffix", 16),
    "bicache-dual": Policy("bicache-dual", True, "block", 0),
}
POLICIES = tuple(_KNOWN)


def get_policy(name: str, every: int | None = None) -> Policy:
    """The policy of that name; `every`: another interval of refreshes, where it has one.

    ConfigError with the nearest name where there is none.
    """
    if name not in _KNOWN:
        near = get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {list(POLICIES)}"
        raise ConfigError(f"no policy of reuse is named {name!r}; {hint}")
    policy = _KNOWN[name]
    if every is None:
        return policy
    require(
        name not in ("none", "full"),
        f"policy {name!r} has no refresh interval, and {every} was given; leave it unset",
    )
    require(
        every >= 1 or policy.window != "suffix",
        f"policy {name!r} refreshes every {every} steps; use 1 or more, 16 is usual",
    )
    return Policy(name, policy.shared, policy.window, every, policy.whole)
