# SPDX-License-Identifier: Apache-2.0
"""Methods as settings of the same parts, over two bases: the demo's and the published sizes'.

A method says how work is divided, what is exchanged, and which optimizers act; a base says what is
trained, on what, and which clock counts. `METHODS[name](base)` is a run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from geojax.config import (
    BalanceConfig,
    CheckpointConfig,
    ClockConfig,
    DataConfig,
    EvalConfig,
    ExchangeConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
    SliceConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
    require,
)
from geojax.meshes.strategy import parse_strategy
from geojax.meshes.wan import get_wan
from geojax.models.config import get_model

PUBLISHED_SPEEDS = {
    # The published 20.9 % straggler idle of the fastest GPU and 65.8 % WAN share of DiLoCo's round
    # give 2.57 : 1 between the outer two; the inner two are ours.
    "h100": ("eastus", 2.57),
    "a100": ("westus2", 1.5),
    "l40s": ("westeurope", 1.1),
    "rtx-6000-ada": ("koreacentral", 1.0),
}
PUBLISHED_SYNC_SHARE = 0.658


@dataclass(frozen=True)
class Optimizers:
    """What a base found to suit it; methods choose among them."""

    adamw: OptimizerConfig
    lion: OptimizerConfig
    exact_outer: OuterConfig
    """For exchanges that lose nothing, or little."""
    sign_outer: OuterConfig


def _outer(learning_rate: float, momentum: float) -> OuterConfig:
    sgd = OptimizerConfig(
        name="sgd", learning_rate=learning_rate, momentum=momentum, nesterov=momentum > 0
    )
    return OuterConfig(sgd)


# Best of `geojax bench tune geomesh diloco` on the demo's base.
TUNED = Optimizers(
    adamw=OptimizerConfig(name="adamw", learning_rate=1.4e-2, weight_decay=0.1),
    lion=OptimizerConfig(name="lion", learning_rate=3e-3, b2=0.95, weight_decay=1.0),
    exact_outer=_outer(1.0, 0.0),
    sign_outer=_outer(1.0, 0.3),
)
# For the published sizes: DiLoCo's published settings, and for signs what went well at small scale
# with Lion's usual rate, a quarter of AdamW's. Not tuned at these sizes.
UNTUNED = Optimizers(
    adamw=OptimizerConfig(name="adamw", learning_rate=4e-4, weight_decay=0.1),
    lion=OptimizerConfig(name="lion", learning_rate=1e-4, weight_decay=1.0),
    exact_outer=_outer(0.7, 0.9),
    sign_outer=_outer(1.0, 0.3),
)
DEMO_INNER_STEPS = 10


def demo() -> RunConfig:
    """Base: 133k parameters on Wikipedia extracts; time modelled at 150M in the paper's setting."""
    inner_steps, batch = DEMO_INNER_STEPS, 8
    clocked, wan = "llama-150m", "geomesh-azure-no-latency"
    regions = [region for region, _ in PUBLISHED_SPEEDS.values()]
    exchange = get_wan(wan).two_phase_seconds(regions, 4 * get_model(clocked).num_params)
    round_compute = exchange * (1 - PUBLISHED_SYNC_SHARE) / PUBLISHED_SYNC_SHARE
    model = get_model("llama-tiny")
    return RunConfig(
        name="demo",
        model=model,
        data=DataConfig(tokenizer=TokenizerConfig(vocab_size=model.vocab_size), seq_len=96),
        train=TrainConfig(total_tokens=20 * model.num_params, compute_dtype="float32"),
        slices=tuple(
            SliceConfig(name, region=region, speed=speed)
            for name, (region, speed) in PUBLISHED_SPEEDS.items()
        ),
        balance=BalanceConfig(inner_steps=inner_steps, batch_sizes=(batch,)),
        clock=ClockConfig(
            kind="modelled",
            model=clocked,
            seq_len=1024,
            wan=wan,
            base_step_seconds=round_compute / inner_steps,
            base_batch=batch,
        ),
        eval=EvalConfig(every_tokens=100_000, sequences=256, batch=64),
        checkpoint=CheckpointConfig(every_rounds=50),
    )


def published(size: str) -> RunConfig:
    """Base: a published size, 20 tokens a parameter of C4, four slices of one GPU, measured."""
    model = get_model(f"llama-{size}")
    return RunConfig(
        name=size,
        model=model,
        data=DataConfig(
            source=SourceConfig(kind="huggingface", dataset="allenai/c4", subset="realnewslike"),
            tokenizer=TokenizerConfig(vocab_size=model.vocab_size),
            valid_fraction=0.001,
        ),
        train=TrainConfig(total_tokens=20 * model.num_params),
        slices=tuple(SliceConfig(f"region{i}") for i in range(4)),
        balance=BalanceConfig(inner_steps=64, batch_sizes=(8, 16, 32, 64)),
        eval=EvalConfig(every_tokens=50_000_000, sequences=512, batch=16),
    )


