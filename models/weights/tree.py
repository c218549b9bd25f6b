# SPDX-License-Identifier: Apache-2.0
"""Between files' tensors and `Params`, one tensor at a time.

Invariant: nothing is read before every name and shape is known to fit, and beside the leaves that
are being filled there is never more than one tensor in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from geojax.config import ConfigError, require
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Params, abstract_params
from geojax.models.weights.names import VOCABULARY, Tensor

Shape = tuple[int, ...]
Place = Callable[[tuple[str, ...], np.ndarray], Any]
"""(path of a leaf, its finished array) -> what stands for it in `Params`, such as device arrays.

The array is the callee's: it is written once, and nothing keeps it."""


@dataclass(frozen=True)
class Source:
    """Tensors that can be read one by one."""

    where: str
    """What errors call it."""
    shapes: Mapping[str, Shape]
    read: Callable[[str], np.ndarray]


def leaf_shapes(config: TransformerConfig) -> dict[str, Shape]:
    """Shape of every leaf of `Params` by its dotted path."""
    return {".".join(path): leaf.shape for path, leaf in _leaves(abstract_params(config))}


def file_shapes(tensors: list[Tensor], config: TransformerConfig) -> dict[str, Shape]:
    """Names and shapes of all tensors of a file; the vocabulary is not padded there."""
    leaves = leaf_shapes(config)
    return {
        name: tensor.shape([_layer_shape(leaf, leaves[leaf], config) for leaf in tensor.leaves])
        for tensor in tensors
        for name in tensor.names(config)
    }


def read_params(
    tensors: list[Tensor],
    config: TransformerConfig,
    source: Source,
    dtype: DTypeLike,
    place: Place | None = None,
) -> Params:
    """`Params` in `dtype` from `source`; rows that pad the vocabulary are zeros.

    Raises ConfigError where a tensor is missing, has no place in the model, or has another shape.
    """
    _require_shapes(file_shapes(tensors, config), source, config)
    shapes = leaf_shapes(config)
    params: Params = {}
    for tensor in tensors:
        leaves = _fill(tensor, config, source, shapes, dtype)
        for path in [tuple(leaf.split(".")) for leaf in tensor.leaves]:
            leaf = leaves.pop(0)
            _set(params, path, place(path, leaf) if place else leaf)
            del leaf  # or it would be there while the next is filled
    return params


def iter_tensors(
    tensors: list[Tensor], config: TransformerConfig, params: Params
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of all tensors of a file in the order of `file_shapes`.

    A leaf comes to the host when its turn is there. Raises ConfigError where `params` are not those
    of `config`.
    """
    leaves, expected = {".".join(p): leaf for p, leaf in _leaves(params)}, leaf_shapes(config)
    found = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    wrong = sorted(n for n in found.keys() | expected if found.get(n) != expected.get(n))
    if wrong:
        raise ConfigError(
            f"parameters are not those of the config: {wrong[0]} is {found.get(wrong[0])}, the "
            f"config makes it {expected.get(wrong[0])}; use the config that the model was built of"
        )
    for tensor in tensors:
        arrays = [np.asarray(leaves[leaf]) for leaf in tensor.leaves]
        for layer, name in enumerate(tensor.names(config)):
            parts = [array[layer] if tensor.stacked else array for array in arrays]
            if tensor.leaves[0] in VOCABULARY:
                parts = [part[: config.vocab_size] for part in parts]
            yield name, tensor.join(parts)


def _fill(
    tensor: Tensor,
    config: TransformerConfig,
    source: Source,
    shapes: dict[str, Shape],
    dtype: DTypeLike,
) -> list[np.ndarray]:
    """The leaves of `tensor`, of all layers."""
    leaves = [np.zeros(shapes[leaf], dtype) for leaf in tensor.leaves]
    widths = [_layer_shape(leaf, shapes[leaf], config)[-1] for leaf in tensor.leaves]
    for layer, name in enumerate(tensor.names(config)):
        targets = [leaf[layer] for leaf in leaves] if tensor.stacked else leaves
        _copy(tensor.split(source.read(name), config.head_dim, widths), targets)
    return leaves


def _copy(parts: list[np.ndarray], targets: list[np.ndarray]) -> None:
    """A function, so that a tensor is gone before the next one is read."""
    for part, target in zip(parts, targets, strict=True):
        target[: len(part)] = part


def _layer_shape(leaf: str, shape: Shape, config: TransformerConfig) -> Shape:
    """Shape of one layer of a leaf, without padding."""
    if leaf in VOCABULARY:
        return (config.vocab_size, *shape[1:])
    return shape[1:] if leaf.startswith("blocks.") else shape


def _require_shapes(expected: dict[str, Shape], source: Source, config: TransformerConfig) -> None:
    for name, shape in expected.items():
        found = source.shapes.get(name)
        require(
            found is not None,
            f"{source.where} has no tensor {name!r}, which this {config.family} needs as "
            f"{list(shape)}; use the config of these weights, or export them with their head",
        )
        require(
            found == shape,
            f"{source.where}: tensor {name!r} is {list(found or ())}, but the config makes it "
            f"{list(shape)}; use the config of these weights",
        )
    extra = next((name for name in source.shapes if name not in expected), None)
    if extra:
        raise ConfigError(
            f"{source.where}: tensor {extra!r} of {list(source.shapes[extra])} has no place in "
            f"this {config.family} (expected shape: none); use the config of these weights, or "
            "remove the tensor if it can be done without"
        )


def _leaves(params: Params) -> list[tuple[tuple[str, ...], Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [(tuple(str(entry.key) for entry in path), leaf) for path, leaf in leaves]


def _set(tree: Params, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value
