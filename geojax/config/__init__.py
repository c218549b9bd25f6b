# SPDX-License-Identifier: Apache-2.0
"""What a run is: one frozen `RunConfig` made of the parts that each component receives.

Invariant: a config that exists is one that can run; every contradiction is refused here, before
anything is compiled, with the value, the constraint and the fix. Fields carry their units in their
names. Nothing here imports JAX, so that the command line answers at once.
"""

from geojax.config.base import ConfigError, LostRunError, RunError, require
from geojax.config.baselines import HalosConfig, ServerConfig, StreamingConfig
from geojax.config.cona import ChainLeg, ConaConfig, NoiseConfig, ScalingConfig
from geojax.config.data import DataConfig, MaskingConfig, SourceConfig, TokenizerConfig
from geojax.config.geomesh import (
    BalanceConfig,
    ClockConfig,
    ExchangeConfig,
    OuterConfig,
    SliceConfig,
    slice_strategy,
    steps_ahead,
)
from geojax.config.grpc import GrpcConfig
from geojax.config.platform import ClusterConfig, PlatformConfig, WatchdogConfig
from geojax.config.run import RunConfig, default_masking, with_chain, with_seed, with_strategy
from geojax.config.train import (
    AnomalyConfig,
    CheckpointConfig,
    EvalConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)

__all__ = [
    "AnomalyConfig",
    "BalanceConfig",
    "ChainLeg",
    "CheckpointConfig",
    "ClockConfig",
    "ClusterConfig",
    "ConaConfig",
    "ConfigError",
    "DataConfig",
    "EvalConfig",
    "ExchangeConfig",
    "GrpcConfig",
    "HalosConfig",
    "LostRunError",
    "MaskingConfig",
    "NoiseConfig",
    "OptimizerConfig",
    "OuterConfig",
    "PlatformConfig",
    "RunConfig",
    "RunError",
    "ScalingConfig",
    "ScheduleConfig",
    "ServerConfig",
    "SliceConfig",
    "SourceConfig",
    "StreamingConfig",
    "TokenizerConfig",
    "TrainConfig",
    "WatchdogConfig",
    "default_masking",
    "require",
    "slice_strategy",
    "steps_ahead",
    "with_chain",
    "with_seed",
    "with_strategy",
]
