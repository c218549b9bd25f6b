# SPDX-License-Identifier: Apache-2.0
"""A state that moves keeps its values, and only one of its leaves exists twice at a time."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from strategies import assert_one_leaf_at_a_time, reorder

from geojax.meshes.axes import strategy_mesh
from geojax.meshes.pipeline import storage_order
from geojax.meshes.reshard import in_stack, reshard
from geojax.meshes.strategy import parse_strategy

LAYERS = 8
# Where leaves of a state may lie, by name, for layouts that name the axes of 8 devices.
SPECS = {
    "blocks": {"w": PartitionSpec("pp", None, "tp"), "b": PartitionSpec("pp")},
    "embed": PartitionSpec(("pp", "tp"), "dp"),
    "count": PartitionSpec(),
}
SHAPES = {"blocks": {"w": (LAYERS, 16, 8), "b": (LAYERS, 8)}, "embed": (64, 16), "count": ()}
ONE_STAGE, FOLDED = "dp8-tp1-pp1-mb1-gb8", "dp2-tp2-pp2x2-mb1-gb8"
MOVES = [
    (ONE_STAGE, FOLDED),
    (FOLDED, ONE_STAGE),
    (FOLDED, "dp2-tp1-pp4x2-mb1-gb8"),
    (FOLDED, FOLDED),
    (ONE_STAGE, "dp1-tp4-pp2-mb1-gb8"),
]


def host_state():
    rng = np.random.default_rng(0)
    draw = lambda _, shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    return jax.tree.map(draw, SPECS, SHAPES)


def layout(text):
    """Shardings and storage order of a strategy's state."""
    strategy = parse_strategy(text)
    mesh = strategy_mesh(strategy, jax.devices())
    return (
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS),
        storage_order(LAYERS, strategy),
    )


@pytest.mark.parametrize(("old", "new"), MOVES)
def test_values_stay_and_places_are_the_new_ones(old, new):
    state = host_state()
    (before, old_order), (after, new_order) = layout(old), layout(new)
    taken = [jax.device_put(reorder(state, old_order), before)]
    moved = reshard(taken, after, old_order, new_order)
    assert taken == []
    jax.tree.map(np.testing.assert_array_equal, moved, reorder(state, new_order))
    assert jax.tree.map(lambda x: x.sharding, moved) == after


@pytest.mark.parametrize(("old", "new"), MOVES)
def test_at_most_one_leaf_exists_twice(old, new, monkeypatch):
    (before, old_order), (after, new_order) = layout(old), layout(new)
    taken = [jax.device_put(reorder(host_state(), old_order), before)]
    move = partial(reshard, shardings=after, before=old_order, after=new_order)
    assert_one_leaf_at_a_time(monkeypatch, move, taken, after)


def test_a_caller_that_keeps_the_state_keeps_its_values():
    (before, _), (after, order) = layout(ONE_STAGE), layout(FOLDED)
    kept = jax.device_put(host_state(), before)
    reshard([kept], after, None, order)
    jax.tree.map(np.testing.assert_array_equal, kept, host_state())


def test_stacks_are_the_leaves_below_blocks():
    state = {"params": {"blocks": {"w": 1}, "norm": 2}, "mu": {"blocks": {"w": 3}}, "blocked": 4}
    paths = jax.tree_util.tree_flatten_with_path(state)[0]
    assert {leaf for path, leaf in paths if in_stack(path)} == {1, 3}
