# SPDX-License-Identifier: Apache-2.0
"""Shapes from and to Hugging Face's config.json.

Invariant: a file is taken only where our model computes what it describes: a setting that would
change the result and that we have no part for is refused by name. Settings of training alone, such
as initial ranges, are not looked at, and a setting left out has the family's default.
"""

import json
from pathlib import Path
from typing import Any, Literal

from geojax.config import ConfigError, require
from geojax.models.config import TOKEN_TYPES, RopeScaling, TransformerConfig

FILE = "config.json"

_MODELS: dict[str, Literal["llama", "gpt", "bert"]] = {
    "llama": "llama",
    "gpt2": "gpt",
    "bert": "bert",
}
_ARCHITECTURES = {
    # The first of each is written.
    "llama": ("LlamaForCausalLM",),
    "gpt": ("GPT2LMHeadModel", "GPT2Model"),
    "bert": ("BertForMaskedLM", "BertForPreTraining"),
}
_SHAPES = {
    "llama": {
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "mlp_dim": "intermediate_size",
    },
    "gpt": {
        "vocab_size": "vocab_size",
        "dim": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "context": "n_positions",
    },
    "bert": {
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "mlp_dim": "intermediate_size",
        "context": "max_position_embeddings",
    },
}
_SETTINGS: dict[str, dict[str, tuple[str, Any]]] = {
    # Our field: the key, and its default in that library.
    "llama": {
        "norm_eps": ("rms_norm_eps", 1e-6),
        "attention_dropout": ("attention_dropout", 0.0),
        "tied": ("tie_word_embeddings", False),
        "context": ("max_position_embeddings", 0),
    },
    "gpt": {
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "dropout": ("resid_pdrop", 0.1),
        "attention_dropout": ("attn_pdrop", 0.1),
        "tied": ("tie_word_embeddings", True),
    },
    "bert": {
        "norm_eps": ("layer_norm_eps", 1e-12),
        "dropout": ("hidden_dropout_prob", 0.1),
        "attention_dropout": ("attention_probs_dropout_prob", 0.1),
        "tied": ("tie_word_embeddings", True),
    },
}
_REQUIRED: dict[str, dict[str, tuple[Any, ...]]] = {
    # Key: the values that our model implements; the first is that library's default and written.
    "llama": {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)},
    "gpt": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "bert": {
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute",),
        "type_vocab_size": (TOKEN_TYPES,),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
}
_UNSET = {"sliding_window": "attends to a window", "quantization_config": "has quantised weights"}


def read_config(folder: Path) -> TransformerConfig:
    """The shape that `folder`/config.json describes; ConfigError where our model is another.

    A context that a llama was made for is kept as its longest sequence.
    """
    path = Path(folder) / FILE
    require(path.is_file(), f"{path} does not exist; name the folder of a Hugging Face checkpoint")
    try:
        found = json.loads(path.read_text("utf-8"))
        require(isinstance(found, dict), f"{path} is not a JSON object; fetch it again")
        return _from_hf(found, str(path))
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be used: {error}; fetch it again") from error


def write_config(config: TransformerConfig, folder: Path, dtype: str) -> None:
    """Write `folder`/config.json for weights in `dtype`, which `read_config` gives back.

    Only a llama's dropout outside attention is lost, which has no place there. Raises ConfigError
    where that library has no such model.
    """
    text = json.dumps(_to_hf(config, dtype), indent=2, sort_keys=True)
    (Path(folder) / FILE).write_text(text + "\n", "utf-8")


