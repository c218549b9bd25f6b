# SPDX-License-Identifier: Apache-2.0
"""Moving messages between slices: the `mesh` engine, collectives over the slice axis.

An engine moves opaque bytes and knows nothing of codecs; `all_gather` and `all_to_all` are all that
any schedule needs. This one serves slices that are all in one process.
"""

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import UInt8

from geojax.meshes.axes import SLICE, slice_mesh

Message = UInt8[np.ndarray, "_"]


class MeshExchange:
    """shard_map over the slice axis, whose places each carry the same number of slices.

    As many of the leaders' devices are places as divide the slices evenly; slices lie on them in
    order.
    """

    def __init__(self, leaders: Sequence[jax.Device]):
        """`leaders`: one device a slice, in slice order."""
        self._slices = len(leaders)
        self._mesh = slice_mesh(_places(leaders))
        self._sharding = NamedSharding(self._mesh, PartitionSpec(SLICE))
        spec = PartitionSpec(SLICE)
        shard = partial(jax.shard_map, mesh=self._mesh, in_specs=spec, out_specs=spec)
        # Every place receives all rows; the leading dim of 1 keeps the copies apart.
        self._gather = jax.jit(shard(lambda x: jax.lax.all_gather(x, SLICE, tiled=True)[None]))
        # [k, K, n] on each place becomes [K, k, n]: from all senders, for its own receivers.
        self._to_all = jax.jit(
            shard(lambda x: jax.lax.all_to_all(x, SLICE, 1, 0, tiled=True).swapaxes(0, 1))
        )

    def all_gather(self, messages: Sequence[Message]) -> list[list[Message]]:
        """[receiver][sender]: every slice receives the message of every slice, its own included.

        Messages may differ in length.
        """
        sizes = [m.size for m in messages]
        received = self._gather(self._put(_stack(messages)))
        places = [np.asarray(shard.data)[0] for shard in _in_order(received)]
        share = self._slices // len(places)
        return [
            [places[r // share][s, : sizes[s]] for s in range(self._slices)]
            for r in range(self._slices)
        ]

    def all_to_all(self, messages: Sequence[Sequence[Message]]) -> list[list[Message]]:
        """[receiver][sender] from [sender][receiver]."""
        flat = _stack([m for row in messages for m in row])
        received = np.asarray(self._to_all(self._put(flat.reshape(self._slices, self._slices, -1))))
        return [
            [received[r, s, : messages[s][r].size] for s in range(self._slices)]
            for r in range(self._slices)
        ]

    def _put(self, rows: np.ndarray) -> jax.Array:
        return jax.device_put(rows, self._sharding)


def _places(leaders: Sequence[jax.Device]) -> list[jax.Device]:
    """The devices of the slice axis: as many as leaders differ, if they divide the slices."""
    distinct = list(dict.fromkeys(leaders))
    count = max(n for n in range(1, len(distinct) + 1) if len(leaders) % n == 0)
    return distinct[:count]


def _stack(messages: Sequence[Message]) -> UInt8[np.ndarray, "rows n"]:
    rows = np.zeros((len(messages), max(m.size for m in messages)), np.uint8)
    for row, message in zip(rows, messages, strict=True):
        row[: message.size] = message
    return rows


def _in_order(array: jax.Array):
    return sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
