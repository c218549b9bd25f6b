# SPDX-License-Identifier: Apache-2.0
"""Between files' tensors and `Params`, one tensor at a time.

Invariant: nothing is read before every name and shape is known to fit, and beside the leaves that
are being filled there is never more than one tensor in memory, and what of it goes to a device.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from geojax.config.base import ConfigError, require
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Params, abstract_params
from geojax.models.weights.names import VOCABULARY, Tensor

Shape = tuple[int, ...]
Bounds = tuple[tuple[int, int], ...]
"""(first, last + 1) of each dim."""
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
    shardings: Params | None = None,
) -> Params:
    """`Params` in `dtype` from `source`; rows that pad the vocabulary are zeros.

    With `shardings`, one at every leaf, each layer goes straight to the devices that have a part of
    it, and no leaf is ever on the host whole. Raises ConfigError where a tensor is missing, has no
    place in the model, or has another shape.
    """
    _require_shapes(file_shapes(tensors, config), source, config)
    shapes = leaf_shapes(config)
    where = {".".join(path): sharding for path, sharding in _leaves(shardings or {})}
    params: Params = {}
    for tensor in tensors:
        leaves: list[_Leaf] = [
            _DeviceLeaf(shapes[leaf], dtype, where[leaf], tensor.stacked)
            if shardings
            else _HostLeaf(shapes[leaf], dtype)
            for leaf in tensor.leaves
        ]
        _fill(tensor, config, source, shapes, leaves)
        for path in [tuple(leaf.split(".")) for leaf in tensor.leaves]:
            leaf = leaves.pop(0).finish()
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
    leaves: "list[_Leaf]",
) -> None:
    """Write `tensor`, of all layers, into its leaves."""
    widths = [_layer_shape(leaf, shapes[leaf], config)[-1] for leaf in tensor.leaves]
    for layer, name in enumerate(tensor.names(config)):
        parts = tensor.split(source.read(name), config.head_dim, widths)
        for leaf in leaves:
            leaf.write(layer if tensor.stacked else None, parts.pop(0))


class _Leaf(Protocol):
    """A leaf that is being filled."""

    def write(self, layer: int | None, part: np.ndarray) -> None:
        """Take one layer, or all of a leaf that is not stacked, without padding."""
        ...

    def finish(self) -> Any:
        """What stands for it in `Params`."""
        ...


class _HostLeaf:
    def __init__(self, shape: Shape, dtype: DTypeLike):
        self.array = np.zeros(shape, dtype)

    def write(self, layer: int | None, part: np.ndarray) -> None:
        target = self.array if layer is None else self.array[layer]
        target[: len(part)] = part

    def finish(self) -> np.ndarray:
        return self.array


class _DeviceLeaf:
    """A leaf of which each device gets its own part, layer by layer where layers are stacked."""

    def __init__(self, shape: Shape, dtype: DTypeLike, sharding: Sharding, stacked: bool):
        self.shape, self.dtype, self.sharding = shape, dtype, sharding
        self.shards: dict[jax.Device, jax.Array] = {}
        self.places: dict[Bounds, list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            assert index is not None, "devices that cannot be reached have no part"
            place = tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
            self.places.setdefault(place, []).append(device)
            if stacked:
                sizes = [end - start for start, end in place]
                self.shards[device] = jnp.zeros(sizes, dtype, device=device)

    def write(self, layer: int | None, part: np.ndarray) -> None:
        for place, devices in self.places.items():
            if layer is None:
                piece = _piece(part, place, self.dtype)
                # Not the host's memory, which a device of a CPU might share with another.
                new = {device: jax.device_put(piece, device, may_alias=False) for device in devices}
            elif place[0][0] <= layer < place[0][1]:
                piece, number = _piece(part, place[1:], self.dtype), layer - place[0][0]
                new = {
                    device: _set_layer(self.shards[device], jax.device_put(piece, device), number)
                    for device in devices
                }
            else:
                continue
            jax.block_until_ready(list(new.values()))  # so that the piece can go
            self.shards |= new

    def finish(self) -> jax.Array:
        devices = self.sharding.addressable_devices_indices_map(self.shape)
        shards = [self.shards[device] for device in devices]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)


def _piece(part: np.ndarray, place: Bounds, dtype: DTypeLike) -> np.ndarray:
    """The part of `part` at `place`, zeros where it ends earlier."""
    piece = np.zeros([end - start for start, end in place], dtype)
    found = part[tuple(slice(*bounds) for bounds in place)]
    piece[: len(found)] = found
    return piece


@partial(jax.jit, donate_argnums=0)
def _set_layer(stack: jax.Array, layer: jax.Array, number: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, layer, number, 0)


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
