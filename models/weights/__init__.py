# SPDX-License-Identifier: Apache-2.0
"""Weights in and out: Hugging Face checkpoints (safetensors) both ways, GGUF files in.

Arrows run one way: {files, gguf_file} -> tree -> names -> hf_models. What a file's tensor means is
said once, in `names`; `tree` moves it, and the rest only knows its own file format.
"""

from geojax.models.weights.chat import read_chat, render_chat
from geojax.models.weights.files import DTYPES, load_safetensors, save_safetensors
from geojax.models.weights.gguf_file import read_gguf
from geojax.models.weights.hf_config import read_config
from geojax.models.weights.names import huggingface_tensors
from geojax.models.weights.special import SpecialTokens, forbidden_ids, read_special
from geojax.models.weights.tree import Place, file_shapes

__all__ = [
    "DTYPES",
    "Place",
    "SpecialTokens",
    "file_shapes",
    "forbidden_ids",
    "huggingface_tensors",
    "load_safetensors",
    "read_chat",
    "read_config",
    "read_gguf",
    "read_special",
    "render_chat",
    "save_safetensors",
]
