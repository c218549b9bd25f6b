# SPDX-License-Identifier: Apache-2.0
"""Strategies that change during a run: a chain that is given, or one that CONA finds."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from geojax.config.base import STRICT, ConfigError, require
from geojax.config.rate import RateRule, Rule


@dataclass(frozen=True)
class ScalingConfig:
    """How the learning rate follows the batch. Weight decay and Adam's second moment go by tokens,
    whatever the rule."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    base_batch: int
    """Sequences a step at which train.optimizer was tuned."""
    rule: Rule = "adascale"
    """linear in the batch, sqrt, adascale (by the noise scale; Johnson et al. 2020), or a table."""
    cap: bool = False
    """linear, sqrt: stop growing where the batch reaches the noise scale."""
    table: tuple[tuple[int, float], ...] = ()
    """table: (batch, tuned factor over the config's rate), by batch."""

    def __post_init__(self):
        try:
            self.rate_rule()
        except ValueError as error:
            raise ConfigError(f"scaling: {error}") from error

    def rate_rule(self) -> RateRule:
        return RateRule(self.rule, self.base_batch, self.cap, self.table)

    @property
    def wants_noise(self) -> bool:
        """Whether the rule looks at the noise scale."""
        return self.rule == "adascale" or self.cap


@dataclass(frozen=True)
class ChainLeg:
    """A part of a fixed chain."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    tokens: int
    """Tokens seen when it begins; the first at 0."""
    strategy: str
    """As in `strategy`."""


@dataclass(frozen=True)
class NoiseConfig:
    """Measuring the noise scale of the gradient."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    metric: Literal["plain", "preconditioned"] = "plain"
    """The norm; preconditioned: each tensor as the optimizer scales it."""
    window_samples: int = 2_000
    """Sequences over which noise is averaged, at least."""
    window_fraction: float = 0.1
    """And this share of the sequences seen so far, where that is more: noise grows by powers."""
    probe_steps: int = 100
    """Steps between two that compute each half of their batch apart, under strategies that have no
    other way to tell the noise of the whole gradient."""
    first_steps: int = 20
    """Steps measured before the noise counts as known."""

    def __post_init__(self):
        for name in ("window_samples", "probe_steps"):
            value = getattr(self, name)
            require(value >= 1, f"noise.{name} {value} must be at least 1")
        require(
            self.first_steps >= 2,
            f"noise.first_steps {self.first_steps} must be at least 2: one step has no spread",
        )
        require(
            0 <= self.window_fraction < 1,
            f"noise.window_fraction {self.window_fraction} must lie in [0, 1)",
        )


@dataclass(frozen=True)
class ConaConfig:
    """Online strategy chaining."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    global_batches: tuple[int, ...]
    """The ladder: sequences a step that may be chosen."""
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    """Sequences that one copy of the model computes at once."""
    layouts: Literal["all", "dp"] = "all"
    """dp: data parallelism alone, the batch being all that is chosen (as in Pollux, Qiao et al.
    2021)."""
    start: str = ""
    """The first strategy; empty: the best where noise is as small as the smallest batch."""
    dwell_rounds: int = 2
    """Rounds after a switch before the next, trials apart."""
    margin: float = 0.01
    """Gain, as a share, below which nothing is switched."""
    timing_error: float = 0.4
    """By how much the timing model may be off for a family of strategies before any of them was
    timed: a deviation of the logarithm."""
    trial_share: float = 0.005
    """Share of the run's time that switches to and from trials that fail may take, where nothing
    like them was timed; those that would pay as predicted have as much again."""

    def __post_init__(self):
        for name in ("global_batches", "micro_batches"):
            values = getattr(self, name)
            require(
                values and min(values) >= 1 and len(set(values)) == len(values),
                f"cona.{name} {values} needs at least one number, each once and at least 1; use "
                "such as (4, 8, 16)",
            )
        require(self.dwell_rounds >= 1, f"cona.dwell_rounds {self.dwell_rounds} must be at least 1")
        for name in ("margin", "trial_share"):
            value = getattr(self, name)
            require(0 <= value < 1, f"cona.{name} {value} must lie in [0, 1)")
        require(
            0 < self.timing_error < 10,
            f"cona.timing_error {self.timing_error} must lie between 0 and 10",
        )
