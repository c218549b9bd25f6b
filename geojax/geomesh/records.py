# SPDX-License-Identifier: Apache-2.0
"""What a run writes down: its start, and every slice and round (fields of `metrics.jsonl`)."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from geojax.config import RunConfig
from geojax.geomesh.balance import Plan
from geojax.geomesh.clock import Traffic
from geojax.geomesh.sync import Contribution, Merged
from geojax.geomesh.timeline import Part
from geojax.geomesh.worker import Worker
from geojax.models.transformer import count_params
from geojax.track.console import format_bytes, format_count, format_seconds, format_share
from geojax.track.environment import machine, versions


def start_record(config: RunConfig, plan: Plan, traffic: Traffic) -> dict[str, Any]:
    """Fields of the `start` record."""
    return {
        "method": config.name,
        "clock": config.clock.kind,
        "seed": config.seed,
        "params": count_params(config.model),
        "clocked_params": traffic.params,
        "plan": [asdict(work) for work in plan.work],
        "tokens_per_round": plan.sequences * config.data.seq_len,
        "total_tokens": config.train.total_tokens,
        "codec": config.exchange.codec,
        "schedule": config.exchange.resolve_schedule(len(config.slices)),
        "lag_steps": [config.exchange.steps_ahead(work.inner_steps) for work in plan.work],
        "payload_bytes": traffic.payload_bytes,
        "fp32_bytes": traffic.fp32_bytes,
        "wire_bytes": traffic.wire_bytes,
        "versions": versions(),
        "machine": machine(),
    }


def slice_record(
    worker: Worker, contribution: Contribution, sent_bytes: int, traffic: Traffic
) -> dict[str, Any]:
    """Fields of a `slice` record but for its times; byte counts but `sent_bytes` are of the clocked
    model."""
    p = worker.ended
    return {
        "slice": worker.work.name,
        "batch": worker.work.batch,
        "steps": p.done,
        "tokens": p.tokens,
        "loss": p.loss / p.tokens if p.tokens else None,
        "grad_norm": p.grad_norm / p.steps if p.steps else None,
        "skipped": p.skipped,
        "merged": contribution.tokens > 0,
        "payload_bytes": traffic.payload_bytes,
        "wire_bytes": traffic.wire_bytes,
        "sent_bytes": sent_bytes,
        "captured_energy": contribution.energy.fraction,
        "rate_scale": worker.scale,
    }


def round_record(merged: Merged, traffic: Traffic) -> dict[str, Any]:
    """Fields of a `round` record that the exchange gives."""
    return {
        "payload_bytes": traffic.payload_bytes,
        "payload_ratio": traffic.payload_ratio,
        "wire_bytes": traffic.wire_bytes,
        "sign_agreement": merged.agreement.fraction,
    }


def part_record(
    worker: Worker,
    contribution: Contribution,
    sent_bytes: int,
    traffic: Traffic,
    part: Part,
    waited_seconds: float | None,
    busy_seconds: float,
) -> dict[str, Any]:
    """What the coordinator makes the `slice` record of one slice from, and of all of them the
    round's times."""
    mine = slice_record(worker, contribution, sent_bytes, traffic)
    return {
        "slice": mine | {"busy_seconds": busy_seconds},
        "seconds": part._asdict(),
        "waited_seconds": waited_seconds,
    }


def derived_rows(
    config: RunConfig,
    plan: Plan,
    traffic: Traffic,
    exchange_seconds: float | None,
    devices_shared: bool,
) -> list[tuple[str, str]]:
    """What a run prints before it starts: each derived quantity and where it comes from.

    `exchange_seconds`: modelled; None where it will be measured.
    """
    tokens, seq_len = config.train.total_tokens, config.data.seq_len
    round_tokens = plan.sequences * seq_len
    flops = config.model.train_flops_per_token(seq_len) * tokens
    schedule = config.exchange.resolve_schedule(len(config.slices))
    rows = [
        (
            "model",
            f"{format_count(count_params(config.model))} parameters, "
            f"{flops / 1e12:.3g} TFLOP for {format_count(tokens)} tokens "
            f"({tokens / count_params(config.model):.1f} a parameter)",
        ),
        (
            "round",
            f"{format_count(round_tokens)} tokens, {-(-tokens // round_tokens)} rounds, "
            f"{config.balance.mode} work with straggler idle "
            f"{format_share(plan.straggler_idle)} of compute",
        ),
    ]
    rows += [
        (
            f"slice {w.name}",
            f"{w.strategy}, batch {w.batch} ({format_count(w.batch * seq_len)} tokens a step), "
            f"{w.inner_steps} inner steps of {format_seconds(w.seconds_per_step)} = "
            f"{format_seconds(w.compute_seconds)}",
        )
        for w in plan.work
    ]
    if config.cona:
        ladder = config.cona.global_batches
        rows.append(
            (
                "cona",
                f"batches of {min(ladder)} to {max(ladder)} a slice, by the gradient's noise; "
                "begins with the plan above",
            )
        )
    took = "" if exchange_seconds is None else f", {format_seconds(exchange_seconds)}"
    rows.append(
        (
            "exchange",
            f"{config.exchange.codec} by {schedule}: {format_bytes(traffic.payload_bytes)} a slice "
            f"({traffic.payload_ratio:.1f}x under fp32), {format_bytes(traffic.wire_bytes)} sent"
            f"{took}",
        )
    )
    if config.exchange.overlap:
        steps = config.exchange.steps_ahead
        ahead = [f"{steps(w.inner_steps)} of {w.inner_steps}" for w in plan.work]
        rows.append(
            (
                "overlap",
                f"beside the next round's steps; its result is taken in after {', '.join(ahead)}",
            )
        )
    if config.clock.kind == "modelled":
        rows.append(
            (
                "clock",
                f"modelled: {format_count(traffic.params)} parameters over "
                f"{config.clock.wan}; convergence is real",
            )
        )
    else:
        shared = ", slices that share a device wait for each other" if devices_shared else ""
        rows.append(("clock", f"measured: wall time{shared}"))
    return rows


def left_out(headers: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Slices whose pseudo-gradient was not merged."""
    return [name for name, header in zip(names, headers, strict=True) if not header.tokens]
