# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints as Hugging Face libraries write them, and random parameters of ours."""

import json

import jax
import numpy as np
import oracle
from safetensors import safe_open
from safetensors.numpy import save_file

from geojax.models.transformer import abstract_params

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    # As published: a window that is not used.
    "use_sliding_window": False,
    "sliding_window": 8,
    "max_window_layers": 1,
}
DREAM = QWEN2 | {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "mask_token_id": 49,
    "pad_token_id": 40,
    "bos_token_id": 40,
    "eos_token_id": 40,
}
LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "activation_type": "silu",
    "alibi": False,
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 32,
    "embedding_dropout": 0.0,
    "embedding_size": 50,
    "eos_token_id": 41,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 48,
    "max_sequence_length": 16,
    "mlp_hidden_size": 44,
    "mlp_ratio": 4,
    "multi_query_attention": None,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 3,
    "pad_token_id": 41,
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 100.0,
    "scale_logits": False,
    "vocab_size": 50,
    "weight_tying": False,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 50,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": None,
    "n_positions": 16,
    "layer_norm_epsilon": 1e-5,
}
BERT = {
    "model_type": "bert",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
CASES = {
    "llama": (LLAMA, oracle.llama_file, oracle.llama),
    "llama-tied-scaled": (
        LLAMA | {"tie_word_embeddings": True, "rope_scaling": ROPE},
        oracle.llama_file,
        oracle.llama,
    ),
    "qwen2": (QWEN2, oracle.qwen2_file, oracle.llama),
    "qwen2-tied": (QWEN2 | {"tie_word_embeddings": True}, oracle.qwen2_file, oracle.llama),
    "dream": (DREAM, oracle.qwen2_file, oracle.dream),
    "llada": (LLADA, oracle.llada_file, oracle.llada),
    "llada-tied-grouped": (
        LLADA | {"weight_tying": True, "n_kv_heads": 2},
        oracle.llada_file,
        oracle.llada,
    ),
    "gpt2": (GPT2, oracle.gpt2_file, oracle.gpt2),
    "gpt2-narrow": (GPT2 | {"n_inner": 20}, oracle.gpt2_file, oracle.gpt2),
    "bert": (BERT, oracle.bert_file, oracle.bert),
}


def write(folder, hf, tensors):
    """A checkpoint's folder; returns it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(tensors, folder / "model.safetensors")
    return folder


def make(folder, case):
    """A random checkpoint of a case: folder, and the tensors in it."""
    hf, draw, _ = CASES[case]
    tensors = draw(hf, np.random.default_rng(0))
    return write(folder, hf, tensors), tensors


def stored(folder):
    """All tensors of a folder's safetensors files."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as opened:
            tensors |= {name: opened.get_tensor(name) for name in list(opened.keys())}
    return tensors


def random_params(config, seed=0):
    """Params of distinct values; zeros where the vocabulary is padded."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        value = rng.standard_normal(leaf.shape).astype(np.float32)
        if path[-1].key in ("embed", "head", "head_bias"):
            value[config.vocab_size :] = 0
        return value

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))
