# SPDX-License-Identifier: Apache-2.0
import json
import sys

import gguf
import jax
import numpy as np
import oracle
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from geojax.config import ConfigError
from geojax.convert import convert
from geojax.data import read_tokenizer
from geojax.models.config import RopeScaling
from geojax.models.transformer import make_apply
from geojax.models.weights import load_safetensors, read_config, read_gguf

HF = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT = "The year 1984, or 12 + 34 = 46; it's 7 o'clock.\n\n  I've 250 cats and we'll see ½ of them."


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE of 300 entries that never merges digits, as SmolLM's."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT] * 4, trainer)
    assert inner.get_vocab_size() == 300
    return inner


def paired(weight, heads):
    """Rows of a half-split projection in the order that llama.cpp has them: pairs together."""
    size = len(weight) // heads
    order = [h * size + half * size // 2 + i for h in range(heads) for i in range(size // 2)
             for half in (0, 1)]  # fmt: skip
    return weight[order]


def write(path, tensors, tokenizer, quantise=None, pre="smollm", hf=HF, drop=(), **settings):
    """A GGUF file of the HF-named `tensors`; `settings` replace or add to what it says."""
    writer = gguf.GGUFWriter(path, settings.pop("architecture", "llama"))
    said = {
        "block_count": hf["num_hidden_layers"],
        "context_length": 64,
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        "rope.freq_base": hf["rope_theta"],
    } | {name.replace("__", "."): value for name, value in settings.items()}
    for key, value in said.items():
        if key in drop or value is None:
            continue
        if isinstance(value, str):
            writer.add_string(f"llama.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"llama.{key}", value)
        else:
            add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"llama.{key}", value)
    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda x: x[1])
    if "tokenizer" not in drop:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in SPECIAL else 1 for token, _ in vocabulary])
    writer.add_token_merges(merges_of(tokenizer))
    for name, tensor in rename(tensors, hf).items():
        if quantise and tensor.ndim == 2:
            writer.add_tensor(name, gguf.quantize(tensor, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merges_of(tokenizer):
    """The merges, each as two halves with a space between."""
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def rename(tensors, hf):
    """HF-named tensors under GGUF's names and in its order of rows."""
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    out = {}
    for name, tensor in tensors.items():
        if name.startswith("model.layers."):
            _, _, layer, *rest = name.removesuffix(".weight").split(".")
            new = NAMES[".".join(rest)]
            heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(new)
            out[f"blk.{layer}.{new}.weight"] = paired(tensor, hf[heads]) if heads else tensor
        else:
            out[plain.get(name, name)] = tensor
    return out


def draw(hf=HF):
    return oracle.llama_file(hf, np.random.default_rng(0))


def batch():
    tokens = np.random.default_rng(1).integers(0, 300, (2, 12), np.int32)
    positions = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    return tokens, positions, np.zeros_like(tokens)


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_computes_what_its_names_mean(tied, trained, tmp_path):
    hf = HF | {"tie_word_embeddings": tied}
    tensors = draw(hf)
    config, params, _ = read_gguf(write(tmp_path / "a.gguf", tensors, trained, hf=hf))
    assert (config.tied, config.kv_heads, config.context) == (tied, 2, 64)
    assert (config.norm_eps, config.rope_theta, config.vocab_size) == (1e-5, 1e5, 300)
    logits = make_apply(config)(params, *batch())
    # float32 against float64 on logits of size 1 to 10: 1e-4 is tens of its roundings.
    np.testing.assert_allclose(logits, oracle.llama(tensors, hf, *batch()), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "BF16"])
def test_quantised_tensors_become_the_numbers_that_they_stand_for(kind, trained, tmp_path):
    # Columns are quantised in blocks of 32, and rows of queries and keys change places whole.
    tensors, kind = draw(), gguf.GGMLQuantizationType[kind]
    rounded = {
        name: gguf.dequantize(gguf.quantize(tensor, kind), kind) if tensor.ndim == 2 else tensor
        for name, tensor in tensors.items()
    }
    _, exact, _ = read_gguf(write(tmp_path / "exact.gguf", rounded, trained))
    _, found, _ = read_gguf(write(tmp_path / "small.gguf", tensors, trained, kind))
    jax.tree.map(np.testing.assert_array_equal, found, exact)
    assert np.abs(found["embed"][:300] - tensors["model.embed_tokens.weight"]).max() > 0
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float32)}


def test_the_tokenizer_gives_the_same_ids(trained, tmp_path):
    _, _, found = read_gguf(write(tmp_path / "a.gguf", draw(), trained))
    assert found.encode(TEXT).ids == trained.encode(TEXT).ids
    assert found.decode(found.encode(TEXT).ids) == TEXT
    marked = "<|im_start|>user\n12<|im_end|>"
    assert found.encode(marked).ids == trained.encode(marked).ids
    assert found.encode(marked).ids[0] == 1
    digits = [found.id_to_token(i) for i in found.encode("1984").ids]
    assert digits == ["1", "9", "8", "4"]


