# SPDX-License-Identifier: Apache-2.0
import hashlib
import json
import math
from dataclasses import replace

import jax
import numpy as np
import oracle
import pytest
from checkpoints import make, stored
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from geojax.config import ConfigError, DataConfig, MaskingConfig, SourceConfig
from geojax.convert import convert, run_convert
from geojax.data import read_tokenizer
from geojax.models.config import MODELS
from geojax.models.transformer import abstract_params
from geojax.models.weights import read_config, read_special, render_chat, save_safetensors
from geojax.score import perplexity

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 280,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": None,
    "n_positions": 32,
    "layer_norm_epsilon": 1e-5,
}
TEXT = [f"{i} mice and {i * i} cats sat on übergroße mats.\n" * 3 for i in range(60)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GEOJAX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path):
    """A folder of a small random GPT-2 with a tokenizer."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT2))
    save_file(oracle.gpt2_file(GPT2, np.random.default_rng(0)), folder / "model.safetensors")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(TEXT, trainer)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("of no use here")
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT))
    return DataConfig(SourceConfig("files", (str(path),)), seq_len=32, valid_fraction=0.3)


def test_a_converted_folder_has_the_same_tensors_and_tokenizer(source, tmp_path):
    done = convert(source, tmp_path / "target")
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "target"))
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(after[name], before[name])
    assert done.tensors == len(after)
    assert done.weight_bytes == (tmp_path / "target" / "model.safetensors").stat().st_size
    assert done.config.vocab_size == 280
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "target" / name).read_text() == (source / name).read_text()
    assert not (tmp_path / "target" / "pytorch_model.bin").exists()


def test_bfloat16_takes_half_the_room_and_rounds_once(source, tmp_path):
    convert(source, tmp_path / "target", "bfloat16")
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "target"))
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor.astype(after[name].dtype))
        assert after[name].nbytes == tensor.nbytes // 2
    assert json.loads((tmp_path / "target" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("case", ["llada", "dream", "qwen2-tied"])
def test_models_of_diffusion_keep_their_bits_ids_and_template(case, tmp_path):
    source, tensors = make(tmp_path / "source", case)
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (source / "merges.txt").write_text("a b")
    target = tmp_path / "target"
    done = convert(source, target, max_shard_bytes=20_000)
    assert (target / "model.safetensors.index.json").is_file()
    found = stored(target)
    assert found.keys() == tensors.keys()
    for name in tensors:
        np.testing.assert_array_equal(found[name], tensors[name])
    assert read_config(target) == done.config == read_config(source)
    special = read_special(target)
    assert special == read_special(source)
    assert special.mask == {"llada": 48, "dream": 49}.get(case)
    assert render_chat(target, [{"role": "user", "content": "hi"}]) == "hi"
    assert (target / "merges.txt").read_text() == "a b"


def test_a_source_may_have_no_tokenizer_and_says_so(source, tmp_path, capsys):
    (source / "tokenizer.json").unlink()
    run_convert(source, tmp_path / "target", "float32")
    printed = capsys.readouterr().out
    assert "none: the source has no tokenizer.json" in printed
    tensors = load_file(source / "model.safetensors").values()
    assert f"parameters            {sum(tensor.size for tensor in tensors):,}\n" in printed
    assert not (tmp_path / "target" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, t: (s / "none", t, "float32"), "neither a folder nor a .gguf file"),
        (lambda s, t: (s / "pytorch_model.bin", t, "float32"), "neither a folder nor a .gguf"),
        (lambda s, t: (s, s, "float32"), "is not an empty folder"),
        (lambda s, t: (s, s / "config.json", "float32"), "is not an empty folder"),
        (lambda s, t: (s, t, "int4"), "'int4' cannot be written; use float32 or bfloat16"),
        (lambda s, t: (s, s / "config.json" / "x", "float32"), "cannot be written"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(change, message, source, tmp_path):
    before = sorted(source.iterdir())
    with pytest.raises(ConfigError, match=message):
        run_convert(*change(source, tmp_path / "target"))
    assert not (tmp_path / "target").exists()
    assert sorted(source.iterdir()) == before


@pytest.mark.parametrize("document_mask", [False, True])
def test_perplexity_is_that_of_the_formulas(document_mask, source, text, tmp_path):
    data = DataConfig(text.source, seq_len=32, valid_fraction=0.3, document_mask=document_mask)
    found = perplexity(source, data, sequences=5, batch=2)
    # The stream: held-out documents in the order of the file, each followed by end-of-text.
    tokenizer, stream = read_tokenizer(source / "tokenizer.json"), []
    for line in TEXT:
        if int.from_bytes(hashlib.sha256(line.encode()).digest()[:6], "big") / 2**48 < 0.3:
            stream += [*tokenizer.encode_batch([line])[0], tokenizer.eos_id]
    windows = np.array(stream[: 5 * 32 + 1])
    tokens, targets = windows[:-1].reshape(5, 32), windows[1:].reshape(5, 32)
    positions, segments = np.tile(np.arange(32), (5, 1)), np.zeros((5, 32), int)
    weights = np.ones((5, 32))
    if document_mask:
        for row, place in np.argwhere(tokens[:, :-1] == tokenizer.eos_id):
            segments[row, place + 1 :] += 1
            positions[row, place + 1 :] = np.arange(31 - place)
        weights = (tokens != tokenizer.eos_id).astype(float)
        assert weights.min() == 0
    tensors = load_file(source / "model.safetensors")
    logits = oracle.gpt2(tensors, GPT2, tokens, positions, segments)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(logs, targets[..., None], -1)[..., 0] * weights
    mean = nats.sum() / weights.sum()
    assert found["sequences"] == 5
    assert found["tokens"] == weights.sum()
    # float32 against float64 over logits of size 10.
    assert found["nats_per_token"] == pytest.approx(mean, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
    said = tokenizer.decode(targets[weights > 0]).encode()
    assert found["bits_per_byte"] == pytest.approx(nats.sum() / math.log(2) / len(said), rel=1e-5)
    assert found["bytes_per_token"] == pytest.approx(len(said) / weights.sum())
    if not document_mask:  # sequences of equal lengths: the usual error of a mean
        spread = (nats.sum(-1) / 32).std(ddof=1) / math.sqrt(5)
        assert found["standard_error"] == pytest.approx(spread, rel=1e-4)


def test_a_model_that_knows_nothing_is_as_unsure_as_a_die(source, text):
    tensors = load_file(source / "model.safetensors")
    tensors["transformer.wte.weight"][:] = 0
    save_file(tensors, source / "model.safetensors")
    lines = []
    found = perplexity(source, text, 3, 3, progress=lines.append)
    assert found["perplexity"] == pytest.approx(280, rel=1e-5)
    assert found["standard_error"] == pytest.approx(0, abs=1e-6)
    assert lines[-1] == "scored 3 sequences"


def test_masked_text_is_for_models_that_see_all_of_it(source, text, tmp_path):
    masked = DataConfig(text.source, seq_len=32, valid_fraction=0.3, masking=MaskingConfig())
    with pytest.raises(ConfigError, match="must be unset for a gpt"):
        perplexity(source, masked, 2, 2)
    config = replace(MODELS["bert-tiny"], layers=1)
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.01, "f4"), abstract_params(config))
    save_safetensors(params, config, tmp_path / "bert")
    (tmp_path / "bert" / "tokenizer.json").write_text((source / "tokenizer.json").read_text())
    with pytest.raises(ConfigError, match="must be set for a bert"):
        perplexity(tmp_path / "bert", text, 2, 2)
    found = perplexity(tmp_path / "bert", masked, 4, 2)
    assert found["tokens"] == 4 * 5  # round(0.15 * 32) of a sequence
    assert found["perplexity"] == pytest.approx(512, rel=1e-4)  # every row of it is alike


def test_sequences_beyond_the_context_are_refused(source, text):
    data = DataConfig(text.source, seq_len=33, valid_fraction=0.3)
    with pytest.raises(ConfigError, match="33 is beyond the model's context 32"):
        perplexity(source, data, 2, 2)
