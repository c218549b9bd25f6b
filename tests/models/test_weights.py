# SPDX-License-Identifier: Apache-2.0
import json
import math
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from checkpoints import BERT, CASES, GPT2, LLAMA, make, random_params, stored, write
from safetensors import safe_open

from geojax.config import ConfigError
from geojax.models.config import MODELS, TransformerConfig
from geojax.models.transformer import abstract_params, make_apply
from geojax.models.weights import (
    file_shapes,
    files,
    huggingface_tensors,
    load_safetensors,
    read_config,
    save_safetensors,
)

SMALL = [name for name in MODELS if name.endswith("-tiny")]


def packed(vocab_size=50):
    """Tokens, positions and segments of sequences that hold documents of 5 and 7 tokens."""
    tokens = np.random.default_rng(1).integers(0, vocab_size, (2, 12), np.int32)
    positions = np.tile(np.r_[0:5, 0:7].astype(np.int32), (2, 1))
    return tokens, positions, np.tile(np.repeat([0, 1], [5, 7]).astype(np.int32), (2, 1))


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert found[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_computes_what_its_names_mean(case, tmp_path):
    hf, _, forward = CASES[case]
    folder, tensors = make(tmp_path, case)
    config = read_config(folder)
    logits = make_apply(config)(load_safetensors(folder, config), *packed())
    assert logits.shape == (2, 12, 50)
    # float32 against float64 on logits of size 1 to 10: 1e-4 is tens of its roundings.
    np.testing.assert_allclose(logits, forward(tensors, hf, *packed()), atol=1e-4, rtol=1e-4)


def test_tokens_of_a_bert_are_of_its_first_type(tmp_path):
    folder, tensors = make(tmp_path, "bert")
    name = "bert.embeddings.token_type_embeddings.weight"
    write(folder, BERT, tensors | {name: tensors[name][::-1].copy()})
    config = read_config(folder)
    logits = make_apply(config)(load_safetensors(folder, config), *packed())
    second = oracle.bert(tensors, BERT, *packed(), types=1)
    np.testing.assert_allclose(logits, second, atol=1e-4, rtol=1e-4)
    assert np.abs(second - oracle.bert(tensors, BERT, *packed())).max() > 0.1


@pytest.mark.parametrize("case", ["llada", "dream"])
def test_a_model_of_diffusion_sees_what_comes_after(case, tmp_path):
    folder, _ = make(tmp_path, case)
    tokens, positions, segments = packed()
    changed = tokens.copy()
    changed[:, 11] += 1
    config = read_config(folder)
    params, apply = load_safetensors(folder, config), make_apply(config)
    moved = apply(params, changed, positions, segments) - apply(params, *packed())
    assert np.abs(moved[:, 5:]).max(-1).min() > 1e-3
    assert not np.abs(moved[:, :5]).any()  # another document


@pytest.mark.parametrize("case", CASES)
def test_export_after_import_is_the_file_again(case, tmp_path):
    folder, tensors = make(tmp_path / "in", case)
    config = read_config(folder)
    save_safetensors(load_safetensors(folder, config), config, tmp_path / "out")
    assert_same_bits(stored(tmp_path / "out"), tensors)
    assert read_config(tmp_path / "out") == config


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("name", [*SMALL, "untied"])
def test_import_after_export_is_the_parameters_again(name, shards, tmp_path):
    config = MODELS.get(name) or TransformerConfig(50, 32, 2, 4, 2, 44, False)
    params = random_params(config)
    save_safetensors(params, config, tmp_path / "out", 4 * config.num_params / (shards - 0.5))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) >= shards
    again = load_safetensors(tmp_path / "out", read_config(tmp_path / "out"))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_device_arrays_are_exported_like_host_arrays(tmp_path):
    config = MODELS["gpt-tiny"]
    params = random_params(config)
    save_safetensors(params, config, tmp_path / "host")
    save_safetensors(jax.tree.map(jnp.asarray, params), config, tmp_path / "device")
    assert_same_bits(stored(tmp_path / "device"), stored(tmp_path / "host"))


