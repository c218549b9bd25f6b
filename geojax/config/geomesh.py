# SPDX-License-Identifier: Apache-2.0
"""Slices, and what they do together: balance, exchange, outer step, clock."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from geojax.config.base import STRICT, ConfigError, require
from geojax.config.train import OptimizerConfig, ScheduleConfig
from geojax.meshes.hardware import get_gpu
from geojax.meshes.strategy import Strategy
from geojax.meshes.wan import get_wan
from geojax.models.config import get_model


@dataclass(frozen=True)
class SliceConfig:
    """One region's accelerators, acting as one worker."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    name: str
    region: str = ""
    """Region of the WAN; needed where the clock models the WAN."""
    devices: int = 1
    """JAX devices of this slice. Slices share devices where there are too few for all."""
    processes: int = 1
    """exchange.engine grpc: processes of the slice, equally many of its devices in each."""
    tp: int = 1
    """Devices that share every layer (tensor parallelism); the rest of `devices` divides the
    batch."""
    pp: int = 1
    """Pipeline stages."""
    remat: Literal["none", "matmuls", "full"] = "none"
    """What the backward pass computes again; see meshes.strategy."""
    sharding: Literal["none", "optimizer", "all"] = "none"
    """What copies of the model spread among them; see meshes.strategy."""
    gpu: str = ""
    """Modelled clock: GPU type of `meshes/hardware.py`."""
    gpus: int = 1
    """Modelled clock: GPUs of that type in the slice."""
    speed: float | None = None
    """Modelled clock: speed relative to the slice of speed 1, in place of the GPU's figures."""

    def __post_init__(self):
        require(self.name, "slices: a name is empty; name each slice, by its region for example")
        require(self.devices >= 1, f"slice {self.name}: devices {self.devices} must be at least 1")
        for name in ("tp", "pp", "processes"):
            value = getattr(self, name)
            require(value >= 1, f"slice {self.name}: {name} {value} must be at least 1")
        require(
            self.devices % self.processes == 0,
            f"slice {self.name}: devices {self.devices} do not divide by processes "
            f"{self.processes}; use a multiple of {self.processes} devices",
        )
        require(
            self.devices % (self.tp * self.pp) == 0,
            f"slice {self.name}: devices {self.devices} do not divide by tp {self.tp} x pp "
            f"{self.pp}; use a multiple of {self.tp * self.pp} devices, or smaller factors",
        )
        require(self.gpus >= 1, f"slice {self.name}: gpus {self.gpus} must be at least 1")
        require(
            self.speed is None or self.speed > 0,
            f"slice {self.name}: speed {self.speed} must be above 0",
        )


