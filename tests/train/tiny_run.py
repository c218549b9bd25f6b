# SPDX-License-Identifier: Apache-2.0
"""A run of a second, and how tests read it."""

import signal
from pathlib import Path

import pytest
from rich.console import Console

from geojax import runs
from geojax.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    RunConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
)
from geojax.models.config import TransformerConfig
from geojax.track.console import RunConsole
from geojax.track.metrics import read_records

VOCAB, SEQ_LEN, BATCH = 258, 16, 8
QUIET = Console(quiet=True)
LLAMA = TransformerConfig(VOCAB, dim=32, layers=4, heads=4, kv_heads=2, mlp_dim=48)


def tiny_run(text: Path) -> RunConfig:
    """24 steps of 8 sequences on one device."""
    return RunConfig(
        name="strategy",
        model=LLAMA,
        data=DataConfig(
            source=SourceConfig(kind="files", paths=(str(text),)),
            tokenizer=TokenizerConfig(vocab_size=257),
            seq_len=SEQ_LEN,
            valid_fraction=0.2,
        ),
        train=TrainConfig(
            total_tokens=24 * BATCH * SEQ_LEN,
            optimizer=OptimizerConfig(name="adamw", learning_rate=1e-3),
            compute_dtype="float32",
            round_steps=4,
        ),
        strategy="dp1-tp1-pp1-mb4-gb8",
        eval=EvalConfig(every_tokens=8 * BATCH * SEQ_LEN, sequences=16, batch=8),
        checkpoint=CheckpointConfig(every_rounds=2),
    )


def records(folder: Path, kind: str) -> list[dict]:
    return [r for r in read_records(folder / "metrics.jsonl") if r["kind"] == kind]


def stop_after(config: RunConfig | None, folder: Path, rounds: int, strategy: str | None = None):
    """Start a run, or resume it where there is no config, until `rounds` rounds are done; then stop
    as Ctrl-C does."""
    original = RunConsole.step_line

    def step_line(self, record, work):
        original(self, record, work)
        if record["step"] == 4 * rounds:
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunConsole, "step_line", step_line)
        if config is not None:
            assert not runs.start(config, folder, QUIET)
        else:
            assert not runs.resume(folder, QUIET, strategy=strategy)
