# SPDX-License-Identifier: Apache-2.0
"""A diffusion model of generated tasks, on which reuse of prefixes is measured."""

from geojax.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    MaskingConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    SourceConfig,
    TrainConfig,
)
from geojax.models.config import get_model

_ROWS, _TOKENS, _STEPS = 32, 80, 8_000


def dlm_tasks() -> RunConfig:
    """Eight layers on tasks with one right answer, whose requests have prefixes; hours on CPU."""
    return RunConfig(
        name="dlm-tasks",
        model=get_model("dlm-tasks"),
        data=DataConfig(
            source=SourceConfig(kind="tasks"),
            seq_len=_TOKENS,
            masking=MaskingConfig(kind="diffusion"),
        ),
        train=TrainConfig(
            total_tokens=_ROWS * _TOKENS * _STEPS,
            optimizer=OptimizerConfig(name="adamw", learning_rate=3e-3, b2=0.98, weight_decay=0.05),
            schedule=ScheduleConfig(decay="linear", warmup_fraction=0.01, final_fraction=0.03),
            compute_dtype="float32",
            round_steps=100,
        ),
        strategy=f"dp1-tp1-pp1-mb{_ROWS}-gb{_ROWS}",
        eval=EvalConfig(every_tokens=500 * _ROWS * _TOKENS, sequences=512, batch=64),
        checkpoint=CheckpointConfig(every_rounds=2),
    )