def slice_strategy(slice_: SliceConfig, micro_batch: int | None, batch: int) -> Strategy:
    """How a slice computes a batch: its copies share it, in as few micro-batches as may be."""
    dp = slice_.devices // (slice_.tp * slice_.pp)
    return Strategy(
        dp,
        slice_.tp,
        slice_.pp,
        micro_batch or max(batch // (dp * slice_.pp), 1),
        batch,
        remat=slice_.remat,
        sharding=slice_.sharding,
    )


@dataclass(frozen=True)
class BalanceConfig:
    """How a round's work is divided over slices."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    mode: Literal["equal", "adaptive"] = "adaptive"
    """equal: the same batch and inner steps for all; adaptive: each slice its own, so that all
    end a round together."""
    inner_steps: int | None = None
    """H of the slowest slice."""
    sync_share: float | None = None
    """Target share of a round spent in the exchange, from which H follows, in place of
    inner_steps."""
    batch_sizes: tuple[int, ...] = (8, 16, 32, 64)
    """Candidate sequences a step and slice. equal takes the largest that fits everywhere."""
    max_steps_ratio: float = 16.0
    """Bound on the largest H over the smallest."""
    throughput_slack: float = 0.05
    """The smallest batch within this share of a slice's best tokens/s is chosen."""
    replan: float | None = None
    """exchange.engine grpc, measured clock: another plan at a round border, where measured speeds
    say that it lowers straggler idle by more than this share of a round; unset: never."""

    def __post_init__(self):
        require(
            (self.inner_steps is None) != (self.sync_share is None),
            f"balance.inner_steps {self.inner_steps} and balance.sync_share {self.sync_share}: set "
            "exactly one, and the other to None",
        )
        require(
            self.inner_steps is None or self.inner_steps >= 1,
            f"balance.inner_steps {self.inner_steps} must be at least 1",
        )
        require(
            self.sync_share is None or 0 < self.sync_share < 1,
            f"balance.sync_share {self.sync_share} must lie between 0 and 1; use 0.1",
        )
        require(
            self.batch_sizes and min(self.batch_sizes) >= 1,
            f"balance.batch_sizes {self.batch_sizes} needs at least one batch, each at least 1; "
            "use such as (8, 16)",
        )
        require(
            len(set(self.batch_sizes)) == len(self.batch_sizes),
            f"balance.batch_sizes {self.batch_sizes} names a batch twice; name each once",
        )
        require(
            self.max_steps_ratio >= 1,
            f"balance.max_steps_ratio {self.max_steps_ratio} must be at least 1",
        )
        require(
            self.replan is None or 0 < self.replan < 1,
            f"balance.replan {self.replan} must lie between 0 and 1; use 0.03",
        )
        require(
            0 <= self.throughput_slack < 1,
            f"balance.throughput_slack {self.throughput_slack} must lie in [0, 1)",
        )


@dataclass(frozen=True)
class ExchangeConfig:
    """What slices send each other at the end of a round."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    codec: Literal["sign", "int8", "fp16", "bf16", "fp32"] = "sign"
    scales: Literal["tensor", "row"] = "tensor"
    """sign, int8: one magnitude a tensor (embedding and head always a row), or a row everywhere."""
    error_feedback: bool = True
    """Add what the codec lost in one round to the next."""
    schedule: Literal["auto", "gather", "two_phase"] = "auto"
    """gather: each slice sends its message to all, merged exactly; two_phase: each slice merges a
    shard of all and sends that on, encoded again. auto: two_phase for float codecs, as an
    all-reduce does, for int8 of more than 2 slices and signs of more than 4; gather for the rest,
    and under engine grpc."""
    engine: Literal["mesh", "grpc"] = "mesh"
    """mesh: all slices in one process; grpc: a process each, which may fail and come back. `geojax
    launch` sets it."""
    overlap: float = 0.0
    """Share of the next round's inner steps that a slice does while its message is under way; then
    it takes the result in. 0: it waits for the result first; 1: it takes it in a round later."""

    def __post_init__(self):
        require(
            0 <= self.overlap <= 1,
            f"exchange.overlap {self.overlap} is a share of a round's inner steps; it must lie in "
            "[0, 1]",
        )
        require(
            self.engine == "mesh" or self.schedule != "two_phase",
            "exchange.schedule 'two_phase' has no place in engine grpc, where the owner of a shard "
            "may fail; use 'gather' or 'auto'",
        )
        require(
            not (self.error_feedback and self.codec == "fp32"),
            "exchange.error_feedback has nothing to feed back under codec fp32; set it to False",
        )
        require(
            self.scales == "tensor" or self.codec in ("sign", "int8"),
            f"exchange.scales {self.scales!r} means nothing under codec {self.codec}, which sends "
            "no magnitudes; leave it at 'tensor'",
        )

    def steps_ahead(self, inner_steps: int) -> int:
        """The steps of such a round that go beside an exchange."""
        return steps_ahead(self.overlap, inner_steps)

    def resolve_schedule(self, slices: int) -> Literal["gather", "two_phase"]:
        """The schedule for this many slices, `auto` resolved."""
        if self.schedule != "auto":
            return self.schedule
        if self.engine == "grpc":
            return "gather"
        most = {"sign": 4, "int8": 2}.get(self.codec, 0)  # slices that gather
        return "two_phase" if slices > most else "gather"


def steps_ahead(overlap: float, inner_steps: int) -> int:
    """So large a share of a round's steps, rounded up: at least one, where there is a share."""
    return math.ceil(overlap * inner_steps - 1e-9)


@dataclass(frozen=True)
class OuterConfig:
    """How merged pseudo-gradients move the shared parameters."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    optimizer: OptimizerConfig = OptimizerConfig(name="sgd", learning_rate=1.0)
    schedule: ScheduleConfig = ScheduleConfig(
        decay="constant", warmup_fraction=0.0, final_fraction=1.0
    )
    merge: Literal["tokens", "fednova"] = "tokens"
    """tokens: by each slice's loss-bearing tokens, for IID data; fednova: steps normalised out
    (Wang et al. 2020), for slices with unlike data."""


@dataclass(frozen=True)
class ClockConfig:
    """Which clock a run's times come from."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    kind: Literal["measured", "modelled"] = "measured"
    model: str = ""
    """Modelled: name of the model whose size is timed; empty: the one that is trained."""
    seq_len: int | None = None
    """Modelled: sequence length that is timed; unset: the one that is trained."""
    wan: str = ""
    """Modelled: a WAN of `meshes/wan.py`, or a CSV file of links."""
    base_step_seconds: float | None = None
    """Modelled, slices given by speed: seconds a step of base_batch sequences at speed 1."""
    base_batch: int | None = None
    gpu: str = ""
    """Modelled, a run by strategies: GPU type of `meshes/hardware.py`. Steps are timed on `nodes` x
    `gpus_per_node` of them; they run on one device here."""
    nodes: int = 1
    gpus_per_node: int = 8
    switch_seconds: float = 5.0
    """Modelled, a run by strategies: seconds of a switch: moving the state, and what of compiling
    the run has to wait for."""

    def __post_init__(self):
        modelled = self.kind == "modelled"
        require(
            bool(self.wan or self.gpu) == modelled and not (self.wan and self.gpu),
            f"clock.kind {self.kind!r}: the modelled clock, and no other, wants either a wan "
            f"({self.wan!r}), for slices, or a gpu ({self.gpu!r}), for strategies; "
            + ("set one of them" if modelled else "leave both unset, or set clock.kind"),
        )
        for name in ("seq_len", "base_batch", "nodes", "gpus_per_node"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"clock.{name} {value} must be at least 1")
        require(
            0 <= self.switch_seconds < math.inf,
            f"clock.switch_seconds {self.switch_seconds} must be at least 0 and finite",
        )
        for name, used in (
            ("nodes", self.gpu),
            ("gpus_per_node", self.gpu),
            ("switch_seconds", modelled),
        ):
            default = type(self).__dataclass_fields__[name].default
            require(
                used or getattr(self, name) == default,
                f"clock.{name} {getattr(self, name)} is of a modelled cluster, and would be "
                f"ignored; set clock.gpu, or leave it at {default}",
            )
        optional = ("model", "seq_len", "base_step_seconds", "base_batch")
        set_fields = [name for name in optional if getattr(self, name)]
        require(
            modelled or not set_fields,
            f"clock.{'/'.join(set_fields)} would be ignored by the measured clock; set clock.kind "
            "to 'modelled' or leave them unset",
        )
        require(
            (self.base_step_seconds is None) == (self.base_batch is None),
            f"clock.base_step_seconds {self.base_step_seconds} and clock.base_batch "
            f"{self.base_batch} go together; set both or neither",
        )
        require(
            self.base_step_seconds is None or 0 < self.base_step_seconds < math.inf,
            f"clock.base_step_seconds {self.base_step_seconds} must be above 0 and finite",
        )
        try:
            for name, get in ((self.model, get_model), (self.wan, get_wan), (self.gpu, get_gpu)):
                if name:
                    get(name)
        except ValueError as error:
            raise ConfigError(f"clock: {error}") from error
