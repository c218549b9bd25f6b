# SPDX-License-Identifier: Apache-2.0
"""Parity with `transformers`, where it is installed beside a torch; we depend on neither."""

from importlib.util import find_spec

import checkpoints
import numpy as np
import pytest

from geojax.models.transformer import make_apply
from geojax.models.weights import load_safetensors, read_config, save_safetensors

pytestmark = [
    pytest.mark.skipif(
        not (find_spec("torch") and find_spec("transformers")),
        reason="needs torch and transformers",
    ),
    pytest.mark.filterwarnings("default"),  # theirs
]
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def models():
    """(their class, its config) by name."""
    import transformers as hf

    rotary = {"rope_type": "default", "rope_theta": 100.0}
    bert = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    rope = {**ROPE, "rope_theta": 100.0}
    return {
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**LLAMA)),
        "llama-tied-scaled": (
            hf.LlamaForCausalLM,
            hf.LlamaConfig(**LLAMA, rope_parameters=rope, tie_word_embeddings=True),
        ),
        "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**LLAMA, rope_parameters=rotary)),
        "qwen2-tied": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**LLAMA, tie_word_embeddings=True)),
        "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=4)),
        "bert": (hf.BertForMaskedLM, hf.BertConfig(**bert, intermediate_size=44)),
    }


def their_logits(model, tokens, **inputs):
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor(tokens.astype(np.int64)), **inputs).logits.numpy()


def their_random(name):
    """One of their models with every parameter random: zeros and ones would hide a mix-up."""
    import torch

    kind, config = models()[name]
    torch.manual_seed(0)
    theirs = kind(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return theirs


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied-scaled", "qwen2", "qwen2-tied", "gpt2", "bert"]
)
def test_both_libraries_compute_the_same_from_either_s_files(name, tmp_path):
    import torch

    kind, theirs = models()[name][0], their_random(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = read_config(tmp_path / "theirs")
    params = load_safetensors(tmp_path / "theirs", ours)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 200), np.int32)
    positions = np.tile(np.arange(200, dtype=np.int32), (2, 1))
    logits = their_logits(theirs, tokens)
    assert logits.std() > 0.5
    # Both in float32, on logits of size 1 to 10.
    np.testing.assert_allclose(
        make_apply(ours)(params, tokens, positions), logits, atol=1e-4, rtol=1e-4
    )
    save_safetensors(params, ours, tmp_path / "ours", max_shard_bytes=20_000)
    again = kind.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    np.testing.assert_array_equal(their_logits(again, tokens), logits)


# Our names of what LLaDA's checkpoints call otherwise.
LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers.": "model.transformer.blocks.",
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def llada_config(hf):
    """config.json of the LLaDA that is this Llama with all visible."""
    return checkpoints.LLADA | {
        "d_model": hf.hidden_size,
        "n_heads": hf.num_attention_heads,
        "n_kv_heads": hf.num_key_value_heads,
        "mlp_hidden_size": hf.intermediate_size,
        "rms_norm_eps": hf.rms_norm_eps,
        "rope_theta": hf.rope_parameters["rope_theta"],
        "max_sequence_length": 256,
    }


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_models_of_diffusion_are_theirs_with_all_visible(name, tmp_path):
    import torch

    theirs = their_random({"llada": "llama", "dream": "qwen2"}[name])
    tensors = {key: x.numpy() for key, x in theirs.state_dict().items()}
    if name == "llada":
        config = llada_config(theirs.config)
        for old, new in LLADA_NAMES.items():
            tensors = {key.replace(old, new): x for key, x in tensors.items()}
    else:
        config = checkpoints.DREAM | LLAMA | {"rms_norm_eps": theirs.config.rms_norm_eps}
    checkpoints.write(tmp_path / "hf", config, tensors)
    ours = read_config(tmp_path / "hf")
    assert not ours.causal
    tokens = np.random.default_rng(0).integers(0, 50, (2, 200), np.int32)
    positions = np.tile(np.arange(200, dtype=np.int32), (2, 1))
    apply = make_apply(ours)
    found = apply(load_safetensors(tmp_path / "hf", ours), tokens, positions)
    mask = torch.zeros(2, 1, 200, 200)  # added to the scores: nothing is hidden
    logits = their_logits(theirs, tokens, attention_mask=mask)
    # Both in float32, on logits of size 1 to 10.
    np.testing.assert_allclose(found, logits, atol=1e-4, rtol=1e-4)
    assert np.abs(logits - their_logits(theirs, tokens)).max() > 0.1  # the mask was heard
