# SPDX-License-Identifier: Apache-2.0
"""Which mesh axes each dim of each parameter is spread over, for every strategy.

Invariant: shapes never depend on the strategy; a rule names dims by what they are (layers, heads or
MLP width, vocabulary), and an axis of one device is never named.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from geojax.meshes.axes import DATA, PIPELINE, TENSOR
from geojax.meshes.strategy import Strategy
from geojax.models.config import TransformerConfig
from geojax.models.params import roles
from geojax.models.transformer import Params, abstract_params

_COLUMNS = ("query", "key", "value", "gate", "up")  # their outputs are shared out
_ROWS = ("out", "down")  # their inputs are
_VOCAB = ("embed", "head", "head_bias")


@dataclass(frozen=True)
class Rule:
    """How one parameter is spread."""

    model: PartitionSpec
    """By tensor and pipeline parallelism."""
    copies: PartitionSpec
    """Also over data-parallel copies, as ZeRO spreads optimizer state and FSDP all of it; the same
    where no dim divides."""
    copies_dim: int | None
    """The dim that `copies` adds to."""


def make_rules(model: TransformerConfig, strategy: Strategy) -> Params:
    """A pytree like the parameters with a `Rule` at every leaf."""
    shapes = abstract_params(model)
    vocab = vocab_axes(model, strategy)
    vocab_parts = math.prod({PIPELINE: strategy.pp, TENSOR: strategy.tp}[a] for a in vocab)

    def rule(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, role: Any) -> Rule:
        names = [entry.key for entry in path]
        axes: list[Any] = [None] * leaf.ndim
        if names[0] == "blocks" and strategy.pp > 1:
            axes[0] = PIPELINE
        if strategy.tp > 1:
            if names[-1].removesuffix("_bias") in _COLUMNS:
                axes[-1] = TENSOR
            elif names[-1] in _ROWS:
                axes[-2] = TENSOR
        if names[0] in _VOCAB and vocab:
            axes[0] = vocab if len(vocab) > 1 else vocab[0]
        if names[0] in _VOCAB and role.kind == "table":
            # Beside the other axes: then strategies differ in the order of devices only.
            dim = 0 if model.padded_vocab % (vocab_parts * strategy.dp) == 0 else None
        else:
            dim = None if role.kind == "vector" else _copies_dim(leaf.shape, axes, strategy)
        if strategy.dp == 1:
            dim = None
        spread = [_and_copies(axis) if i == dim else axis for i, axis in enumerate(axes)]
        return Rule(_spec(axes), _spec(spread), dim)

    return jax.tree_util.tree_map_with_path(rule, shapes, roles(shapes))


def vocab_axes(model: TransformerConfig, strategy: Strategy) -> tuple[str, ...]:
    """Axes over which rows of the vocabulary are spread: the stages share embedding and head too,
    so that none of them waits for the one that has it, where the rows divide."""
    sizes = {PIPELINE: strategy.pp, TENSOR: strategy.tp}
    if model.padded_vocab % (strategy.pp * strategy.tp):
        del sizes[PIPELINE]
    return tuple(axis for axis, size in sizes.items() if size > 1)


def state_specs(rules: Params, strategy: Strategy) -> tuple[Params, Params]:
    """Specs of the parameters, and of optimizer state and final gradients."""
    model = jax.tree.map(lambda r: r.model, rules)
    copies = jax.tree.map(lambda r: r.copies, rules)
    return (
        copies if strategy.sharding == "all" else model,
        model if strategy.sharding == "none" else copies,
    )


def _copies_dim(shape: tuple[int, ...], axes: list[Any], strategy: Strategy) -> int | None:
    """The largest dim that is still whole and divides; norms and biases are too small to bother."""
    fits = [i for i, n in enumerate(shape) if axes[i] is None and n % strategy.dp == 0]
    if len(shape) > 2:  # the layers of a stack stay together, one is gathered at a time
        fits = [i for i in fits if i > 0]
    return max(fits, key=lambda i: shape[i], default=None)


def _and_copies(axis: Any) -> Any:
    if axis is None:
        return DATA
    return (*axis, DATA) if isinstance(axis, tuple) else (axis, DATA)


def _spec(axes: list[Any]) -> PartitionSpec:
    while axes and axes[-1] is None:
        axes = axes[:-1]
    return PartitionSpec(*axes)