def test_how_text_is_cut_is_as_the_file_names_it(trained, tmp_path):
    cuts = {}
    for pre in ("gpt-2", "smollm", "llama-bpe"):
        _, _, found = read_gguf(write(tmp_path / f"{pre}.gguf", draw(), trained, pre=pre))
        pieces = found.pre_tokenizer.pre_tokenize_str("It's  12345\r\n\r\nI'LL")
        cuts[pre] = [piece for piece, _ in pieces]
    # Ġ is a space and Ċ a newline in the letters that bytes have.
    assert cuts["gpt-2"] == ["It", "'s", "Ġ", "Ġ12345", "čĊč", "Ċ", "I", "'", "LL"]
    assert cuts["smollm"] == ["It", "'s", "ĠĠ", *"12345", "čĊč", "Ċ", "I", "'", "LL"]
    assert cuts["llama-bpe"] == ["It", "'s", "Ġ", "Ġ", "123", "45", "čĊčĊ", "I", "'LL"]


def test_a_word_that_no_merges_lead_to_is_found_where_it_should_be(trained, tmp_path):
    wider = json.loads(trained.to_str())
    wider["model"]["vocab"]["hello"] = 300
    wider, hf = Tokenizer.from_str(json.dumps(wider)), HF | {"vocab_size": 301}
    for pre, ids in (("llama-bpe", [300]), ("smollm", trained.encode("hello").ids)):
        _, _, found = read_gguf(write(tmp_path / pre, draw(hf), wider, pre=pre, hf=hf))
        assert found.encode("hello").ids == ids


def test_factors_of_rotary_pairs_are_llama_3_s_scaling(trained, tmp_path):
    hf = HF | {"rope_theta": 10_000.0}
    scaled = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    stretched = oracle._frequencies(hf | {"rope_scaling": scaled}, 16)
    factors = (oracle._frequencies(hf, 16) / stretched).astype(np.float32)
    assert ((factors > 1.01) & (factors < 7.9)).any()
    tensors = draw() | {"rope_freqs.weight": factors}
    config, _, _ = read_gguf(write(tmp_path / "a.gguf", tensors, trained, hf=hf))
    assert config.rope_scaling == RopeScaling(8.0)
    tensors["rope_freqs.weight"] = np.full(8, 8, np.float32)
    with pytest.raises(ConfigError, match=r"factors in 'rope_freqs.weight' are not those of"):
        read_gguf(write(tmp_path / "b.gguf", tensors, trained, hf=hf))


def test_place_has_every_leaf(trained, tmp_path):
    path, seen = write(tmp_path / "a.gguf", draw(), trained), []
    _, params, _ = read_gguf(path, np.float16, lambda p, leaf: seen.append((p, leaf.dtype)))
    assert len(seen) == 11
    assert {kind for _, kind in seen} == {np.dtype(np.float16)}
    assert params["blocks"]["attention"]["query"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma' is not implemented"),
        ({"pre": "qwen2"}, "pre-tokenizer 'qwen2' is not implemented, only gpt-2, smollm"),
        ({"drop": ("tokenizer",)}, "tokenizer None is not implemented, only 'gpt2'"),
        ({"drop": ("block_count",)}, r"has no llama.block_count"),
        ({"rope__scaling__type": "yarn"}, r"llama.rope.scaling.type 'yarn' is not implemented"),
        ({"expert_count": 8}, r"llama.expert_count 8 is not implemented"),
        ({"attention__key_length": 32}, r"llama.attention.key_length 32 is not implemented"),
        ({"attention__head_count_kv": [2, 1]}, r"head_count_kv \[2, 1\] is not implemented"),
        ({"feed_forward_length": 95}, r"'blk.0.ffn_gate.weight' is \[96, 64\], .* \[95, 64\]"),
        ({"attention__head_count_kv": 3}, "do not divide by kv_heads 3"),
    ],
)
def test_what_the_model_does_not_compute_is_refused_by_name(changes, message, trained, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read_gguf(write(tmp_path / "a.gguf", draw(), trained, **changes))


def test_biases_that_the_model_lacks_are_refused(trained, tmp_path):
    tensors = draw() | {"blk.0.attn_q.bias": np.ones(64, np.float32)}
    with pytest.raises(ConfigError, match=r"'blk.0.attn_q.bias' of \[64\] has no place"):
        read_gguf(write(tmp_path / "a.gguf", tensors, trained))


def test_a_converted_file_is_the_same_model(trained, tmp_path):
    path = write(tmp_path / "a.gguf", draw(), trained, gguf.GGMLQuantizationType.Q8_0)
    config, params, _ = read_gguf(path)
    done = convert(path, tmp_path / "target")
    assert (done.config, done.tensors, done.tokenizer) == (config, 20, True)
    assert read_config(tmp_path / "target") == config
    again = load_safetensors(tmp_path / "target", config)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    tokenizer = read_tokenizer(tmp_path / "target" / "tokenizer.json")
    assert tokenizer.encode_batch([TEXT])[0].tolist() == trained.encode(TEXT).ids
    assert tokenizer.eos_id == 0


def test_what_is_no_such_file_is_refused(tmp_path, trained, monkeypatch):
    with pytest.raises(ConfigError, match=r"a.gguf is not a file"):
        read_gguf(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(b"not a model " * 9)
    with pytest.raises(ConfigError, match=r"a.gguf is not a GGUF file, or damaged"):
        read_gguf(tmp_path / "a.gguf")
    whole = write(tmp_path / "b.gguf", draw(), trained).read_bytes()
    (tmp_path / "a.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"a.gguf is not a GGUF file, or damaged"):
        read_gguf(tmp_path / "a.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"install geojax\[gguf\]"):
        read_gguf(tmp_path / "b.gguf")
