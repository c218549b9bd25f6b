# SPDX-License-Identifier: Apache-2.0
"""Llamas from GGUF files: shape, parameters and tokenizer, by the `gguf` package's readers.

Invariant: quantised tensors become exactly the numbers that the format gives them, and what the
file says of the model is taken or refused, never passed over.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import DTypeLike

from geojax.config.base import ConfigError, require
from geojax.models.config import RopeScaling, TransformerConfig
from geojax.models.transformer import Params
from geojax.models.weights.gguf_tokenizer import make_tokenizer
from geojax.models.weights.names import gguf_tensors
from geojax.models.weights.tree import Place, Source, read_params

if TYPE_CHECKING:
    import tokenizers

_ROPE_TENSOR = "rope_freqs.weight"
# What a rotary scaling of the file may be beside factors, and other models under the same name.
_NEUTRAL = {
    "rope.scaling.type": ("none", ""),
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
}


def read_gguf(
    path: Path, dtype: DTypeLike = np.float32, place: Place | None = None
) -> tuple[TransformerConfig, Params, "tokenizers.Tokenizer"]:
    """The model in a GGUF file, dequantised to `dtype`, and its tokenizer.

    `place` as in `load_safetensors`. Raises ConfigError where the `gguf` package is missing, the
    file is damaged, is no llama of ours, or has a tokenizer that is not byte-level BPE.
    """
    try:
        import gguf
    except ImportError:
        raise ConfigError(
            f"{path}: GGUF files need the gguf package; install geojax[gguf]"
        ) from None
    require(Path(path).is_file(), f"{path} is not a file; check the path")
    try:
        reader = gguf.GGUFReader(path)
        fields = _Fields(reader, str(path))
        found = {tensor.name: tensor for tensor in reader.tensors}
        shapes = {n: tuple(int(size) for size in t.shape[::-1]) for n, t in found.items()}
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} is not a GGUF file, or damaged: {error}") from error
    factors = found.get(_ROPE_TENSOR)
    config = _config(fields, shapes, None if factors is None else np.array(factors.data))
    shapes.pop(_ROPE_TENSOR, None)

    def read(name: str) -> np.ndarray:
        tensor = found[name]
        try:
            return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shapes[name])
        except NotImplementedError as error:
            raise ConfigError(
                f"{path}: tensor {name!r} is quantised as {tensor.tensor_type.name}, which the "
                "gguf package cannot undo; use another quantisation of the model"
            ) from error

    source = Source(str(path), shapes, read)
    tokenizer = make_tokenizer(fields.get, str(path))  # first, since it is refused in an instant
    return config, read_params(gguf_tensors(config), config, source, dtype, place), tokenizer


class _Fields:
    """The file's settings as Python values; float32 numbers as the decimals they stand for."""

    def __init__(self, reader: Any, where: str):
        self.reader, self.where = reader, where

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        value = default if field is None else field.contents()
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.where} has no {key}; fetch it again, or convert it anew")
        return value


def _config(
    fields: _Fields, shapes: dict[str, tuple[int, ...]], factors: np.ndarray | None
) -> TransformerConfig:
    where, name = fields.where, fields.need("general.architecture")
    require(name == "llama", f"{where}: architecture {name!r} is not implemented, only 'llama'")
    for key, legal in _NEUTRAL.items():
        value = fields.get(f"llama.{key}", legal[0])
        require(
            value in legal,
            f"{where}: llama.{key} {value!r} is not implemented, only {legal[0]!r}",
        )
    require(
        "token_embd.weight" in shapes,
        f"{where} has no tensor 'token_embd.weight'; name the first file of the model whole",
    )
    dim, heads = fields.need("llama.embedding_length"), fields.need("llama.attention.head_count")
    kv_heads = fields.get("llama.attention.head_count_kv", heads)
    for key, value in (("head_count", heads), ("head_count_kv", kv_heads)):
        require(
            isinstance(value, int),
            f"{where}: llama.attention.{key} {value} is not implemented, only one number of all "
            "layers",
        )
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        size = fields.get(f"llama.{key}", dim // heads)
        require(
            size == dim // heads,
            f"{where}: llama.{key} {size} is not implemented, only embedding_length / head_count, "
            f"{dim // heads}",
        )
    theta = fields.get("llama.rope.freq_base", 10_000.0)
    try:
        return TransformerConfig(
            vocab_size=shapes["token_embd.weight"][0],
            dim=dim,
            layers=fields.need("llama.block_count"),
            heads=heads,
            kv_heads=kv_heads,
            mlp_dim=fields.need("llama.feed_forward_length"),
            tied="output.weight" not in shapes,
            context=fields.get("llama.context_length", 0),
            rope_theta=theta,
            rope_scaling=None if factors is None else _scaling(factors, theta, where),
            norm_eps=fields.need("llama.attention.layer_norm_rms_epsilon"),
        )
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _scaling(factors: np.ndarray, theta: float, where: str) -> RopeScaling:
    """The scaling whose stretches `factors` are, of Llama 3's usual bounds.

    The file has one factor a rotary pair, in which the settings no longer show.
    """
    scaling = RopeScaling(factor=float(np.max(factors)))
    frequencies = theta ** (-np.arange(len(factors)) / len(factors))
    turns = scaling.original_context * frequencies / (2 * np.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0, 1)
    expected = 1 / (keep + (1 - keep) / scaling.factor)
    require(
        np.allclose(factors, expected, rtol=1e-3),
        f"{where}: the factors in {_ROPE_TENSOR!r} are not those of {scaling}, and no others are "
        "implemented; import the model from its Hugging Face folder",
    )
    return scaling