def _from_hf(found: dict[str, Any], where: str) -> TransformerConfig:
    name = found.get("model_type")
    if name not in _MODELS:
        raise ConfigError(
            f"{where}: model_type {name!r} is not implemented; known: {', '.join(_MODELS)}"
        )
    family = _MODELS[name]
    for architecture in found.get("architectures") or ():
        require(
            architecture in _ARCHITECTURES[family],
            f"{where}: architecture {architecture!r} is not implemented; use weights of "
            f"{' or '.join(_ARCHITECTURES[family])}",
        )
    for key, legal in _REQUIRED[family].items():
        value = found.get(key, legal[0])
        require(
            value in legal,
            f"{where}: {key} {value!r} is not implemented, only {' and '.join(map(repr, legal))}",
        )
    for key, effect in _UNSET.items():
        require(
            not found.get(key),
            f"{where}: {key} {found.get(key)!r} is set: such a model {effect}, which is not "
            "implemented",
        )
    missing = [key for key in _SHAPES[family].values() if key not in found]
    require(not missing, f"{where} has no {', '.join(missing)}; fetch it again")
    fields = {field: found[key] for field, key in _SHAPES[family].items()}
    fields |= {field: found.get(key, std) for field, (key, std) in _SETTINGS[family].items()}
    fields["kv_heads"] = fields["heads"]
    if family == "llama":
        fields |= _llama_fields(found, where)
    if family == "gpt":
        fields["mlp_dim"] = found.get("n_inner") or 4 * fields["dim"]
        require(
            found.get("embd_pdrop", 0.1) == fields["dropout"],
            f"{where}: embd_pdrop {found.get('embd_pdrop', 0.1)} and resid_pdrop "
            f"{fields['dropout']} differ, and the model has one rate for both; set them equal",
        )
    try:
        return TransformerConfig(family=family, **fields)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _llama_fields(found: dict[str, Any], where: str) -> dict[str, Any]:
    head_dim = found["hidden_size"] // found["num_attention_heads"]
    given = found.get("head_dim") or head_dim
    require(
        given == head_dim,
        f"{where}: head_dim {given} is not implemented, only hidden_size / num_attention_heads, "
        f"{head_dim}",
    )
    # Newer files hold both settings of rotary positions in rope_parameters.
    rope = {**(found.get("rope_scaling") or {}), **(found.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(
        kind in ("default", "llama3"),
        f"{where}: rope type {kind!r} is not implemented, only 'default' and 'llama3'",
    )
    share = rope.get("partial_rotary_factor", found.get("partial_rotary_factor", 1.0))
    require(share == 1.0, f"{where}: partial_rotary_factor {share} is not implemented, only 1")
    scaling = None
    if kind == "llama3":
        missing = [key for key in _ROPE.values() if key not in rope]
        require(not missing, f"{where}: rope of type 'llama3' has no {', '.join(missing)}")
        try:
            scaling = RopeScaling(**{field: rope[key] for field, key in _ROPE.items()})
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}: {error}") from error
    return {
        "kv_heads": found.get("num_key_value_heads") or found["num_attention_heads"],
        "rope_theta": rope.get("rope_theta", found.get("rope_theta", 10_000.0)),
        "rope_scaling": scaling,
    }


_ROPE = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}


def _to_hf(config: TransformerConfig, dtype: str) -> dict[str, Any]:
    family = config.family
    require(
        family == "llama" or config.kv_heads == config.heads,
        f"model kv_heads {config.kv_heads}: Hugging Face's {family} has as many as heads "
        f"({config.heads}); such a model cannot be exported",
    )
    name = next(name for name, ours in _MODELS.items() if ours == family)
    out: dict[str, Any] = {"architectures": [_ARCHITECTURES[family][0]], "model_type": name}
    out |= {"dtype": dtype, "torch_dtype": dtype}
    out |= {key: getattr(config, field) for field, key in _SHAPES[family].items()}
    out |= {key: getattr(config, field) for field, (key, _) in _SETTINGS[family].items()}
    out |= {key: legal[0] for key, legal in _REQUIRED[family].items()}
    if family == "gpt":
        return out | {"n_inner": config.mlp_dim, "embd_pdrop": config.dropout}
    if family == "llama":
        out |= {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim}
        out["rope_theta"] = config.rope_theta
        if not config.context:
            del out["max_position_embeddings"]
        if config.rope_scaling:
            scaling = {key: getattr(config.rope_scaling, field) for field, key in _ROPE.items()}
            out["rope_scaling"] = {"rope_type": "llama3", **scaling}
    return out