def geomesh(base: RunConfig, tuned: Optimizers = TUNED) -> RunConfig:
    """Each slice its own work, signs with error feedback, Lion."""
    return _with(
        base,
        "geomesh",
        mode="adaptive",
        exchange=ExchangeConfig(codec="sign"),
        inner=tuned.lion,
        outer=tuned.sign_outer,
    )


def diloco(base: RunConfig, tuned: Optimizers = TUNED) -> RunConfig:
    """Equal work, float32, AdamW inside, Nesterov momentum outside.

    Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models".
    """
    return _with(
        base, "diloco", mode="equal", exchange=_EXACT, inner=tuned.adamw, outer=tuned.exact_outer
    )


def balancing_only(base: RunConfig, tuned: Optimizers = TUNED) -> RunConfig:
    """DiLoCo with each slice its own work."""
    return _with(
        base,
        "balancing-only",
        mode="adaptive",
        exchange=_EXACT,
        inner=tuned.adamw,
        outer=tuned.exact_outer,
    )


def signs_only(base: RunConfig, tuned: Optimizers = TUNED) -> RunConfig:
    """GeoMesh with equal work."""
    config = geomesh(base, tuned)
    return _with(
        config,
        "signs-only",
        mode="equal",
        exchange=config.exchange,
        inner=config.train.optimizer,
        outer=config.outer,
    )


def fp16(base: RunConfig, tuned: Optimizers = TUNED) -> RunConfig:
    """DiLoCo that exchanges float16."""
    return replace(
        diloco(base, tuned),
        name="fp16",
        exchange=ExchangeConfig(codec="fp16", error_feedback=False),
    )


def int8(base: RunConfig, tuned: Optimizers = TUNED) -> RunConfig:
    """DiLoCo that exchanges 8-bit integers."""
    return replace(
        diloco(base, tuned),
        name="int8",
        exchange=ExchangeConfig(codec="int8"),
    )


def diloco_lion(base: RunConfig, tuned: Optimizers = TUNED) -> RunConfig:
    """Control: DiLoCo with Lion inside."""
    config = diloco(base, tuned)
    return replace(config, name="diloco-lion", train=replace(config.train, optimizer=tuned.lion))


def geomesh_adamw(base: RunConfig, tuned: Optimizers = TUNED) -> RunConfig:
    """Control: GeoMesh with AdamW inside."""
    config = geomesh(base, tuned)
    return replace(config, name="geomesh-adamw", train=replace(config.train, optimizer=tuned.adamw))


def data_parallel(base: RunConfig, tuned: Optimizers = TUNED) -> RunConfig:
    """One gradient exchange a step: plain SGD of rate 1 inside, AdamW outside."""
    config = _with(
        base,
        "data-parallel",
        mode="equal",
        exchange=_EXACT,
        inner=OptimizerConfig(name="sgd", learning_rate=1.0),
        outer=OuterConfig(tuned.adamw, base.train.schedule),
    )
    return replace(
        config,
        balance=replace(config.balance, inner_steps=1, sync_share=None),
        train=replace(
            config.train,
            clip_norm=None,
            schedule=ScheduleConfig(decay="constant", warmup_fraction=0.0, final_fraction=1.0),
        ),
    )


def over_slices(config: RunConfig) -> RunConfig:
    """A run by one strategy as GeoMesh: a slice takes its global batch, or down to an eighth of it.

    Its two slices stand for those of a cluster file, its optimizers are not tuned. ConfigError for
    a run by CONA or a chain.
    """
    require(
        config.strategy,
        f"{config.name} goes by strategies that change, on one cluster; take a preset with one, or "
        "with slices, such as geomesh-150m",
    )
    batch = parse_strategy(config.strategy).global_batch
    sliced = replace(
        config,
        strategy="",
        scaling=None,
        noise=None,
        slices=(SliceConfig("region0"), SliceConfig("region1")),
        balance=BalanceConfig(
            inner_steps=64, batch_sizes=tuple(batch // n for n in (8, 4, 2, 1) if batch >= n)
        ),
    )
    return geomesh(sliced, UNTUNED)


METHODS: dict[str, Callable[..., RunConfig]] = {
    "geomesh": geomesh,
    "diloco": diloco,
    "balancing-only": balancing_only,
    "signs-only": signs_only,
    "fp16": fp16,
    "int8": int8,
    "diloco-lion": diloco_lion,
    "geomesh-adamw": geomesh_adamw,
    "data-parallel": data_parallel,
}

_EXACT = ExchangeConfig(codec="fp32", error_feedback=False)


def _with(
    base: RunConfig,
    name: str,
    *,
    mode: Literal["equal", "adaptive"],
    exchange: ExchangeConfig,
    inner: OptimizerConfig,
    outer: OuterConfig,
) -> RunConfig:
    return replace(
        base,
        name=name,
        balance=replace(base.balance, mode=mode),
        exchange=exchange,
        train=replace(base.train, optimizer=inner),
        outer=outer,
    )
