# SPDX-License-Identifier: Apache-2.0
"""A diffusion model over slices: GeoMesh trains it like any other."""

import json
from dataclasses import replace

import pytest

from geojax import runs
from geojax.config import BalanceConfig, EvalConfig, MaskingConfig, SourceConfig
from geojax.configs import load_config
from geojax.models.config import get_model


@pytest.mark.full
def test_geomesh_trains_a_diffusion_model(tmp_path):
    base = load_config("quickstart")
    config = replace(
        base,
        name="slices",
        model=get_model("dream-tiny"),
        data=replace(
            base.data,
            source=SourceConfig(kind="pydoc"),
            tokenizer=replace(base.data.tokenizer, vocab_size=511),
            seq_len=32,
            masking=MaskingConfig(kind="diffusion", cut=0.1),
        ),
        train=replace(base.train, total_tokens=10_000),
        balance=BalanceConfig(inner_steps=5, batch_sizes=(4,)),
        eval=EvalConfig(sequences=16, batch=8, draws=2),
    )
    assert runs.start(config, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [r for r in map(json.loads, lines) if r["kind"] == "eval"]
    assert found[-1]["loss"] < found[0]["loss"] - 0.1
    assert all(r["bound"] for r in found)
