# SPDX-License-Identifier: Apache-2.0
"""Shapes from and to Hugging Face's config.json.

Invariant: a file is taken only where our model computes what it describes: a setting that would
change the result and that we have no part for is refused by name. Settings of training alone, such
as initial ranges, are not looked at, and a setting left out has the default of the model's library.
"""

import json
from pathlib import Path
from typing import Any

from geojax.config.base import ConfigError, require
from geojax.models.config import RopeScaling, TransformerConfig
from geojax.models.weights.hf_models import HF_MODELS, HFModel, hf_model
from geojax.models.weights.special import SpecialTokens

FILE = "config.json"


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


def write_config(
    config: TransformerConfig, folder: Path, dtype: str, special: SpecialTokens | None = None
) -> None:
    """Write `folder`/config.json for weights in `dtype`, which `read_config` gives back.

    `special`: ids that it names as well. Only a llama's dropout outside attention is lost, which
    has no place there unless it is a LLaDA. Raises ConfigError where there is no such model.
    """
    out = _to_hf(config, dtype) | (special.ids() if special else {})
    text = json.dumps(out, indent=2, sort_keys=True)
    (Path(folder) / FILE).write_text(text + "\n", "utf-8")


def _from_hf(found: dict[str, Any], where: str) -> TransformerConfig:
    name = found.get("model_type")
    model = next((model for model in HF_MODELS if model.model_type == name), None)
    if model is None:
        known = ", ".join(model.model_type for model in HF_MODELS)
        raise ConfigError(f"{where}: model_type {name!r} is not implemented; known: {known}")
    for architecture in found.get("architectures") or ():
        require(
            architecture in model.architectures,
            f"{where}: architecture {architecture!r} is not implemented; use weights of "
            f"{' or '.join(model.architectures)}",
        )
    missing = [key for key in (*model.shapes.values(), *model.explicit) if key not in found]
    require(not missing, f"{where} has no {', '.join(missing)}; fetch it again")
    for key, legal in model.required.items():
        value = found.get(key, legal[0])
        require(
            value in legal,
            f"{where}: {key} {value!r} is not implemented, only {' and '.join(map(repr, legal))}",
        )
    for key, effect in model.unset.items():
        require(
            not found.get(key),
            f"{where}: {key} {found.get(key)!r} is set: such a model {effect}, which is not "
            "implemented",
        )
    fields: dict[str, Any] = {**model.flags}
    fields |= {field: found[key] for field, key in model.shapes.items()}
    fields |= {field: found.get(key, std) for field, (key, std) in model.settings.items()}
    fields |= _own_fields(model, found, fields, where)
    try:
        return TransformerConfig(family=model.family, **fields)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _own_fields(
    model: HFModel, found: dict[str, Any], fields: dict[str, Any], where: str
) -> dict[str, Any]:
    """What takes more than a look at one key."""
    if model.embedding_dropout:
        key = model.embedding_dropout
        require(
            found.get(key, 0.1) == fields["dropout"],
            f"{where}: {key} {found.get(key, 0.1)} and {model.settings['dropout'][0]} "
            f"{fields['dropout']} differ, and the model has one rate for both; set them equal",
        )
    if model.model_type == "llada":
        return _llada_fields(found, where)
    if model.family == "llama":
        return _llama_fields(found, where)
    mlp_dim = fields.get("mlp_dim") or found.get("n_inner") or 4 * fields["dim"]
    return {"kv_heads": fields["heads"], "mlp_dim": mlp_dim}


def _llada_fields(found: dict[str, Any], where: str) -> dict[str, Any]:
    kv_heads, shared = found.get("n_kv_heads"), found.get("multi_query_attention")
    if kv_heads is None:
        kv_heads = 1 if shared else found["n_heads"]
    require(
        shared is None or bool(shared) == (kv_heads == 1),
        f"{where}: multi_query_attention {shared} and n_kv_heads {kv_heads} contradict each other; "
        "set multi_query_attention to null",
    )
    return {
        "kv_heads": kv_heads,
        "mlp_dim": found.get("mlp_hidden_size") or found.get("mlp_ratio", 4) * found["d_model"],
        # Every row of the table is multiplied by, those beyond the tokenizer's entries too.
        "vocab_size": found.get("embedding_size") or found["vocab_size"],
    }


def _llama_fields(found: dict[str, Any], where: str) -> dict[str, Any]:
    head_dim = found["hidden_size"] // found["num_attention_heads"]
    given = found.get("head_dim") or head_dim
    require(
        given == head_dim,
        f"{where}: head_dim {given} is not implemented, only hidden_size / num_attention_heads, "
        f"{head_dim}",
    )
    windows = [kind for kind in found.get("layer_types") or () if kind != "full_attention"]
    require(
        not windows,
        f"{where}: layer_types {windows[:1]} are not implemented, only 'full_attention'",
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
    model = hf_model(config)
    require(
        config.family == "llama" or config.kv_heads == config.heads,
        f"model kv_heads {config.kv_heads}: Hugging Face's {config.family} has as many as heads "
        f"({config.heads}); such a model cannot be exported",
    )
    require(
        not config.rope_scaling or model.model_type != "llada",
        "model rope_scaling: a LLaDA's config.json has no place for it; such a model cannot be "
        "exported",
    )
    out: dict[str, Any] = {"architectures": [model.architectures[0]]}
    out |= {"model_type": model.model_type, "dtype": dtype, "torch_dtype": dtype}
    out |= {key: getattr(config, field) for field, key in model.shapes.items()}
    out |= {key: getattr(config, field) for field, (key, _) in model.settings.items()}
    out |= {key: legal[0] for key, legal in model.required.items()}
    if model.embedding_dropout:
        out[model.embedding_dropout] = config.dropout
    if not config.context and "context" in model.settings:
        del out[model.settings["context"][0]]
    if config.family == "gpt":
        out["n_inner"] = config.mlp_dim
    if model.model_type == "llada":
        out |= {"n_kv_heads": config.kv_heads, "mlp_hidden_size": config.mlp_dim}
        out |= {"vocab_size": config.vocab_size, "embedding_size": config.vocab_size}
        return out
    if config.family == "llama":
        out |= {"num_key_value_heads": config.kv_heads, "rope_theta": config.rope_theta}
        if model.model_type == "llama":
            out["head_dim"] = config.head_dim
        if config.rope_scaling:
            scaling = {key: getattr(config.rope_scaling, field) for field, key in _ROPE.items()}
            out["rope_scaling"] = {"rope_type": "llama3", **scaling}
    return out
