# SPDX-License-Identifier: Apache-2.0
"""A causal model's weights trained on as a masked diffusion model, and given away as a Dream."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_run import BATCH, LLAMA, QUIET, SEQ_LEN, VOCAB, records, stop_after

from geojax import runs
from geojax.config import MaskingConfig
from geojax.convert import convert
from geojax.models.transformer import make_apply
from geojax.models.weights import load_safetensors, read_config, read_special
from geojax.trained import read_run

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.runs
def test_an_adapted_llama_trains_resumes_and_is_a_dream_elsewhere(config, tmp_path):
    causal = replace(config, model=replace(LLAMA, vocab_size=VOCAB - 1))
    assert runs.start(causal, tmp_path / "causal", QUIET)
    convert(tmp_path / "causal", tmp_path / "weights")

    adapted = replace(
        config,
        model=replace(LLAMA, bidirectional=True, shifted=True),
        data=replace(config.data, masking=MaskingConfig(kind="diffusion")),
        train=replace(config.train, total_tokens=8 * BATCH * SEQ_LEN),
    )
    assert runs.start(adapted, tmp_path / "fresh", QUIET)
    adapted = replace(adapted, init=str(tmp_path / "weights"))
    stop_after(adapted, tmp_path / "run", 1)
    first = {name: records(tmp_path / name, "eval")[0]["loss"] for name in ("fresh", "run")}
    assert first["run"] < first["fresh"] - 0.02, "what the causal model learnt is of use"

    shutil.rmtree(tmp_path / "weights")  # a resumed run does not need them
    assert runs.resume(tmp_path / "run", QUIET)

    said = []
    convert(tmp_path / "run", tmp_path / "dream", progress=said.append)
    assert any("written as a Dream, whose biases are zero" in line for line in said)
    _, ours, special, _ = read_run(tmp_path / "run")
    dream = read_config(tmp_path / "dream")
    assert dream == replace(adapted.model, qkv_bias=True, dropout=dream.dropout)
    assert read_special(tmp_path / "dream").mask == special.mask
    theirs = load_safetensors(tmp_path / "dream", dream)
    tokens = np.arange(2 * SEQ_LEN, dtype=np.int32).reshape(2, SEQ_LEN)
    positions = np.arange(SEQ_LEN)[None]
    logits = [
        jax.jit(make_apply(model))(params, tokens, positions)
        for model, params in ((adapted.model, ours), (dream, theirs))
    ]
    np.testing.assert_array_equal(*logits)
