# SPDX-License-Identifier: Apache-2.0
"""A made-up run whose every figure is known, written by the writer that real runs use."""

import math
from pathlib import Path

import pytest

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


@pytest.fixture
def make_run(tmp_path):
    """`write_run` into a folder of the given name; returns the folder."""
    return lambda name="geomesh", **figures: write_run(
        tmp_path / name, figures.pop("method", name), **figures
    )
