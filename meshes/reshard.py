# SPDX-License-Identifier: Apache-2.0
"""Moving a state from one strategy to another, in memory.

Invariant: values do not change, only where they lie; at any moment one leaf exists twice at most.
Within a process every new shard is put together, on the host, from the parts of old ones that it
needs: a compiler asked for the same change may copy the whole leaf to every device first, and takes
longer to compile than the bytes to travel. Across processes that is what collectives are for, and
XLA's do it.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.meshes.axes import DATA, PIPELINE, TENSOR

Bounds = tuple[tuple[int, int], ...]
"""The part of a leaf that a shard holds: start and stop on every dim."""


def reshard(
    taken: list[Any],
    shardings: Any,
    before: np.ndarray | None = None,
    after: np.ndarray | None = None,
) -> Any:
    """The tree that is the one item of `taken`, laid out as the tree of `shardings` says.

    The item is popped: a caller that keeps no other reference has each old leaf freed before the
    next moves. `before`, `after`: storage orders of stacked layers (pipeline.storage_order), which
    concern leaves below a "blocks" key.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(taken[0])[0]]
    leaves, structure = jax.tree.flatten(taken.pop())
    targets = structure.flatten_up_to(shardings)
    order = _order(before, after)
    for i, (path, target) in enumerate(zip(paths, targets, strict=True)):
        leaf, leaves[i] = leaves[i], None
        leaves[i] = jax.block_until_ready(_move(leaf, target, order if in_stack(path) else None))
        del leaf
    return jax.tree.unflatten(structure, leaves)


@dataclass(frozen=True)
class _Kept:
    """A leaf on the host: this process's shards by index, each once."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    parts: dict[str, np.ndarray]


def keep_copy(tree: Any) -> Any:
    """Host copies of this process's shards of a tree."""

    def copy(x: jax.Array) -> _Kept:
        shards = {str(s.index): s for s in x.addressable_shards}
        return _Kept(x.shape, x.sharding, {i: np.array(s.data) for i, s in shards.items()})

    return jax.tree.map(copy, tree)


def bring_back(kept: Any) -> Any:
    """The tree that `keep_copy` took, where it was."""

    def put(leaf: _Kept) -> jax.Array:
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: leaf.parts[str(index)]
        )

    return jax.tree.map(put, kept)


def in_stack(path: tuple[Any, ...]) -> bool:
    """Whether a leaf has the layers of the model on its leading dim."""
    return any(getattr(entry, "key", None) == "blocks" for entry in path)


def _order(before: np.ndarray | None, after: np.ndarray | None) -> tuple[int, ...] | None:
    """Place in the old storage of each place in the new one; None where nothing moves."""
    known = before if before is not None else after
    if known is None:
        return None
    plain = np.arange(len(known))
    old, new = (plain if order is None else order for order in (before, after))
    order = np.argsort(old)[new]
    return None if (order == plain).all() else tuple(order.tolist())


def _move(leaf: jax.Array, target: NamedSharding, order: tuple[int, ...] | None) -> jax.Array:
    if leaf.is_fully_addressable and target.is_fully_addressable:
        return _assemble(leaf, target, order)
    if order is not None:
        assert isinstance(target.mesh, Mesh), "programs lie on meshes of devices"
        whole = _move(leaf, _whole_stack(leaf.shape, target.mesh), None)
        return _move(_take(whole, order), target, None)
    if leaf.sharding.device_set != target.device_set:
        return jax.device_put(leaf, target)
    with warnings.catch_warnings():  # what a device holds may grow or shrink
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return jax.jit(_identity, out_shardings=target, donate_argnums=0)(leaf)


def _assemble(leaf: jax.Array, target: NamedSharding, order: tuple[int, ...] | None) -> jax.Array:
    shape = leaf.shape
    sources: dict[Bounds, dict[jax.Device, jax.Array]] = {}
    for shard in leaf.addressable_shards:
        sources.setdefault(_bounds(shard.index, shape), {})[shard.device] = shard.data
    on_host: dict[Bounds, np.ndarray] = {}
    made: dict[Bounds, np.ndarray] = {}
    shards = []
    for number, (device, index) in enumerate(target.devices_indices_map(shape).items()):
        wanted = _bounds(index, shape)
        runs = _runs(wanted, order)
        if len(runs) == 1 and runs[0][0] in sources:
            held = sources[runs[0][0]]
            shards.append(jax.device_put(_nearest(held, device, number), device))
            continue
        if wanted not in made:
            made[wanted] = np.empty([stop - start for start, stop in wanted], leaf.dtype)
            for (old, row), (span, held) in product(runs, sources.items()):
                part = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(span, old, strict=True)]
                if all(start < stop for start, stop in part):
                    if span not in on_host:
                        on_host[span] = np.asarray(next(iter(held.values())))
                    place = made[wanted][row:] if row else made[wanted]
                    place[_inside(part, old)] = on_host[span][_inside(part, span)]
        shards.append(jax.device_put(made[wanted], device))
    return jax.make_array_from_single_device_arrays(shape, target, shards)


def _runs(wanted: Bounds, order: tuple[int, ...] | None) -> list[tuple[Bounds, int]]:
    """The parts of a leaf in the old order of layers that make up `wanted` of the new one, each
    with the row of `wanted` that it begins at."""
    if order is None:
        return [(wanted, 0)]
    (start, stop), *rest = wanted
    places = order[start:stop]
    cuts = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
    borders = pairwise([0, *cuts, len(places)])
    return [(((places[a], places[b - 1] + 1), *rest), a) for a, b in borders]


def _nearest(held: dict[jax.Device, jax.Array], device: jax.Device, number: int) -> jax.Array:
    """The copy on `device`, or else one of them, in turn."""
    return held[device] if device in held else list(held.values())[number % len(held)]


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(i.indices(n)[:2] for i, n in zip(index, shape, strict=True))


def _inside(part: Sequence[tuple[int, int]], whole: Bounds) -> tuple[slice, ...]:
    """Where `part` of a leaf lies in a shard that holds `whole`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, whole, strict=True))


def _identity(leaf: jax.Array) -> jax.Array:
    return leaf


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def _take(stack: jax.Array, order: tuple[int, ...]) -> jax.Array:
    return stack[jnp.array(order)]


def _whole_stack(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """All layers of a part of every tensor on each device, as few copies as divide."""
    spread: list[tuple[str, ...]] = [() for _ in shape]
    sizes = list(shape)
    for axis in (PIPELINE, DATA, TENSOR):
        for dim in range(1, len(shape)):
            if sizes[dim] % mesh.shape[axis] == 0:
                sizes[dim] //= mesh.shape[axis]
                spread[dim] += (axis,)
                break
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spread)))
