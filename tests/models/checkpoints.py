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
