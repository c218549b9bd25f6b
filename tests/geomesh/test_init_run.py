# SPDX-License-Identifier: Apache-2.0
"""A run from weights: an autoregressive checkpoint becomes a diffusion model, over slices."""

import io
import shutil
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from made_text import words_and_cache
from rich.console import Console

import geojax.geomesh.trainer as trainer_module
from geojax import runs
from geojax.config import (
    BalanceConfig,
    ClockConfig,
    ConfigError,
    DataConfig,
    EvalConfig,
    MaskingConfig,
    OptimizerConfig,
    RunConfig,
    SliceConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
)
from geojax.geomesh.trainer import Trainer
from geojax.models.config import TransformerConfig
from geojax.models.transformer import init_params
from geojax.models.weights import save_safetensors
from geojax.track.metrics import read_records
from geojax.train.checkpoint import read_params
from geojax.train.initial import host_params

CAUSAL = TransformerConfig(vocab_size=257, dim=16, layers=1, heads=2, kv_heads=2, mlp_dim=24)
ADAPTED = replace(CAUSAL, vocab_size=258, bidirectional=True, shifted=True)


@pytest.fixture
def config(tmp_path):
    save_safetensors(init_params(CAUSAL, 7), CAUSAL, tmp_path / "weights")
    with words_and_cache(tmp_path, 12, lines=40) as text:
        yield RunConfig(
            name="adapted",
            model=ADAPTED,
            init=str(tmp_path / "weights"),
            data=DataConfig(
                source=SourceConfig(kind="files", paths=(str(text),)),
                tokenizer=TokenizerConfig(vocab_size=257),
                seq_len=16,
                valid_fraction=0.2,
                masking=MaskingConfig("diffusion"),
            ),
            train=TrainConfig(
                total_tokens=3 * 2 * 2 * 4 * 16,
                optimizer=OptimizerConfig(name="lion", learning_rate=1e-3),
                compute_dtype="float32",
            ),
            slices=tuple(SliceConfig(r, region=r, speed=1.0) for r in ("eastus", "westus2")),
            balance=BalanceConfig(inner_steps=2, batch_sizes=(4,)),
            clock=ClockConfig(
                kind="modelled", wan="geomesh-azure", base_step_seconds=1.0, base_batch=4
            ),
            eval=EvalConfig(sequences=8, batch=8),
        )


def test_a_run_begins_with_the_weights_and_goes_on_without_their_folder(
    config, tmp_path, monkeypatch
):
    monkeypatch.setattr(trainer_module, "Program", cache(trainer_module.Program))
    device = jax.local_devices()[:1]
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: device)
    began = []

    class Seen(Trainer):
        rounds = 9

        def __init__(self, *args):
            super().__init__(*args)
            if not self.resumed:
                began.append(jax.tree.map(np.array, self.workers[0].outer.params))

        def _end_round(self, *args):
            super()._end_round(*args)
            if self.position.round == self.rounds:
                self._stop.set()

    monkeypatch.setattr(trainer_module, "Trainer", Seen)
    quiet = Console(file=io.StringIO())
    assert runs.start(config, tmp_path / "whole", quiet)
    Seen.rounds = 1
    assert not runs.start(config, tmp_path / "stopped", quiet)
    shutil.rmtree(config.init)
    with pytest.raises(ConfigError):
        host_params(config, resumed=False)
    Seen.rounds = 9
    assert runs.resume(tmp_path / "stopped", quiet)

    theirs = jax.tree.map(np.asarray, init_params(CAUSAL, 7))
    assert len(began) == 2
    jax.tree.map(np.testing.assert_array_equal, began[0]["blocks"], theirs["blocks"])
    np.testing.assert_array_equal(began[0]["embed"][:257], theirs["embed"][:257])
    whole, stopped = (read_params(tmp_path / name)[0] for name in ("whole", "stopped"))
    jax.tree.map(np.testing.assert_array_equal, whole, stopped)
    losses = [
        r["loss"] for r in read_records(tmp_path / "whole" / "metrics.jsonl") if r["kind"] == "eval"
    ]
    assert losses[-1] < losses[0]
