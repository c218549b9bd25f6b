# SPDX-License-Identifier: Apache-2.0
"""Parameters from and to safetensors files under the names that Hugging Face gives them.

Invariant: import after export gives the parameters back bit for bit, and export after import gives
every tensor back bit for bit; a folder that is being written appears whole or not at all.
"""

import json
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from geojax.config.base import ConfigError, require
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Params
from geojax.models.weights.hf_config import write_config
from geojax.models.weights.names import find_names, huggingface_tensors
from geojax.models.weights.special import SpecialTokens
from geojax.models.weights.tree import (
    Place,
    Shape,
    Source,
    file_shapes,
    iter_tensors,
    read_params,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}
"""What can be written."""

_STORED = {"float32": "F32", "bfloat16": "BF16"}
_READABLE = ("F64", "F32", "F16", "BF16")
_ROWS = 4096  # of a tensor and its copy that are compared at a time


def load_safetensors(
    path: Path,
    config: TransformerConfig,
    dtype: DTypeLike = np.float32,
    place: Place | None = None,
    progress: Callable[[str], None] | None = None,
    shardings: Params | None = None,
) -> Params:
    """`Params` of `config` in `dtype`, from a safetensors file or a checkpoint's folder.

    Memory beyond the parameters is that of the largest tensor; with `place`, which may move each
    leaf to devices as soon as it is whole, parameters are not all on the host either; with
    `shardings`, a tree of them like the parameters, no leaf is, and each device gets its own part.
    `progress` receives a line about parameters that are left out: a bert's pooler and next-sentence
    head.

    Raises ConfigError where files are missing or damaged, or a tensor is missing, superfluous, of
    another shape, of no floating type, or differs from the one that it is a tied copy of.
    """
    with ExitStack() as stack:
        stored: dict[str, Any] = {}
        for file in _files(Path(path)):
            opened = stack.enter_context(_open(file))
            for name in list(opened.keys()):
                require(name not in stored, f"{file}: tensor {name!r} is in another file as well")
                stored[name] = opened
        found = find_names(stored, config)
        shapes = {known: _shape(stored[name], name, path) for known, name in found.tensors.items()}
        for name, original in found.copies.items():
            require(
                original in shapes and _equal(stored, name, found.tensors[original]),
                f"{path}: tensor {name!r} differs from {original!r}, though the config ties them; "
                "untie them in the config (tie_word_embeddings), or remove the tensor",
            )
        if found.left_out and progress:
            progress(f"left out, the model has no use for them: {', '.join(found.left_out)}")

        def read(name: str) -> np.ndarray:
            stored_name = found.tensors[name]
            return stored[stored_name].get_tensor(stored_name)

        source = Source(str(path), shapes, read)
        return read_params(huggingface_tensors(config), config, source, dtype, place, shardings)


def save_safetensors(
    params: Params,
    config: TransformerConfig,
    folder: Path,
    max_shard_bytes: float = 5e9,
    dtype: str = "float32",
    special: SpecialTokens | None = None,
) -> None:
    """Write a new folder of model.safetensors and config.json, as Hugging Face libraries read it.

    Tensors of more than `max_shard_bytes` in all are spread over files with an index. `dtype` is
    float32 or bfloat16 (rounded to the nearest); `special` ids go into config.json. Raises
    ConfigError where the folder has something in it, the parameters are not those of `config`, or
    no checkpoint format has such a model.
    """
    require(dtype in DTYPES, f"weights cannot be written as {dtype!r}; use {' or '.join(DTYPES)}")
    require(max_shard_bytes > 0, f"max_shard_bytes {max_shard_bytes} must be above 0; use 5e9")
    tensors, kind = huggingface_tensors(config), DTYPES[dtype]
    sizes = {n: _count(s) * kind.itemsize for n, s in file_shapes(tensors, config).items()}
    shards = _shard(sizes, max_shard_bytes)
    shapes = file_shapes(tensors, config)
    arrays = iter_tensors(tensors, config, params)
    with _new_folder(Path(folder)) as temporary:
        write_config(config, temporary, dtype, special)
        index: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            of = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
            file = SINGLE.replace(".", f"{of}.", 1)
            index |= dict.fromkeys(names, file)
            with (temporary / file).open("wb") as out:
                out.write(_header({name: shapes[name] for name in names}, dtype))
                for name in names:
                    current, array = next(arrays)
                    assert current == name, f"{current} where {name} belongs"
                    array = np.ascontiguousarray(array, kind)
                    out.write(array.reshape(-1).view(np.uint8).data)
        if len(shards) > 1:
            meta = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
            (temporary / INDEX).write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n")


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    require(path.is_dir(), f"weights {path} are neither a file nor a folder; check the path")
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    require(
        (path / INDEX).is_file(),
        f"{path} has neither {SINGLE} nor {INDEX}; name the safetensors file itself, or convert "
        "other formats to safetensors first",
    )
    try:
        files = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path / INDEX} is damaged ({type(error).__name__}: {error}); fetch it again"
        ) from error
    for file in files:
        require(
            Path(file).name == file and (path / file).is_file(),
            f"{path / INDEX} names {file!r}, which is not in the folder; fetch it again",
        )
    return [path / file for file in files]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; fetch it again") from error


def _shape(opened: Any, name: str, path: Path) -> Shape:
    part = opened.get_slice(name)
    require(
        part.get_dtype() in _READABLE,
        f"{path}: tensor {name!r} is of type {part.get_dtype()}, not one of "
        f"{', '.join(_READABLE)}; use weights that are not quantised",
    )
    return tuple(part.get_shape())


def _equal(stored: dict[str, Any], name: str, original: str) -> bool:
    one, other = stored[name].get_slice(name), stored[original].get_slice(original)
    if (one.get_shape(), one.get_dtype()) != (other.get_shape(), other.get_dtype()):
        return False
    rows = one.get_shape()[0]
    slices = [slice(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS)]
    return all(one[part].tobytes() == other[part].tobytes() for part in slices)


def _shard(sizes: dict[str, int], most_bytes: float) -> list[list[str]]:
    """Names in order, in as many files as it takes; a larger tensor has a file of its own."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > most_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards


def _header(shapes: dict[str, Shape], dtype: str) -> bytes:
    """Length, JSON and padding that come before the data, by the format's description.

    Written here, since the library takes all tensors of a file at once.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + _count(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": _STORED[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _count(shape: Shape) -> int:
    return int(np.prod(shape, dtype=np.int64))


@contextmanager
def _new_folder(target: Path) -> Generator[Path]:
    """A folder beside `target` that takes its name when the block succeeds."""
    require(
        not target.exists() or (target.is_dir() and not any(target.iterdir())),
        f"{target} exists and is not an empty folder; choose another, or remove it",
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid4().hex}")
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
