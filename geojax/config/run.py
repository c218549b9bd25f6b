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
    slice_strategy,
)
from geojax.config.platform import PlatformConfig
from geojax.config.train import CheckpointConfig, EvalConfig, TrainConfig
from geojax.meshes.hardware import get_gpu
from geojax.meshes.strategy import parse_strategy, require_legal
from geojax.meshes.wan import get_wan
from geojax.models.config import TransformerConfig, get_model

_NO_SLICES = BalanceConfig(inner_steps=1, batch_sizes=(1,))


@dataclass(frozen=True)
class RunConfig:
    """A whole run. Presets in `configs/` return one; so does `config()` of a user's file."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    name: str
    """What tables call the run."""
    model: TransformerConfig
    train: TrainConfig
    slices: tuple[SliceConfig, ...] = ()
    """Regions that train by GeoMesh; empty: one cluster, by `strategy`."""
    strategy: str = ""
    """How one cluster computes a step, such as dp2-tp2-pp2-mb1-gb16; see meshes.strategy."""
    balance: BalanceConfig = _NO_SLICES
    data: DataConfig = DataConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    outer: OuterConfig = OuterConfig()
    clock: ClockConfig = ClockConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    platform: PlatformConfig = PlatformConfig()
    init: str = ""
    """Folder of safetensors, as `geojax convert` writes, to start from; empty: fresh parameters."""
    seed: int = 0
    """Initial parameters, and dropout."""

    def __post_init__(self):
        require(0 <= self.seed < 2**32, f"seed {self.seed} must lie in 0..{2**32 - 1}")
        require(
            re.fullmatch(r"\w[\w.+-]*", self.name),
            f"name {self.name!r} becomes a folder; use letters, digits, '.', '_', '+' and '-'",
        )
        require(
            bool(self.slices) != bool(self.strategy),
            f"a run has either slices ({len(self.slices)}) or a strategy ({self.strategy!r}), "
            "exactly one; give one of them",
        )
        self._check_data()
        if self.strategy:
            self._check_strategy()
            return
        require(
            self.balance != _NO_SLICES,
            "balance is unset, and slices need it: say how many inner steps the slowest takes, "
            "such as BalanceConfig(inner_steps=32)",
        )
        names = [s.name for s in self.slices]
        require(len(set(names)) == len(names), f"slices share a name: {names}; rename one")
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

    def _check_strategy(self) -> None:
        try:
            require_legal(parse_strategy(self.strategy), self.model)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        defaults = (_NO_SLICES, ExchangeConfig(), OuterConfig(), ClockConfig())
        for name, default in zip(("balance", "exchange", "outer", "clock"), defaults, strict=True):
            require(
                getattr(self, name) == default,
                f"{name} says how slices work together, and this run has a strategy and no slices; "
                "leave it unset",
            )
        require(
            self.train.micro_batch is None,
            f"train.micro_batch {self.train.micro_batch} is of slices; the strategy names its own",
        )

    def _check_data(self) -> None:
        tokenizer, masking, model = self.data.tokenizer, self.data.masking, self.model
        ids = tokenizer.vocab_size + (masking is not None)
        mask = " and its mask token" if masking else ""
        require(
            tokenizer.kind != "bpe" or ids <= model.vocab_size,
            f"data.tokenizer.vocab_size {tokenizer.vocab_size}{mask} exceeds model.vocab_size "
            f"{model.vocab_size}; raise the model's or lower the tokenizer's",
        )
        require(
            model.causal or masking,
            f"a {model.family} sees the tokens it predicts unless they are masked; set "
            "data.masking to MaskingConfig(), or choose a llama or gpt",
        )
        require(
            not model.causal or not masking,
            f"data.masking hides tokens for a model that sees both sides, and a {model.family} "
            "sees one; set data.masking to None, or choose a bert",
        )
        require(
            not model.context or self.data.seq_len <= model.context,
            f"data.seq_len {self.data.seq_len} exceeds model.context {model.context}, the "
            f"positions that the model has; use {model.context} or fewer",
        )

    def _check_batch(self, slice_: SliceConfig, batch: int) -> None:
        rows = slice_.devices // slice_.tp  # of copies and stages
        copies = slice_.devices // (slice_.tp * slice_.pp)
        unit = copies * self.train.micro_batch if self.train.micro_batch else rows
        given = self.train.micro_batch
        micro = f" times train.micro_batch {given}" if given else ""
        legal = sorted({max(batch // unit, 1) * unit, (batch // unit + 1) * unit})
        require(
            batch % unit == 0,
            f"balance.batch_sizes has {batch}, which does not divide by {unit}, the "
            f"{copies if micro else rows} devices of slice {slice_.name} that take sequences"
            f"{micro}; use {' or '.join(map(str, legal))}",
        )
        try:
            require_legal(slice_strategy(slice_, self.train.micro_batch, batch), self.model)
        except ValueError as error:
            raise ConfigError(f"slice {slice_.name}: {error}") from error

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
