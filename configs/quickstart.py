# SPDX-License-Identifier: Apache-2.0
"""A first run on any machine: real text, two slices on whatever device is there, real time."""

from geojax.config import (
    BalanceConfig,
    DataConfig,
    EvalConfig,
    RunConfig,
    SliceConfig,
    TokenizerConfig,
    TrainConfig,
)
from geojax.configs.geomesh import TUNED
from geojax.models.config import get_model


def quickstart() -> RunConfig:
    """GeoMesh over two slices that share this machine; half a minute on 2 CPU cores."""
    model = get_model("llama-tiny")
    return RunConfig(
        name="quickstart",
        model=model,
        data=DataConfig(tokenizer=TokenizerConfig(vocab_size=model.vocab_size), seq_len=96),
        train=TrainConfig(
            total_tokens=400_000,
            optimizer=TUNED.lion,
            compute_dtype="float32",
        ),
        slices=(SliceConfig("east"), SliceConfig("west")),
        balance=BalanceConfig(inner_steps=20, batch_sizes=(4, 8)),
        outer=TUNED.sign_outer,
        eval=EvalConfig(every_tokens=100_000, sequences=128, batch=64),
    )
