# SPDX-License-Identifier: Apache-2.0
"""A whole run, and the contradictions between its parts."""

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from geojax.config.base import STRICT, ConfigError, require
from geojax.config.data import DataConfig
from geojax.config.geomesh import (
    BalanceConfig,
    ClockConfig,
    ExchangeConfig,
    OuterConfig,
    SliceConfig,
)
from geojax.config.train import CheckpointConfig, EvalConfig, TrainConfig
from geojax.meshes.hardware import get_gpu
from geojax.meshes.wan import get_wan
from geojax.models.config import TransformerConfig, get_model


@dataclass(frozen=True)
class RunConfig:
    """A whole run. Presets in `configs/` return one; so does `config()` of a user's file."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    name: str
    """What tables call the run."""
    model: TransformerConfig
    train: TrainConfig
    slices: tuple[SliceConfig, ...]
    balance: BalanceConfig
    data: DataConfig = DataConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    outer: OuterConfig = OuterConfig()
    clock: ClockConfig = ClockConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    seed: int = 0
    """Initial parameters."""

    def __post_init__(self):
        require(0 <= self.seed < 2**32, f"seed {self.seed} must lie in 0..{2**32 - 1}")
        require(
            re.fullmatch(r"\w[\w.+-]*", self.name),
            f"name {self.name!r} becomes a folder; use letters, digits, '.', '_', '+' and '-'",
        )
        require(self.slices, "slices is empty; a run needs at least one")
        names = [s.name for s in self.slices]
        require(len(set(names)) == len(names), f"slices share a name: {names}; rename one")
        tokenizer = self.data.tokenizer
        require(
            tokenizer.kind != "bpe" or tokenizer.vocab_size <= self.model.vocab_size,
            f"data.tokenizer.vocab_size {tokenizer.vocab_size} exceeds model.vocab_size "
            f"{self.model.vocab_size}; raise the model's or lower the tokenizer's",
        )
        for slice_ in self.slices:
            for batch in self.balance.batch_sizes:
                self._check_batch(slice_, batch)
        if self.clock.kind == "modelled":
            self._check_modelled()
        elif given := [s.name for s in self.slices if s.speed or s.gpu or s.gpus != 1]:
            raise ConfigError(
                f"slices {given} set a speed, gpu or gpus, which the measured clock ignores; leave "
                "them unset or set clock.kind to 'modelled'"
            )

    def _check_batch(self, slice_: SliceConfig, batch: int) -> None:
        unit = (self.train.micro_batch or 1) * slice_.devices
        micro = (
            f" times train.micro_batch {self.train.micro_batch}" if unit != slice_.devices else ""
        )
        legal = sorted({max(batch // unit, 1) * unit, (batch // unit + 1) * unit})
        require(
            batch % unit == 0,
            f"balance.batch_sizes has {batch}, which does not divide by {unit}, the "
            f"{slice_.devices} devices of slice {slice_.name}{micro}; "
            f"use {' or '.join(map(str, legal))}",
        )

    def _check_modelled(self) -> None:
        wan = get_wan(self.clock.wan)
        for s in self.slices:
            require(
                s.region in wan.regions,
                f"slice {s.name}: region {s.region!r} is not in WAN {self.clock.wan!r}; "
                f"use one of {list(wan.regions)}",
            )
            require(
                (s.speed is None) != (not s.gpu),
                f"slice {s.name}: the modelled clock wants either speed ({s.speed}) or gpu "
                f"({s.gpu!r}), exactly one",
            )
            require(
                s.gpu or s.gpus == 1,
                f"slice {s.name}: gpus {s.gpus} goes with gpu; a speed is of the whole slice",
            )
        try:  # every GPU must be known, and every link needs a rate and a round-trip time
            for s in self.slices:
                if s.gpu:
                    get_gpu(s.gpu)
            wan.gather_seconds([s.region for s in self.slices], 1)
        except ValueError as error:
            raise ConfigError(f"clock: {error}") from error
        require(
            self.train.compute_dtype == "bfloat16" or not any(s.gpu for s in self.slices),
            "train.compute_dtype float32: GPU times are modelled for bfloat16; set it to bfloat16, "
            "or give slices a speed",
        )
        by_speed = [s for s in self.slices if s.speed]
        require(
            not by_speed or len(by_speed) == len(self.slices),
            "some slices give a speed and others a gpu; give all of them the same",
        )
        require(
            bool(by_speed) == (self.clock.base_step_seconds is not None),
            "slices given by speed need clock.base_step_seconds and clock.base_batch, and slices "
            "given by gpu must not have them",
        )

    def clocked_model(self) -> TransformerConfig:
        """The model whose time the modelled clock counts."""
        return get_model(self.clock.model) if self.clock.model else self.model


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    """`config` with other initial parameters and another data order; the split stays."""
    return replace(config, seed=seed, data=replace(config.data, seed=seed))
