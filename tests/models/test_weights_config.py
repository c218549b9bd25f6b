# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace

import pytest

from geojax.config import ConfigError
from geojax.models.config import MODELS, RopeScaling, TransformerConfig
from geojax.models.weights import read_config
from geojax.models.weights.hf_config import write_config

# What the published checkpoints of Llama-3.2-1B, Qwen2.5-7B, Dream-7B, LLaDA-8B, GPT-2 and
# BERT-large say, settings of training and generation left out.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 128256,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
DREAM = QWEN2 | {
    "architectures": ["DreamModel"],
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "mask_token_id": 151666,
    "model_type": "Dream",
    "pad_token_id": 151643,
    "rope_scaling": None,
    "sliding_window": None,
}
LLADA = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 4096,
    "embedding_dropout": 0.0,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "use_cache": False,
    "vocab_size": 126464,
    "weight_tying": False,
}
V5_ROPE = {**LLAMA["rope_scaling"], "rope_theta": 500000.0}


def read(folder, hf, **changes):
    merged = {key: value for key, value in (hf | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(merged))
    return read_config(folder)


@pytest.mark.parametrize(
    ("hf", "name", "differs"),
    [
        (LLAMA, "llama-3.2-1b", {"context": 131072}),
        (GPT2, "gpt-2", {"dropout": 0.1, "attention_dropout": 0.1}),
        (BERT, "bert-large", {}),
        (LLADA, "llada-8b", {}),
        (DREAM, "dream-7b", {}),
        (QWEN2, "dream-7b", {"bidirectional": False, "shifted": False}),
    ],
)
def test_published_files_are_the_named_models(hf, name, differs, tmp_path):
    assert read(tmp_path, hf) == replace(MODELS[name], **differs)


@pytest.mark.parametrize(
    "config",
    [
        *MODELS.values(),
        TransformerConfig(
            99, 48, 2, 4, 2, 40, False, context=77, rope_scaling=RopeScaling(8.0, 2.0, 3.0, 99)
        ),
        TransformerConfig(99, 48, 2, 4, 4, 40, False, family="gpt", context=9, dropout=0.25),
        TransformerConfig(
            99, 48, 2, 4, 4, 40, True, family="bert", context=9, attention_dropout=0.5
        ),
        TransformerConfig(99, 48, 2, 4, 2, 40, True, qkv_bias=True, rope_scaling=RopeScaling()),
        TransformerConfig(99, 48, 2, 4, 1, 40, True, bidirectional=True, dropout=0.25),
    ],
)
def test_what_is_written_is_read_again(config, tmp_path):
    write_config(config, tmp_path, "float32")
    assert read_config(tmp_path) == replace(config, embed_init=0.0)  # a matter of fresh weights


def test_settings_that_are_left_out_have_the_family_s_defaults(tmp_path):
    short = dict.fromkeys(
        ("rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings", "head_dim"), ...
    )
    config = read(tmp_path, LLAMA, **short, num_key_value_heads=None)
    assert (config.norm_eps, config.rope_theta, config.rope_scaling) == (1e-6, 10_000.0, None)
    assert (config.tied, config.kv_heads) == (False, 32)
    config = read(tmp_path, GPT2, n_inner=None, layer_norm_epsilon=...)
    assert (config.tied, config.mlp_dim, config.norm_eps) == (True, 3072, 1e-5)
    assert read(tmp_path, GPT2, n_inner=99).mlp_dim == 99
    assert read(tmp_path, BERT, layer_norm_eps=...).norm_eps == 1e-12


def test_a_llada_may_leave_its_heads_and_mlp_to_other_keys(tmp_path):
    config = read(tmp_path, LLADA, n_kv_heads=..., mlp_hidden_size=None, embedding_size=...)
    assert (config.kv_heads, config.mlp_dim, config.vocab_size) == (32, 4 * 4096, 126464)
    assert read(tmp_path, LLADA, n_kv_heads=None, multi_query_attention=True).kv_heads == 1
    assert read(tmp_path, LLADA, embedding_size=126592).vocab_size == 126592
    assert read(tmp_path, LLADA, max_sequence_length=...).context == 0


def test_newer_files_have_their_rotary_settings_in_one_place(tmp_path):
    old = read(tmp_path, LLAMA)
    assert read(tmp_path, LLAMA, rope_theta=..., rope_scaling=..., rope_parameters=V5_ROPE) == old
    plain = {"rope_type": "default", "rope_theta": 7.0}
    config = read(tmp_path, LLAMA, rope_theta=..., rope_scaling=..., rope_parameters=plain)
    assert (config.rope_theta, config.rope_scaling) == (7.0, None)


@pytest.mark.parametrize(
    ("hf", "changes", "message"),
    [
        (LLAMA, {"model_type": "mistral"}, "model_type 'mistral' is not implemented; known: llama"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "use weights of LlamaForCa"),
        (LLAMA, {"attention_bias": True}, "attention_bias True is not implemented, only False"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias True is not"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented, only 'silu'"),
        (LLAMA, {"head_dim": 128}, "head_dim 128 is not implemented, only .*64"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window 4096 is set"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config .* is set"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "'llama3' has no factor, low_freq"),
        (LLAMA, {"rope_scaling": {**V5_ROPE, "factor": -1}}, "factor -1 must be above 0"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA, {"hidden_size": ...}, "has no hidden_size"),
        (LLAMA, {"num_key_value_heads": 5}, "do not divide by kv_heads 5"),
        (LLAMA, {"hidden_size": "2048"}, "config.json cannot be used|config.json: "),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window True is set"),
        (QWEN2, {"attention_bias": False}, "attention_bias False is not implemented, only True"),
        (QWEN2, {"num_key_value_heads": ...}, "has no num_key_value_heads"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        (DREAM, {"use_mrope": True}, "use_mrope True is not"),
        (DREAM, {"rope_scaling": {"type": "yarn"}}, "rope type 'yarn'"),
        (DREAM, {"architectures": ["DreamForCausalLM"]}, "use weights of DreamModel"),
        (LLADA, {"block_type": "sequential"}, "block_type 'sequential' is not .*'llama'"),
        (LLADA, {"block_type": ...}, "has no block_type"),
        (LLADA, {"block_group_size": 2}, "block_group_size 2 is not"),
        (LLADA, {"activation_type": "swiglu"}, "activation_type 'swiglu' is not"),
        (LLADA, {"layer_norm_type": "default"}, "layer_norm_type 'default' is not"),
        (LLADA, {"attention_layer_norm": True}, "attention_layer_norm True is not"),
        (LLADA, {"include_bias": True}, "include_bias True is not"),
        (LLADA, {"include_qkv_bias": True}, "include_qkv_bias True is not"),
        (LLADA, {"rope": False}, "rope False is not"),
        (LLADA, {"rope_full_precision": False}, "rope_full_precision False is not"),
        (LLADA, {"alibi": True}, "alibi True is not"),
        (LLADA, {"scale_logits": True}, "scale_logits True is not"),
        (LLADA, {"input_emb_norm": True}, "input_emb_norm True is not"),
        (LLADA, {"weight_tying": ...}, "has no weight_tying"),
        (LLADA, {"embedding_dropout": 0.1}, "embedding_dropout 0.1 and residual_dropout 0.0"),
        (LLADA, {"multi_query_attention": True}, "multi_query_attention True and n_kv_heads 32"),
        (LLADA, {"architectures": ["LLaDAMoEModelLM"]}, "architecture 'LLaDAMoEModelLM' is not"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx True is not"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights False is not"),
        (GPT2, {"activation_function": "relu"}, "activation_function 'relu' is not"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention True is not"),
        (GPT2, {"embd_pdrop": 0.0}, "embd_pdrop 0.0 and resid_pdrop 0.1 differ"),
        (BERT, {"hidden_act": "gelu_new"}, "hidden_act 'gelu_new' is not"),
        (BERT, {"position_embedding_type": "relative_key"}, "'relative_key' is not"),
        (BERT, {"type_vocab_size": 3}, "type_vocab_size 3 is not"),
        (BERT, {"is_decoder": True}, "is_decoder True is not"),
        (BERT, {"architectures": ["BertModel"]}, "architecture 'BertModel' is not"),
        (BERT, {"tie_word_embeddings": False}, "the head of a bert is its embedding"),
    ],
)
def test_what_the_model_does_not_compute_is_refused_by_name(hf, changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, hf, **changes)


def test_files_that_are_no_config_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json does not exist"):
        read_config(tmp_path)
    for text, message in (("{", "cannot be used"), ("[]", "is not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt-tiny", {"kv_heads": 2}, "kv_heads 2: Hugging Face's gpt has as many as heads"),
        (
            "llama-tiny",
            {"bidirectional": True, "shifted": True},
            "bidirectional True, qkv_bias False, shifted True: no checkpoint format has such",
        ),
        ("dream-tiny", {"shifted": False}, "bidirectional True, qkv_bias True, shifted False: no"),
        ("llada-tiny", {"rope_scaling": RopeScaling()}, "rope_scaling: a LLaDA's config.json has"),
    ],
)
def test_a_model_that_has_no_such_form_is_not_written(name, changes, message, tmp_path):
    config = replace(MODELS[name], **changes)
    with pytest.raises(ConfigError, match=message):
        write_config(config, tmp_path, "float32")
    assert not list(tmp_path.iterdir())
