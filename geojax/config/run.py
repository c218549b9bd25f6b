# SPDX-License-Identifier: Apache-2.0
"""A whole run, and the contradictions between its parts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from geojax.config.base import STRICT, ConfigError, require
from geojax.config.baselines import HalosConfig, StreamingConfig, check_baselines
from geojax.config.cona import ChainLeg, ConaConfig, NoiseConfig, ScalingConfig
from geojax.config.data import DataConfig, MaskingConfig
from geojax.config.geomesh import (
    BalanceConfig,
    ClockConfig,
    ExchangeConfig,
    OuterConfig,
    SliceConfig,
    slice_strategy,
)
from geojax.config.grpc import GrpcConfig
from geojax.config.platform import PlatformConfig
from geojax.config.slices import check_sliced_cona
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
    chain: tuple[ChainLeg, ...] = ()
    """Strategies one after another, in place of one."""
    cona: ConaConfig | None = None
    """Strategies that are chosen while the run goes on; with slices, those of each slice."""
    scaling: ScalingConfig | None = None
    """How the learning rate follows a batch other than the one it was tuned at; unset: it does
    not."""
    noise: NoiseConfig | None = None
    """Measure the gradient's noise scale; unset: only where cona or scaling asks for it."""
    balance: BalanceConfig = _NO_SLICES
    data: DataConfig = DataConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    outer: OuterConfig = OuterConfig()
    halos: HalosConfig | None = None
    """Slices that train by HALoS, to compare with."""
    streaming: StreamingConfig | None = None
    """Slices that train by Streaming DiLoCo, to compare with."""
    clock: ClockConfig = ClockConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    platform: PlatformConfig = PlatformConfig()
    grpc: GrpcConfig = GrpcConfig()
    """Of exchange.engine grpc."""
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
        ways = {
            "slices": bool(self.slices),
            "strategy": bool(self.strategy),
            "chain": bool(self.chain),
            "cona": self.cona is not None,
        }
        given = [name for name, there in ways.items() if there]
        require(
            len(given) == 1 or given == ["slices", "cona"],
            f"a run goes by exactly one of {list(ways)}, or by slices with cona, and this one has "
            f"{given or 'none'}; give one of them",
        )
        self._check_data()
        self._check_noise()
        if self.halos or self.streaming:
            check_baselines(self)
        if self.slices:
            self._check_slices()
        else:
            self._check_one_cluster()

    @property
    def measured_noise(self) -> NoiseConfig | None:
        """How noise is measured, for whoever asks for it; None where nobody does."""
        asked = self.cona or (self.scaling and self.scaling.wants_noise)
        return self.noise or (NoiseConfig() if asked else None)

    @property
    def slice_batches(self) -> tuple[int, ...]:
        """Sequences a step that a slice may take."""
        return self.cona.global_batches if self.cona else self.balance.batch_sizes

    def _check_noise(self) -> None:
        require(
            self.cona is None or len(self.cona.global_batches) == 1 or self.scaling,
            "cona changes the batch, and the learning rate must follow: set scaling to "
            "ScalingConfig(base_batch=the batch that train.optimizer was tuned at)",
        )
        require(
            not (self.noise and self.noise.metric == "preconditioned")
            or self.train.optimizer.name in ("adamw", "lion"),
            "noise.metric 'preconditioned' is by what the optimizer knows of the gradient's size, "
            f"and {self.train.optimizer.name} knows nothing; use 'plain', or adamw or lion",
        )

    def _check_slices(self) -> None:
        a_node = self.clock.gpus_per_node
        for s in self.slices:
            whole = s.gpus // a_node * a_node
            require(
                s.gpus < a_node or s.gpus == whole,
                f"slice {s.name}: gpus {s.gpus} are not whole nodes of clock.gpus_per_node "
                f"{a_node}; use {whole} or {whole + a_node}",
            )
        if self.cona:
            check_sliced_cona(self, self.cona)
        else:
            for name in ("scaling", "noise"):
                require(
                    getattr(self, name) is None,
                    f"{name} is of a run by strategies, and this one has slices; leave it unset, "
                    "or set cona",
                )
        require(
            not self.clock.gpu,
            f"clock.gpu {self.clock.gpu!r} is of a run by strategies; give each slice its gpu",
        )
        require(
            self.balance != _NO_SLICES,
            "balance is unset, and slices need it: say how many inner steps the slowest takes, "
            "such as BalanceConfig(inner_steps=32)",
        )
        grpc = self.exchange.engine == "grpc"
        require(
            grpc or self.grpc == GrpcConfig(),
            "grpc says how slices in processes of their own talk, and exchange.engine is "
            f"{self.exchange.engine!r}; leave it unset, or start the run by `geojax launch`",
        )
        for s in self.slices:
            require(
                grpc or s.processes == 1,
                f"slice {s.name}: processes {s.processes}, and exchange.engine is "
                f"{self.exchange.engine!r}, where one process has all slices; leave processes at "
                "1, or set exchange.engine to 'grpc' and start the run by `geojax launch`",
            )
        require(
            self.balance.replan is None or (grpc and self.clock.kind == "measured"),
            f"balance.replan {self.balance.replan} follows measured speeds of slices in processes "
            "of their own; leave it unset, or use the measured clock and `geojax launch`",
        )
        if self.exchange.overlap:
            self._check_overlap(grpc)
        names = [s.name for s in self.slices]
        require(len(set(names)) == len(names), f"slices share a name: {names}; rename one")
        if not self.cona or self.clock.kind == "modelled":  # else it chooses among what there is
            for slice_ in self.slices:
                for batch in self.slice_batches:
                    self._check_batch(slice_, batch)
        if self.clock.kind == "modelled":
            self._check_modelled()
        elif given := [s.name for s in self.slices if s.speed or s.gpu or s.gpus != 1]:
            raise ConfigError(
                f"slices {given} set a speed, gpu or gpus, which the measured clock ignores; leave "
                "them unset or set clock.kind to 'modelled'"
            )

    def _check_overlap(self, grpc: bool) -> None:
        name = f"exchange.overlap {self.exchange.overlap}"
        require(
            grpc or self.clock.kind == "modelled",
            f"{name}: in one process no message is under way while slices work, so the measured "
            "clock would show nothing; leave it at 0, use the modelled clock, or set "
            "exchange.engine to 'grpc' and start the run by `geojax launch`",
        )
        for other, value in (("cona", self.cona), ("balance.replan", self.balance.replan)):
            require(
                value is None,
                f"{name} begins a round before the one before is over, and {other} may only then "
                f"give it another plan; leave {other} unset, or exchange.overlap at 0",
            )
        require(
            not (self.halos or self.streaming),
            f"{name} is of rounds, and this run's method has a loop of its own; leave it at 0",
        )

    def _check_one_cluster(self) -> None:
        for name, default in (
            ("balance", _NO_SLICES),
            ("exchange", ExchangeConfig()),
            ("outer", OuterConfig()),
        ):
            require(
                getattr(self, name) == default,
                f"{name} says how slices work together, and this run has none; leave it unset",
            )
        modelled = self.clock.kind == "modelled"
        require(
            not self.clock.wan,
            f"clock.wan {self.clock.wan!r} is between slices, and this run has none; set clock.gpu",
        )
        require(
            self.train.micro_batch is None or modelled,
            f"train.micro_batch {self.train.micro_batch} is of slices; the strategy names its own: "
            "leave it unset",
        )
        model, gpus = self.clocked_model(), self.clock.nodes * self.clock.gpus_per_node
        try:
            legs = [parse_strategy(leg.strategy) for leg in self.chain]
            named = [self.strategy] if self.strategy else []
            if self.cona and self.cona.start:
                named.append(self.cona.start)
            for strategy in [*legs, *(parse_strategy(text) for text in named)]:
                require_legal(strategy, model, gpus if modelled else None)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._check_chain({s.devices for s in legs}, {s.global_batch for s in legs})

    def _check_chain(self, devices: set[int], batches: set[int]) -> None:
        begins = [leg.tokens for leg in self.chain]
        require(
            not begins or (begins[0] == 0 and begins == sorted(set(begins))),
            f"chain: its legs begin at {begins} tokens; the first must begin at 0 and each later "
            "than the one before",
        )
        require(
            len(devices) <= 1,
            f"chain: its strategies are of {sorted(devices)} devices; all must use the same",
        )
        require(
            len(batches) <= 1 or self.scaling,
            f"chain: batches {sorted(batches)} change, and the learning rate must follow: set "
            "scaling to ScalingConfig(base_batch=the batch that train.optimizer was tuned at)",
        )

    def _check_data(self) -> None:
        tokenizer, masking, model = self.data.tokenizer, self.data.masking, self.model
        ids = tokenizer.vocab_size + (masking is not None)
        mask = " and its mask token" if masking else ""
        require(
            self.data.source.kind == "tasks" or tokenizer.kind != "bpe" or ids <= model.vocab_size,
            f"data.tokenizer.vocab_size {tokenizer.vocab_size}{mask} exceeds model.vocab_size "
            f"{model.vocab_size}; raise the model's or lower the tokenizer's",
        )
        require(
            model.causal or masking,
            f"a {model.family} that sees both sides sees the tokens it predicts unless they are "
            "masked; set data.masking to MaskingConfig(), or choose a causal model",
        )
        require(
            not model.causal or not masking,
            f"data.masking hides tokens for a model that sees both sides, and this {model.family} "
            "sees one; set data.masking to None, choose a bert, or make a llama bidirectional",
        )
        require(
            self.eval.draws == 1 or masking,
            f"eval.draws {self.eval.draws} is of masks, and nothing is masked; leave it unset",
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
        batches = "cona.global_batches" if self.cona else "balance.batch_sizes"
        require(
            batch % unit == 0,
            f"{batches} has {batch}, which does not divide by {unit}, the "
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
                f"({s.gpu!r}), exactly one; set that one, and leave the other unset",
            )
            require(
                s.gpu or s.gpus == 1,
                f"slice {s.name}: gpus {s.gpus} goes with gpu; a speed is of the whole slice: "
                "leave gpus at 1",
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


def default_masking(model: TransformerConfig) -> MaskingConfig | None:
    """How a model of that kind is trained and scored; None: by the next token."""
    if model.causal:
        return None
    return MaskingConfig() if model.family == "bert" else MaskingConfig(kind="diffusion", cut=0.01)


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    """`config` with other initial parameters and another data order; the split stays."""
    return replace(config, seed=seed, data=replace(config.data, seed=seed))


def with_chain(config: RunConfig, legs: tuple[ChainLeg, ...]) -> RunConfig:
    """`config` by a fixed chain. Where it says nothing of other batches than its own, the learning
    rate counts as tuned at that one, and follows by the rule that is the default."""
    scaling = _scaling_for(config, [leg.strategy for leg in legs])
    return replace(config, strategy="", cona=None, chain=legs, scaling=scaling)


def with_strategy(config: RunConfig, strategy: str) -> RunConfig:
    """`config` by one strategy, in place of the way that it goes by; the learning rate follows its
    batch as in `with_chain`. ConfigError where it is no strategy."""
    scaling = _scaling_for(config, [strategy])
    return replace(config, strategy=strategy, cona=None, chain=(), scaling=scaling)


def _scaling_for(config: RunConfig, strategies: Sequence[str]) -> ScalingConfig | None:
    own = [config.strategy] if config.strategy else [leg.strategy for leg in config.chain]
    try:
        tuned, new = ({parse_strategy(text).global_batch for text in x} for x in (own, strategies))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.scaling or len(tuned) != 1 or tuned == new:
        return config.scaling
    return ScalingConfig(base_batch=tuned.pop())
