# SPDX-License-Identifier: Apache-2.0
"""The inner step: optimizer, schedule, anomalies; and how results are looked at and kept."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from geojax.config.base import STRICT, require
from geojax.config.folder import require_checkpoint_folder
from geojax.config.own import check_form


@dataclass(frozen=True)
class OptimizerConfig:
    """An optax optimizer; its learning rate is multiplied by the schedule."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    name: Literal["lion", "adamw", "sgd", "own"] = "lion"
    """own: what `function` returns."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    b1: float | None = None
    """Momentum of Lion and AdamW; unset: 0.9."""
    b2: float | None = None
    """Second decay; unset: 0.99 for Lion, 0.95 for AdamW."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices; norm scales are exempt."""
    momentum: float = 0.0
    """sgd: momentum, 0 for none."""
    nesterov: bool = False
    """sgd: look ahead by one step of momentum."""
    function: str = ""
    """own: a function, as FILE.py:NAME or MODULE:NAME, that takes nothing and returns an optax
    optimizer at learning rate 1, such as optax.adamw(1.0). Its updates are multiplied by the run's
    rate; weight decay is its own affair."""

    def __post_init__(self):
        require(
            0 < self.learning_rate < math.inf,
            f"learning_rate {self.learning_rate} must be above 0 and finite",
        )
        own = self.name == "own"
        require(
            bool(self.function) == own,
            f"function {self.function!r} goes with name 'own' and only with it (name is "
            f"{self.name!r}); set both or neither",
        )
        if own:
            check_form(self.function, "optimizer function")
        require(
            not own or not self.weight_decay,
            f"weight_decay {self.weight_decay} means nothing to an optimizer of one's own; put it "
            "into the function, and leave this at 0",
        )
        for name in ("b1", "b2"):
            value = getattr(self, name)
            require(
                value is None or (0 <= value < 1 and self.name not in ("sgd", "own")),
                f"{name} {value} must lie in [0, 1) and goes with lion or adamw, not {self.name}",
            )
        require(
            0 <= self.momentum < 1 and (self.name == "sgd" or self.momentum == 0),
            f"momentum {self.momentum} must lie in [0, 1) and goes with sgd, not {self.name}; "
            "set b1 instead",
        )
        require(
            not self.nesterov or self.momentum > 0,
            "nesterov needs momentum above 0; set momentum or drop nesterov",
        )
        require(
            0 <= self.weight_decay < math.inf,
            f"weight_decay {self.weight_decay} must be at least 0 and finite",
        )


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate as a function of the tokens seen by all slices together."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    decay: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_fraction: float = 0.05
    """Share of all tokens over which the rate rises from 0."""
    final_fraction: float = 0.1
    """Rate at the last token over the peak; constant ignores decay and must leave 1."""

    def __post_init__(self):
        require(
            0 <= self.warmup_fraction < 1,
            f"schedule.warmup_fraction {self.warmup_fraction} must lie in [0, 1)",
        )
        require(
            0 <= self.final_fraction <= 1,
            f"schedule.final_fraction {self.final_fraction} must lie in [0, 1]",
        )
        require(
            self.decay != "constant" or self.final_fraction == 1,
            f"schedule.final_fraction {self.final_fraction} contradicts decay 'constant'; set it "
            "to 1 or choose cosine or linear",
        )


@dataclass(frozen=True)
class AnomalyConfig:
    """What to do with steps that would harm the run. Non-finite steps are always skipped."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    spike_factor: float | None = None
    """Also skip a step whose loss exceeds this many times its running mean; unset: never."""
    max_skipped_fraction: float = 0.5
    """A slice that skipped more than this share of a round's steps is left out of that round."""
    max_lost_rounds: int = 3
    """The run stops with an error after this many rounds in a row that no slice could join."""

    def __post_init__(self):
        require(
            self.spike_factor is None or self.spike_factor > 1,
            f"anomalies.spike_factor {self.spike_factor} must be above 1; use 2",
        )
        require(
            0 <= self.max_skipped_fraction <= 1,
            f"anomalies.max_skipped_fraction {self.max_skipped_fraction} must lie in [0, 1]",
        )
        require(
            self.max_lost_rounds >= 1,
            f"anomalies.max_lost_rounds {self.max_lost_rounds} must be at least 1",
        )


@dataclass(frozen=True)
class TrainConfig:
    """The inner step."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    total_tokens: int
    """Predicted tokens of the whole run, over all slices; the run ends with the round that
    reaches it."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    clip_norm: float | None = 1.0
    """Global gradient norm above which a gradient is scaled down; unset: never."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of activations; parameters, optimizer state and reductions stay float32."""
    micro_batch: int | None = None
    """Sequences a device computes at once; gradients of a step's micro-batches are summed, then
    divided by the step's tokens. Unset: the whole batch."""
    round_steps: int = 10
    """Steps between lines of a run without slices; evaluations and saves fall on their borders."""
    anomalies: AnomalyConfig = AnomalyConfig()

    def __post_init__(self):
        require(
            self.total_tokens >= 1, f"train.total_tokens {self.total_tokens} must be at least 1"
        )
        require(
            self.clip_norm is None or self.clip_norm > 0,
            f"train.clip_norm {self.clip_norm} must be above 0, or unset",
        )
        require(self.round_steps >= 1, f"train.round_steps {self.round_steps} must be at least 1")
        require(
            self.micro_batch is None or self.micro_batch >= 1,
            f"train.micro_batch {self.micro_batch} must be at least 1, or unset",
        )


@dataclass(frozen=True)
class EvalConfig:
    """Loss of the shared parameters on held-out text."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    every_tokens: int = 0
    """Evaluate at the first round border after each multiple of this many tokens; 0: only at the
    end."""
    sequences: int = 128
    """Held-out sequences, always the same ones."""
    first: int = 0
    """The first of them; tuning and reporting look at different ones."""
    batch: int = 32
    draws: int = 1
    """Masks that each sequence is scored under, where data.masking is set."""

    def __post_init__(self):
        require(self.draws >= 1, f"eval.draws {self.draws} must be at least 1")
        require(self.every_tokens >= 0, f"eval.every_tokens {self.every_tokens} must be at least 0")
        require(self.sequences >= 1, f"eval.sequences {self.sequences} must be at least 1")
        require(self.first >= 0, f"eval.first {self.first} must be at least 0")
        require(self.batch >= 1, f"eval.batch {self.batch} must be at least 1")


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    every_rounds: int = 10
    """Rounds between saves; 0: only at the end and on SIGTERM."""
    keep: int = 2
    """Newest checkpoints kept."""
    folder: str = ""
    """Where the run's checkpoints lie, of slices in slices/NAME below it: gs://BUCKET/PATH (needs
    the extra gcs) or an absolute path; unset: in the run's folder."""

    def __post_init__(self):
        require(
            self.every_rounds >= 0,
            f"checkpoint.every_rounds {self.every_rounds} must be at least 0",
        )
        require(self.keep >= 1, f"checkpoint.keep {self.keep} must be at least 1")
        if self.folder:
            require_checkpoint_folder(self.folder)
