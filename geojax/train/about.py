# SPDX-License-Identifier: Apache-2.0
"""What a run on one cluster says of itself before it begins."""

from dataclasses import asdict
from typing import Any

from geojax.cona.controller import Controller, Pilot
from geojax.config import RunConfig
from geojax.meshes.strategy import Strategy, parse_strategy
from geojax.models.transformer import count_params
from geojax.track.console import format_bytes, format_count, format_share
from geojax.track.environment import machine, versions
from geojax.train.program import Program


def describe(config: RunConfig, pilot: Pilot, program: Program) -> list[tuple[str, str]]:
    """What the run derived from its config, as (label, value)."""
    strategy, seq_len, total = pilot.strategy, config.data.seq_len, config.train.total_tokens
    step_tokens = strategy.global_batch * seq_len
    flops = config.model.train_flops_per_token(seq_len)
    steps = "" if len(set(batches(config))) > 1 else f"; {-(-total // step_tokens)} steps"
    rows = [
        (
            "model",
            f"{format_count(count_params(config.model))} parameters, {config.model.family}; "
            f"{flops * total / 1e12:.3g} TFLOP for {format_count(total)} tokens "
            f"({total / count_params(config.model):.1f} a parameter)",
        ),
        (
            "strategy",
            f"{strategy}: {strategy.devices} devices, {strategy.micro_batches} micro-batches, "
            f"bubble {format_share(strategy.bubble)}",
        ),
        (
            "step",
            f"{strategy.global_batch} sequences of {seq_len}, {format_count(step_tokens)} tokens, "
            f"{flops * step_tokens / 1e12:.3g} TFLOP{steps}",
        ),
        ("state", f"{format_bytes(program.state_bytes)} a device"),
    ]
    if isinstance(pilot, Controller):
        rows.append(("cona", pilot.describe()))
    if config.chain:
        legs = ", ".join(
            f"{leg.strategy} from {format_count(leg.tokens)} tokens"
            + (", which the run does not reach" if leg.tokens >= total else "")
            for leg in config.chain
        )
        rows.append(("chain", legs))
    return [*rows, ("clock", _clock(config))]


def start_record(config: RunConfig, strategy: Strategy) -> dict[str, Any]:
    """Fields of the `start` record of a run that begins by `strategy`."""
    return {
        "method": config.name,
        "clock": config.clock.kind,
        "seed": config.seed,
        "params": count_params(config.model),
        "clocked_params": config.clocked_model().num_params,
        "strategy": str(strategy),
        "cona": config.cona and asdict(config.cona),
        "scaling": config.scaling and asdict(config.scaling),
        "total_tokens": config.train.total_tokens,
        "versions": versions(),
        "machine": machine(),
    }


def batches(config: RunConfig) -> list[int]:
    """Sequences a step that the run may take."""
    if config.cona:
        return list(config.cona.global_batches)
    texts = [config.strategy] if config.strategy else [leg.strategy for leg in config.chain]
    return [parse_strategy(text).global_batch for text in texts]


def _clock(config: RunConfig) -> str:
    clock = config.clock
    if clock.kind == "measured":
        return "measured: wall time of steps"
    return (
        f"modelled: steps of {clock.model or config.name} on {clock.nodes} x "
        f"{clock.gpus_per_node} {clock.gpu}; the steps themselves run here on one device"
    )
