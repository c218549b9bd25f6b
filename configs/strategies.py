# SPDX-License-Identifier: Apache-2.0
"""Runs on one cluster by a strategy: tiny models on any machine, published ones on eight GPUs."""

from geojax.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    PlatformConfig,
    RunConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
    default_masking,
)
from geojax.models.config import TransformerConfig, get_model

_ADAMW = OptimizerConfig(name="adamw", learning_rate=3e-3, weight_decay=0.1)


def tiny(name: str) -> RunConfig:
    """A model of a quarter of a million parameters on Wikipedia extracts, on one device."""
    model = get_model(name)
    masking = default_masking(model)
    return RunConfig(
        name=name,
        model=model,
        data=DataConfig(
            tokenizer=TokenizerConfig(vocab_size=model.vocab_size - (masking is not None)),
            seq_len=96,
            masking=masking,
        ),
        train=TrainConfig(total_tokens=400_000, optimizer=_ADAMW, compute_dtype="float32"),
        strategy="dp1-tp1-pp1-mb16-gb16",
        eval=EvalConfig(every_tokens=100_000, sequences=128, batch=32),
    )


def large(name: str, strategy: str, optimizer: OptimizerConfig, seq_len: int) -> RunConfig:
    """A published model on C4 and eight GPUs of 80 GB."""
    model = get_model(name)
    masking = default_masking(model)
    return RunConfig(
        name=name,
        model=model,
        data=DataConfig(
            source=SourceConfig(kind="huggingface", dataset="allenai/c4", subset="realnewslike"),
            tokenizer=TokenizerConfig(vocab_size=_tokenizer_entries(model)),
            seq_len=seq_len,
            masking=masking,
            valid_fraction=0.001,
        ),
        train=TrainConfig(total_tokens=20 * model.num_params, optimizer=optimizer),
        strategy=strategy,
        eval=EvalConfig(every_tokens=500_000_000, sequences=512, batch=8),
        checkpoint=CheckpointConfig(every_rounds=50),
        platform=PlatformConfig(xla_preset="throughput"),
    )


def _tokenizer_entries(model: TransformerConfig) -> int:
    """What is trained on the text; a vocabulary of six digits would take long for little."""
    return min(model.vocab_size - (not model.causal), 32_000)
