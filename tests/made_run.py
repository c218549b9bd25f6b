# SPDX-License-Identifier: Apache-2.0
"""Made-up runs whose every figure is known, written by the writer that real runs use."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from geojax.cona.decision import Known, Situation, decide, record
from geojax.config import ConaConfig, ScalingConfig
from geojax.track.metrics import MetricsWriter

NAMES = ("h100", "a100", "l40s", "rtx6000")
SPEEDS = (2.57, 1.6, 1.2, 1.0)
FP32_BYTES = 600_000_000


def write_run(
    folder: Path,
    method: str = "geomesh",
    *,
    seed: int = 0,
    rounds: int = 6,
    clock: str = "modelled",
    balanced: bool = True,
    payload_bytes: int = 18_900_000,
    wan_seconds: float = 60.0,
    perplexities: tuple[float | None, ...] = (512.0, 90.0, 40.0, 23.0),
) -> Path:
    """A run of evaluations spread evenly over its rounds; tokens and seconds grow evenly."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    steps = [round(100 * speed) if balanced else 100 for speed in SPEEDS]
    seconds_a_step = [1 / speed for speed in SPEEDS]
    computes = [h * t for h, t in zip(steps, seconds_a_step, strict=True)]
    outer_seconds = 2.0
    round_seconds = max(computes) + wan_seconds + outer_seconds
    tokens = [h * 8 * 1024 for h in steps]
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        metrics.write(
            "start",
            method=method,
            clock=clock,
            seed=seed,
            params=1_200_000,
            clocked_params=150_000_000,
            plan=[
                {"slice": n, "batch": 8, "inner_steps": h, "seconds_per_step": t}
                for n, h, t in zip(NAMES, steps, seconds_a_step, strict=True)
            ],
            tokens_per_round=sum(tokens),
            total_tokens=rounds * sum(tokens),
            schedule="gather",
            codec="sign",
            payload_bytes=payload_bytes,
            fp32_bytes=FP32_BYTES,
            wire_bytes=3 * payload_bytes,
            versions={"jax": "0.12.0", "numpy": "2.1.0"},
            machine="a made-up machine",
        )
        for number in range(rounds + 1):
            so_far = number * sum(tokens)
            if number:
                for name, h, n, compute in zip(NAMES, steps, tokens, computes, strict=True):
                    metrics.write(
                        "slice",
                        round=number,
                        slice=name,
                        batch=8,
                        steps=h,
                        tokens=n,
                        loss=6.0 / number,
                        grad_norm=1.0,
                        skipped=0,
                        merged=True,
                        compute_seconds=compute,
                        straggler_seconds=max(computes) - compute,
                        wan_seconds=wan_seconds,
                        outer_seconds=outer_seconds,
                        payload_bytes=payload_bytes,
                        wire_bytes=3 * payload_bytes,
                        sent_bytes=1000,
                        captured_energy=0.64,
                    )
                metrics.write(
                    "round",
                    round=number,
                    tokens=so_far,
                    seconds=number * round_seconds,
                    round_seconds=round_seconds,
                    payload_bytes=payload_bytes,
                    payload_ratio=FP32_BYTES / payload_bytes,
                    wire_bytes=3 * payload_bytes,
                    sign_agreement=0.55,
                    hash="c0ffee",
                    left_out=[],
                    wall_seconds=float(number),
                )
            which, rest = divmod(number * (len(perplexities) - 1), rounds)
            if not rest:
                perplexity = perplexities[which]
                metrics.write(
                    "eval",
                    round=number,
                    tokens=so_far,
                    seconds=number * round_seconds,
                    loss=None if perplexity is None else math.log(perplexity),
                    perplexity=perplexity,
                    sequences=128,
                )
        metrics.write(
            "end", round=rounds, tokens=so_far, seconds=number * round_seconds, reason="tokens"
        )
    return folder


def write_chained(folder: Path, rounds: int = 6) -> Path:
    """A run on one cluster that CONA moves from a small batch to a larger one as noise grows; its
    decisions are those that CONA makes of what is recorded."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"cona": {"global_batches": [8, 32]}}))
    cona, scaling = ConaConfig((8, 32), dwell_rounds=1), ScalingConfig(base_batch=8)
    options = (
        Known("dp1-tp1-pp1-mb8-gb8", 8, 1.0, 0.0, True, True, True),
        Known("dp4-tp1-pp1-mb8-gb32", 32, 1.5, 0.0, True, True, True),
    )
    present, previous, here, seconds, tokens = options[0], None, 0, 0.0, 0
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        metrics.write(
            "start",
            method="chained",
            clock="modelled",
            seed=0,
            params=1_200_000,
            clocked_params=1_300_000_000,
            strategy=present.name,
            cona=asdict(cona),
            scaling=asdict(scaling),
            total_tokens=rounds * 4096,
            versions={"jax": "0.12.0"},
            machine="a made-up machine",
        )
        for number in range(rounds + 1):
            if number:
                here += 1
                took = 4096 / 64 / present.batch * present.seconds
                seconds, tokens = seconds + took, tokens + 4096
                at = {"round": number, "tokens": tokens}
                value, low, high = 4.0 * number**2, 2.0 * number**2, 8.0 * number**2
                noise = {"value": value, "low": low, "high": high, "source": ""}
                work = _alone(present.batch, took)
                metrics.write("slice", round=number, tokens=4096, **work)
                metrics.write(
                    "round",
                    **at,
                    step=number * 10,
                    seconds=seconds,
                    round_seconds=took,
                    strategy=present.name,
                    noise=noise,
                    payload_ratio=None,
                )
                now = Situation(
                    number,
                    tokens // 64,
                    rounds * 64,
                    seconds,
                    present.name,
                    previous,
                    here,
                    False,
                    (value, low, high),
                    0.0,
                    0.0,
                    options,
                )
                decision = decide(now, cona, scaling.rate_rule())
                metrics.write("decision", **at, **record(now, decision))
                if decision.kind == "switch":
                    places = {"from": present.name, "to": decision.to}
                    why = {"decision": "switch", "why": decision.reason, "switch_seconds": 0.0}
                    metrics.write("switch", **at, **places, **why)
                    previous, here = present.name, 0
                    present = next(o for o in options if o.name == decision.to)
            loss = 5.0 - number / 4
            at = {"round": number, "tokens": tokens, "seconds": seconds}
            metrics.write("eval", **at, loss=loss, perplexity=math.exp(loss))
        metrics.write("end", reason="tokens", **at)
    return folder


def _alone(batch: int, seconds: float) -> dict:
    """Fields of a slice record of a run on one cluster."""
    return {
        "slice": "all",
        "batch": batch,
        "steps": 10,
        "loss": 4.0,
        "compute_seconds": seconds,
        **{f"{part}_seconds": 0.0 for part in ("straggler", "wan", "outer")},
        **{f"{kind}_bytes": 0 for kind in ("payload", "wire")},
    }


@pytest.fixture
def make_run(tmp_path):
    """`write_run` into a folder of the given name; returns the folder."""
    return lambda name="geomesh", **figures: write_run(
        tmp_path / name, figures.pop("method", name), **figures
    )


def figures(path: Path) -> dict:
    """Of a file of figures, which says what made it."""
    content = json.loads(path.read_text())
    assert content["command"].startswith("geojax")
    assert content.keys() >= {"generated", "clock", "machine", "versions"}
    return content
