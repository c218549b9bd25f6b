# SPDX-License-Identifier: Apache-2.0
"""Runs whose strategy follows the noise of the gradient."""

from dataclasses import replace

from geojax.config import ClockConfig, ConaConfig, NoiseConfig, RunConfig, ScalingConfig
from geojax.configs.strategies import tiny

MODELLED = {"gpt-tiny": "gpt-3-1.3b", "bert-tiny": "bert-large", "llama-tiny": "llama-3.2-1b"}
"""The published model that a tiny one stands for on the modelled clock."""


def cona_tiny(name: str) -> RunConfig:
    """A tiny model by CONA; times are those of a published one on eight A100s, modelled."""
    base = tiny(name)
    return replace(
        base,
        name=f"cona-{name}",
        strategy="",
        train=replace(base.train, total_tokens=800_000, micro_batch=8),
        cona=ConaConfig(global_batches=(4, 8, 16, 32, 64, 128)),
        scaling=ScalingConfig(base_batch=16, rule="sqrt", cap=True),
        noise=NoiseConfig(window_samples=200),
        clock=ClockConfig(
            kind="modelled",
            model=MODELLED[name],
            gpu="a100-80gb",
            seq_len=512 if name == "bert-tiny" else 1024,
            # A run of so few tokens lasts a minute there; a switch is as short beside it as it
            # would be in a run of days.
            switch_seconds=0.01,
        ),
    )


def cona_large(base: RunConfig, batches: tuple[int, ...], base_batch: int) -> RunConfig:
    """A published model by CONA on C4 and the GPUs there are."""
    return replace(
        base,
        name=f"cona-{base.name}",
        strategy="",
        cona=ConaConfig(global_batches=batches),
        scaling=ScalingConfig(base_batch=base_batch, rule="sqrt", cap=True),
    )