def test_an_index_lists_every_tensor_once(tmp_path):
    config = MODELS["gpt-tiny"]
    save_safetensors(random_params(config), config, tmp_path / "out", 100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = [f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors")]
    biggest = 4 * 512 * 64  # the embedding, larger than a shard may be, has one of its own
    assert max(sizes) < biggest + 10_000
    assert sorted(sizes)[-2] < 110_000
    assert index["metadata"]["total_size"] == 4 * config.num_params
    assert index["weight_map"].keys() == file_shapes(huggingface_tensors(config), config).keys()
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, framework="numpy") as opened:
            assert name in list(opened.keys())
            assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("kind", [jnp.bfloat16, np.float16, np.float64])
def test_other_floats_are_read_as_the_numbers_they_are(kind, tmp_path):
    folder, tensors = make(tmp_path, "llama")
    rounded = {name: tensor.astype(kind) for name, tensor in tensors.items()}
    write(folder, LLAMA, rounded)
    config = read_config(folder)
    params = load_safetensors(folder, config)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    found = params["blocks"]["attention"]["query"][1]
    expected = rounded["model.layers.1.self_attn.q_proj.weight"].astype(np.float32).T
    np.testing.assert_array_equal(found, expected)


def test_bfloat16_goes_out_as_it_came_in(tmp_path):
    folder, tensors = make(tmp_path / "in", "llama")
    rounded = {name: tensor.astype(jnp.bfloat16) for name, tensor in tensors.items()}
    write(folder, LLAMA, rounded)
    config = read_config(folder)
    for kind in (np.float32, jnp.bfloat16):
        out = tmp_path / np.dtype(kind).name
        save_safetensors(load_safetensors(folder, config, kind), config, out, dtype="bfloat16")
        assert_same_bits(stored(out), rounded)


def test_the_vocabulary_is_padded_with_zeros(tmp_path):
    folder, tensors = make(tmp_path, "bert")
    params = load_safetensors(folder, read_config(folder))
    assert params["embed"].shape == (128, 32)
    assert not params["embed"][50:].any()
    assert not params["head_bias"][50:].any()
    embed = tensors["bert.embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(params["embed"][:50], embed)


def test_gpt2_names_may_lack_their_prefix_and_buffers_are_passed_over(tmp_path):
    folder, tensors = make(tmp_path, "gpt2")
    config = read_config(folder)
    expected = load_safetensors(folder, config)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.float32)
    bare["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
    write(folder, GPT2, bare)
    lines = []
    found = load_safetensors(folder, config, progress=lines.append)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert lines == []


def test_bert_names_may_be_old_and_what_has_no_use_is_named(tmp_path):
    folder, tensors = make(tmp_path, "bert")
    config = read_config(folder)
    expected = load_safetensors(folder, config)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    assert old.keys() != tensors.keys()
    old["bert.pooler.dense.weight"] = np.ones((32, 32), np.float32)
    old["cls.seq_relationship.bias"] = np.ones(2, np.float32)
    old["bert.embeddings.position_ids"] = np.arange(16)[None]
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    write(folder, BERT, old)
    lines = []
    found = load_safetensors(folder, config, progress=lines.append)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    (line,) = lines
    assert "bert.pooler.dense.weight" in line
    assert "cls.seq_relationship.bias" in line


@pytest.mark.parametrize(
    ("case", "head_name", "embed"),
    [
        ("llama-tied-scaled", "lm_head.weight", "model.embed_tokens.weight"),
        ("qwen2-tied", "lm_head.weight", "model.embed_tokens.weight"),
        ("llada-tied-grouped", "model.transformer.ff_out.weight", "model.transformer.wte.weight"),
    ],
)
def test_a_tied_head_may_be_stored_twice_if_it_is_the_same(case, head_name, embed, tmp_path):
    folder, tensors = make(tmp_path, case)
    config = read_config(folder)
    head = tensors[embed].copy()
    hf = CASES[case][0]
    write(folder, hf, tensors | {head_name: head})
    load_safetensors(folder, config)
    head[7, 3] += 1
    write(folder, hf, tensors | {head_name: head})
    with pytest.raises(ConfigError, match=f"'{head_name}' differs from '{embed}"):
        load_safetensors(folder, config)


def test_place_has_every_leaf_once_and_its_results_stand_for_them(tmp_path):
    folder, _ = make(tmp_path, "gpt2")
    config = read_config(folder)
    expected, seen = load_safetensors(folder, config), []

    def place(path, array):
        seen.append(path)
        return jnp.asarray(array)

    placed = load_safetensors(folder, config, place=place)
    assert len(seen) == len(set(seen)) == len(jax.tree.leaves(expected))
    assert ("blocks", "attention", "query_bias") in seen
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(placed))
    jax.tree.map(np.testing.assert_array_equal, placed, expected)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt-2", 124_439_808),
        ("bert-large", 335_174_458),
        ("llama-3.2-1b", 1_235_814_400),
        ("llada-8b", 8_015_581_184),
        ("dream-7b", 7_615_616_512),
    ],
)
def test_files_of_published_models_have_their_published_parameters(name, parameters):
    config = MODELS[name]
    shapes = file_shapes(huggingface_tensors(config), config)
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


def test_reading_takes_one_tensor_beyond_the_parameters(tmp_path):
    # Leaves of stacked layers are the largest, so that two at a time would be seen.
    config = TransformerConfig(
        vocab_size=4096, dim=1024, layers=6, heads=8, kv_heads=8, mlp_dim=2816, tied=True
    )
    shapes = file_shapes(huggingface_tensors(config), config)
    with (tmp_path / "model.safetensors").open("wb") as file:
        header = files._header(shapes, "float32")
        file.write(header)
        file.truncate(len(header) + 4 * config.num_params)  # zeros that take no room on disk
    assert config.num_params > 75e6  # a file of 300 MB
    tensor = 4 * max(math.prod(shape) for shape in shapes.values())
    leaf = 4 * max(x.size for x in jax.tree.leaves(abstract_params(config)))
    slack = 5e6
    assert leaf > 2 * (tensor + slack)
    for place, held in ((None, 4 * config.num_params), (lambda path, array: None, leaf)):
        tracemalloc.start()
        load_safetensors(tmp_path, config, place=place)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < peak < held + tensor + slack
