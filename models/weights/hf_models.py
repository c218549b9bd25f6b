# SPDX-License-Identifier: Apache-2.0
"""The models of Hugging Face's checkpoints that ours can be: what they are called, and which keys
of config.json say what.

Invariant: at most one of them fits a `TransformerConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from geojax.config.base import ConfigError, require
from geojax.models.config import TOKEN_TYPES, TransformerConfig


@dataclass(frozen=True)
class HFModel:
    """One value of model_type."""

    model_type: str
    family: Literal["llama", "gpt", "bert"]
    architectures: tuple[str, ...]
    """The first is written."""
    shapes: Mapping[str, str]
    """Our field: the key, which must be there."""
    settings: Mapping[str, tuple[str, Any]]
    """Our field: the key, and its default in the model's library."""
    required: Mapping[str, tuple[Any, ...]]
    """Key: the values that our model implements; the first is what a missing one means, and is
    written."""
    unset: Mapping[str, str]
    """Key: what a model does that has it set, which ours does not."""
    flags: Mapping[str, bool] = field(default_factory=dict)
    """What tells a llama from the others."""
    explicit: tuple[str, ...] = ()
    """Keys that must be there as well, since they mean something else where they are missing."""
    embedding_dropout: str = ""
    """Key of a rate that is one with `dropout` in our model; 0.1 where it is missing."""


def hf_model(config: TransformerConfig) -> HFModel:
    """What a checkpoint of `config` is called; ConfigError where no library has such a model."""
    require(
        not config.block,
        f"model.block {config.block!r} is layers of one's own, and no checkpoint format has them; "
        "keep them in the run's own checkpoints",
    )
    for model in HF_MODELS:
        if model.family == config.family and all(
            getattr(config, name) == value for name, value in model.flags.items()
        ):
            return model
    flags = ", ".join(f"{name} {getattr(config, name)}" for name in HF_MODELS[0].flags)
    raise ConfigError(
        f"model {flags}: no checkpoint format has such a model, only llama (none of them set), "
        "qwen2 (qkv_bias), llada (bidirectional) and Dream (all three); keep it in the run's own "
        "checkpoints"
    )


def _flags(bidirectional: bool = False, qkv_bias: bool = False, shifted: bool = False):
    return {"bidirectional": bidirectional, "qkv_bias": qkv_bias, "shifted": shifted}


_QUANTISED = {"quantization_config": "has quantised weights"}
_WINDOW = "attends to a window"
_ENCODER = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp_dim": "intermediate_size",
}
_LLAMA_SETTINGS = {
    "norm_eps": ("rms_norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
    "tied": ("tie_word_embeddings", False),
    "context": ("max_position_embeddings", 0),
}
# A Qwen2's library would take 32 key/value heads where the key is missing.
_QWEN2_SHAPES = _ENCODER | {"kv_heads": "num_key_value_heads"}
_QWEN2_REQUIRED = {"hidden_act": ("silu", "swish"), "attention_bias": (True,)}
_QWEN2_UNSET = {"use_sliding_window": _WINDOW, **_QUANTISED}
_LLADA_EXPLICIT = (
    "block_type",
    "activation_type",
    "layer_norm_type",
    "include_bias",
    "rope",
    "rms_norm_eps",
    "rope_theta",
    "weight_tying",
)

HF_MODELS = (
    HFModel(
        "llama",
        "llama",
        ("LlamaForCausalLM",),
        _ENCODER,
        _LLAMA_SETTINGS,
        {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)},
        {"sliding_window": _WINDOW, **_QUANTISED},
        _flags(),
    ),
    HFModel(
        "qwen2",
        "llama",
        ("Qwen2ForCausalLM",),
        _QWEN2_SHAPES,
        _LLAMA_SETTINGS,
        _QWEN2_REQUIRED,
        _QWEN2_UNSET,
        _flags(qkv_bias=True),
    ),
    HFModel(
        "Dream",
        "llama",
        ("DreamModel",),
        _QWEN2_SHAPES,
        _LLAMA_SETTINGS,
        _QWEN2_REQUIRED | {"use_mrope": (False,)},
        _QWEN2_UNSET,
        _flags(bidirectional=True, qkv_bias=True, shifted=True),
    ),
    HFModel(
        "llada",
        "llama",
        ("LLaDAModelLM",),
        {"vocab_size": "vocab_size", "dim": "d_model", "layers": "n_layers", "heads": "n_heads"},
        {
            "norm_eps": ("rms_norm_eps", 1e-5),
            "rope_theta": ("rope_theta", 10_000.0),
            "dropout": ("residual_dropout", 0.1),
            "attention_dropout": ("attention_dropout", 0.1),
            "tied": ("weight_tying", True),
            "context": ("max_sequence_length", 0),
        },
        {
            "block_type": ("llama",),
            "block_group_size": (1,),
            "activation_type": ("silu",),
            "layer_norm_type": ("rms",),
            "layer_norm_with_affine": (True,),
            "bias_for_layer_norm": (False, None),
            "attention_layer_norm": (False,),
            "input_emb_norm": (False,),
            "include_bias": (False,),
            "include_qkv_bias": (False,),
            "rope": (True,),
            "rope_full_precision": (True,),
            "alibi": (False,),
            "scale_logits": (False,),
        },
        _QUANTISED,
        _flags(bidirectional=True),
        _LLADA_EXPLICIT,
        "embedding_dropout",
    ),
    HFModel(
        "gpt2",
        "gpt",
        ("GPT2LMHeadModel", "GPT2Model"),
        {
            "vocab_size": "vocab_size",
            "dim": "n_embd",
            "layers": "n_layer",
            "heads": "n_head",
            "context": "n_positions",
        },
        {
            "norm_eps": ("layer_norm_epsilon", 1e-5),
            "dropout": ("resid_pdrop", 0.1),
            "attention_dropout": ("attn_pdrop", 0.1),
            "tied": ("tie_word_embeddings", True),
        },
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        {"sliding_window": _WINDOW, **_QUANTISED},
        embedding_dropout="embd_pdrop",
    ),
    HFModel(
        "bert",
        "bert",
        ("BertForMaskedLM", "BertForPreTraining"),
        _ENCODER | {"context": "max_position_embeddings"},
        {
            "norm_eps": ("layer_norm_eps", 1e-12),
            "dropout": ("hidden_dropout_prob", 0.1),
            "attention_dropout": ("attention_probs_dropout_prob", 0.1),
            "tied": ("tie_word_embeddings", True),
        },
        {
            "hidden_act": ("gelu",),
            "position_embedding_type": ("absolute",),
            "type_vocab_size": (TOKEN_TYPES,),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
        },
        {"sliding_window": _WINDOW, **_QUANTISED},
    ),
)
