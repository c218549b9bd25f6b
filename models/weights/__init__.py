# SPDX-License-Identifier: Apache-2.0
"""Weights in and out: Hugging Face checkpoints (safetensors) both ways, GGUF files in.

Arrows run one way: {files, gguf_file} -> tree -> names. What a file's tensor means is said once, in
`names`; `tree` moves it, and the rest only knows its own file format.
"""

from geojax.models.weights.files import DTYPES, load_safetensors, save_safetensors
from geojax.models.weights.gguf_file import read_gguf
from geojax.models.weights.hf_config import read_config
from geojax.models.weights.names import huggingface_tensors
from geojax.models.weights.tree import Place, file_shapes

__all__ = [
    "DTYPES",
    "Place",
    "file_shapes",
    "huggingface_tensors",
    "load_safetensors",
    "read_config",
    "read_gguf",
    "save_safetensors",
]
