# SPDX-License-Identifier: Apache-2.0
"""Loss and perplexity on held-out sequences, always the same ones."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.config import require
from geojax.data import Batch
from geojax.meshes.axes import DATA
from geojax.models.transformer import Params
from geojax.train.step import LossSum


class Evaluation(NamedTuple):
    """Mean over loss-bearing tokens."""

    loss: float
    """In nats a token."""
    perplexity: float
    tokens: int


def make_evaluate(loss: LossSum, mesh: Mesh) -> Callable[[Params, Iterable[Batch]], Evaluation]:
    """`evaluate(params, batches)`: params a pytree of host arrays, batches [b, t] on the mesh.

    b must divide by the devices of the mesh.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(DATA))
    step = jax.jit(loss)

    def evaluate(params: Params, batches: Iterable[Batch]) -> Evaluation:
        params = jax.device_put(params, whole)
        sums = [step(params, jax.device_put(batch, rows)) for batch in batches]
        nats = sum(float(loss_sum) for loss_sum, _ in sums)
        tokens = sum(float(count) for _, count in sums)
        require(tokens, "no held-out token bears a loss; raise data.valid_fraction")
        mean = nats / tokens
        return Evaluation(mean, math.exp(mean) if mean < 700 else math.inf, int(tokens))

    return evaluate
