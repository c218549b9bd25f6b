# SPDX-License-Identifier: Apache-2.0
"""Which tensor of a file holds which of our parameters: one table a format, read both ways.

Invariant: a table names every leaf of `Params` exactly once, and a tensor is its leaves moved
about, never computed with, so that what import reads and export writes agree bit for bit.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from geojax.config.base import ConfigError
from geojax.models.config import TransformerConfig
from geojax.models.weights.hf_models import hf_model

VOCABULARY = ("embed", "head", "head_bias")
"""Leaves with one row an entry of the vocabulary: files have none of the padding."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file, or one a layer where the leaves are stacked."""

    name: str
    """Where there is one a layer, {i} is the layer."""
    leaves: tuple[str, ...]
    """Dotted paths in `Params`; several lie side by side on the last dim of the one tensor."""
    transposed: bool = False
    """Whether the file has [out, in], where we have [in, out]."""
    paired: bool = False
    """Whether the elements of a rotary pair are neighbours, not half a head apart."""

    @property
    def stacked(self) -> bool:
        return "{i}" in self.name

    def names(self, config: TransformerConfig) -> list[str]:
        """The name for each layer, or the one name."""
        return (
            [self.name.format(i=i) for i in range(config.layers)] if self.stacked else [self.name]
        )

    def shape(self, leaves: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Shape in the file, from those of its leaves in one layer."""
        joined = (*leaves[0][:-1], sum(shape[-1] for shape in leaves))
        return joined[::-1] if self.transposed else joined

    def split(self, array: np.ndarray, head_dim: int, widths: list[int]) -> list[np.ndarray]:
        """The leaves of one layer, as views or copies; `widths` are their last dims."""
        if self.paired:
            pairs = array.reshape(-1, head_dim // 2, 2, array.shape[-1])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        if self.transposed:
            array = array.T
        return np.split(array, np.cumsum(widths)[:-1], axis=-1)

    def join(self, leaves: list[np.ndarray]) -> np.ndarray:
        """The tensor of one layer; the inverse of `split` where nothing is paired."""
        assert not self.paired, f"{self.name}: formats of neighbouring pairs are read only"
        array = leaves[0] if len(leaves) == 1 else np.concatenate(leaves, axis=-1)
        return array.T if self.transposed else array


def huggingface_tensors(config: TransformerConfig) -> list[Tensor]:
    """The tensors of a Hugging Face checkpoint with the language model's head.

    ConfigError where that library has no such model.
    """
    return _TABLES[hf_model(config).model_type](config)


def gguf_tensors(config: TransformerConfig) -> list[Tensor]:
    """The tensors of a GGUF file of architecture llama."""
    block = "blk.{i}."
    tensors = [
        Tensor("token_embd.weight", ("embed",)),
        Tensor(f"{block}attn_norm.weight", ("blocks.attention_norm.scale",)),
        _linear(f"{block}attn_q", "blocks.attention.query", paired=True),
        _linear(f"{block}attn_k", "blocks.attention.key", paired=True),
        _linear(f"{block}attn_v", "blocks.attention.value"),
        _linear(f"{block}attn_output", "blocks.attention.out"),
        Tensor(f"{block}ffn_norm.weight", ("blocks.mlp_norm.scale",)),
        _linear(f"{block}ffn_gate", "blocks.mlp.gate"),
        _linear(f"{block}ffn_up", "blocks.mlp.up"),
        _linear(f"{block}ffn_down", "blocks.mlp.down"),
        Tensor("output_norm.weight", ("norm.scale",)),
    ]
    return tensors if config.tied else [*tensors, Tensor("output.weight", ("head",))]


@dataclass(frozen=True)
class FoundNames:
    """What a Hugging Face checkpoint's names turn out to be."""

    tensors: dict[str, str]
    """Name in the table, or one that the table lacks, to the name in the file."""
    copies: dict[str, str]
    """A tied tensor's second name, as the file has it, to the name in the table."""
    left_out: list[str]
    """Parameters that the model has no use for, such as a pooler; buffers are not among them."""


def find_names(names: Iterable[str], config: TransformerConfig) -> FoundNames:
    """Sort the tensors of a file, whichever of the model's spellings it has.

    Raises ConfigError where two tensors are spellings of one.
    """
    names, model_type = list(names), hf_model(config).model_type
    copied = _COPIES.get(model_type, _COPIES["llama"])
    bare = model_type == "gpt2" and not any(name.startswith("transformer.") for name in names)
    tensors: dict[str, str] = {}
    copies, left_out = {}, []
    for name in names:
        known = f"transformer.{name}" if bare and not name.startswith("lm_head.") else name
        if model_type == "bert":
            known = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", known)
            known = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", known)
        if re.fullmatch(_BUFFERS.get(model_type, _BUFFERS["llama"]), known):
            continue
        if re.fullmatch(_UNUSED.get(model_type, ""), known):
            left_out.append(name)
        elif config.tied and known in copied:
            copies[name] = copied[known]
        elif known in tensors:
            raise ConfigError(
                f"tensors {tensors[known]!r} and {name!r} are two spellings of one; delete one"
            )
        else:
            tensors[known] = name
    return FoundNames(tensors, copies, left_out)


# Those of llama are Qwen2's and Dream's as well.
_BUFFERS = {
    "llama": r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    "gpt2": r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    "bert": r"bert\.embeddings\.(position_ids|token_type_ids)",
}
_UNUSED = {"bert": r"(bert\.pooler|cls\.seq_relationship)\..*"}
_COPIES = {
    "llama": {"lm_head.weight": "model.embed_tokens.weight"},
    "llada": {"model.transformer.ff_out.weight": "model.transformer.wte.weight"},
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
    "bert": {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
}


def _llama(config: TransformerConfig) -> list[Tensor]:
    layer = "model.layers.{i}."
    projection = _biased if config.qkv_bias else _unbiased
    tensors = [
        Tensor("model.embed_tokens.weight", ("embed",)),
        Tensor(f"{layer}input_layernorm.weight", ("blocks.attention_norm.scale",)),
        *projection(f"{layer}self_attn.q_proj", "blocks.attention.query"),
        *projection(f"{layer}self_attn.k_proj", "blocks.attention.key"),
        *projection(f"{layer}self_attn.v_proj", "blocks.attention.value"),
        _linear(f"{layer}self_attn.o_proj", "blocks.attention.out"),
        Tensor(f"{layer}post_attention_layernorm.weight", ("blocks.mlp_norm.scale",)),
        _linear(f"{layer}mlp.gate_proj", "blocks.mlp.gate"),
        _linear(f"{layer}mlp.up_proj", "blocks.mlp.up"),
        _linear(f"{layer}mlp.down_proj", "blocks.mlp.down"),
        Tensor("model.norm.weight", ("norm.scale",)),
    ]
    return tensors if config.tied else [*tensors, Tensor("lm_head.weight", ("head",))]


def _llada(config: TransformerConfig) -> list[Tensor]:
    stem, block = "model.transformer.", "model.transformer.blocks.{i}."
    tensors = [
        Tensor(f"{stem}wte.weight", ("embed",)),
        Tensor(f"{block}attn_norm.weight", ("blocks.attention_norm.scale",)),
        _linear(f"{block}q_proj", "blocks.attention.query"),
        _linear(f"{block}k_proj", "blocks.attention.key"),
        _linear(f"{block}v_proj", "blocks.attention.value"),
        _linear(f"{block}attn_out", "blocks.attention.out"),
        Tensor(f"{block}ff_norm.weight", ("blocks.mlp_norm.scale",)),
        _linear(f"{block}ff_proj", "blocks.mlp.gate"),
        _linear(f"{block}up_proj", "blocks.mlp.up"),
        _linear(f"{block}ff_out", "blocks.mlp.down"),
        Tensor(f"{stem}ln_f.weight", ("norm.scale",)),
    ]
    # The name of a layer's own last projection, and of the model's.
    return tensors if config.tied else [*tensors, Tensor(f"{stem}ff_out.weight", ("head",))]


def _gpt(config: TransformerConfig) -> list[Tensor]:
    block = "transformer.h.{i}."
    attention = tuple(f"blocks.attention.{name}" for name in ("query", "key", "value"))
    tensors = [
        Tensor("transformer.wte.weight", ("embed",)),
        Tensor("transformer.wpe.weight", ("positions",)),
        *_norm(f"{block}ln_1", "blocks.attention_norm"),
        *_biased(f"{block}attn.c_attn", *attention, transposed=False),
        *_biased(f"{block}attn.c_proj", "blocks.attention.out", transposed=False),
        *_norm(f"{block}ln_2", "blocks.mlp_norm"),
        *_biased(f"{block}mlp.c_fc", "blocks.mlp.up", transposed=False),
        *_biased(f"{block}mlp.c_proj", "blocks.mlp.down", transposed=False),
        *_norm("transformer.ln_f", "norm"),
    ]
    return tensors if config.tied else [*tensors, Tensor("lm_head.weight", ("head",))]


def _bert(config: TransformerConfig) -> list[Tensor]:
    tables, layer, head = "bert.embeddings.", "bert.encoder.layer.{i}.", "cls.predictions."
    return [
        Tensor(f"{tables}word_embeddings.weight", ("embed",)),
        Tensor(f"{tables}position_embeddings.weight", ("positions",)),
        Tensor(f"{tables}token_type_embeddings.weight", ("types",)),
        *_norm(f"{tables}LayerNorm", "embed_norm"),
        *_biased(f"{layer}attention.self.query", "blocks.attention.query"),
        *_biased(f"{layer}attention.self.key", "blocks.attention.key"),
        *_biased(f"{layer}attention.self.value", "blocks.attention.value"),
        *_biased(f"{layer}attention.output.dense", "blocks.attention.out"),
        *_norm(f"{layer}attention.output.LayerNorm", "blocks.attention_norm"),
        *_biased(f"{layer}intermediate.dense", "blocks.mlp.up"),
        *_biased(f"{layer}output.dense", "blocks.mlp.down"),
        *_norm(f"{layer}output.LayerNorm", "blocks.mlp_norm"),
        *_biased(f"{head}transform.dense", "transform"),
        *_norm(f"{head}transform.LayerNorm", "norm"),
        Tensor(f"{head}bias", ("head_bias",)),
    ]


_TABLES = {
    "llama": _llama,
    "qwen2": _llama,
    "Dream": _llama,
    "llada": _llada,
    "gpt2": _gpt,
    "bert": _bert,
}


def _linear(name: str, leaf: str, paired: bool = False) -> Tensor:
    return Tensor(f"{name}.weight", (leaf,), transposed=True, paired=paired)


def _unbiased(name: str, leaf: str) -> tuple[Tensor]:
    return (_linear(name, leaf),)


def _biased(name: str, *leaves: str, transposed: bool = True) -> tuple[Tensor, Tensor]:
    biases = tuple(f"{leaf}_bias" for leaf in leaves)
    return Tensor(f"{name}.weight", leaves, transposed), Tensor(f"{name}.bias", biases)


def _norm(name: str, leaf: str) -> tuple[Tensor, Tensor]:
    return Tensor(f"{name}.weight", (f"{leaf}.scale",)), Tensor(f"{name}.bias", (f"{leaf}.bias",))
