# SPDX-License-Identifier: Apache-2.0
"""The outer step: its sign, its formula, its copies that stay equal, and the check that they do."""

import jax
import numpy as np
import pytest

from geojax.config import ExchangeConfig, OptimizerConfig, OuterConfig, ScheduleConfig
from geojax.geomesh.exchange import MeshExchange
from geojax.geomesh.layout import make_layout
from geojax.geomesh.message import Header
from geojax.geomesh.outer import (
    DesyncError,
    OuterCopy,
    OuterStep,
    check_digests,
    digest,
    merge_weights,
)
from geojax.geomesh.sync import Contribution, Synchronizer

NESTEROV = OptimizerConfig(name="sgd", learning_rate=0.7, momentum=0.9, nesterov=True)
NAMES = ("eastus", "westus2", "koreacentral", "westeurope")


def tree(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "blocks": {"up": rng.normal(size=(2, 7, 11)).astype(np.float32)},
        "embed": rng.normal(size=(13, 9)).astype(np.float32),
        "norm": {"scale": rng.normal(size=9).astype(np.float32)},
    }


def outer_step(**optimizer) -> OuterStep:
    return OuterStep(OuterConfig(OptimizerConfig(name="sgd", **optimizer)))


def difference(shared, local) -> list[np.ndarray]:
    return [a - b for a, b in zip(jax.tree.leaves(shared), jax.tree.leaves(local), strict=True)]


def assert_close(got, wanted, **tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


def test_a_whole_step_along_one_slices_pseudo_gradient_ends_at_its_parameters():
    shared, local = tree(0), tree(1)
    step = outer_step(learning_rate=1.0)
    copy = step.init(shared)
    step.apply(copy, difference(shared, local), 0.0)
    # shared - (shared - local): two roundings at numbers of size 4.
    assert_close(copy.params, local, rtol=0, atol=4 * 2.0**-23)


@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_each_step_moves_from_shared_towards_local(rate):
    shared, local = tree(0), tree(1)
    step = outer_step(learning_rate=rate)
    copy = step.init(shared)
    step.apply(copy, difference(shared, local), 0.0)
    wanted = jax.tree.map(lambda a, b: (1 - rate) * a + rate * b, shared, local)
    assert_close(copy.params, wanted, rtol=0, atol=4 * 2.0**-22)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_follows_its_formula(nesterov):
    rate, decay = 0.7, 0.9
    step = outer_step(learning_rate=rate, momentum=decay, nesterov=nesterov)
    copy = step.init(tree(0))
    params = [x.astype(np.float64) for x in jax.tree.leaves(tree(0))]
    momentum = [np.zeros_like(x) for x in params]
    for round_ in range(1, 11):
        gradient = jax.tree.leaves(tree(round_))
        step.apply(copy, gradient, 0.0)
        momentum = [decay * m + g for m, g in zip(momentum, gradient, strict=True)]
        along = [g + decay * m for g, m in zip(gradient, momentum, strict=True)]
        params = [
            p - rate * x for p, x in zip(params, along if nesterov else momentum, strict=True)
        ]
    # Some 40 float32 roundings of numbers up to 40.
    assert_close(copy.params, params, rtol=0, atol=40 * 40 * 2.0**-24)


def test_the_rate_follows_the_schedule():
    schedule = ScheduleConfig(decay="linear", warmup_fraction=0.0, final_fraction=0.0)
    step = OuterStep(OuterConfig(OptimizerConfig(name="sgd", learning_rate=1.0), schedule))
    shared, local = tree(0), tree(1)
    for progress in (0.0, 0.5, 1.0):
        copy = step.init(shared)
        step.apply(copy, difference(shared, local), progress)
        wanted = jax.tree.map(lambda a, b, p=progress: p * a + (1 - p) * b, shared, local)
        assert_close(copy.params, wanted, rtol=0, atol=4 * 2.0**-22)


def test_a_copy_owns_its_memory():
    params = tree(0)
    step = outer_step(learning_rate=1.0, momentum=0.9)
    first, second = step.init(params), step.init(params)
    before = digest(second)
    step.apply(first, jax.tree.leaves(tree(1)), 0.0)
    for leaf in jax.tree.leaves(first.params):
        leaf *= 2
    assert digest(second) == before
    assert_close(params, tree(0), rtol=0)


def test_one_flipped_bit_anywhere_changes_the_digest():
    step = outer_step(learning_rate=1.0, momentum=0.9)
    copy = step.init(tree(0))
    step.apply(copy, jax.tree.leaves(tree(1)), 0.0)
    leaves, structure = jax.tree.flatten((copy.params, copy.opt_state))
    assert len(leaves) == 6  # parameters and momentum
    seen = {digest(copy)}
    for i, leaf in enumerate(leaves):
        flipped = np.array(leaf)
        flipped.reshape(-1).view(np.uint32)[-1] ^= 1  # the last element's lowest bit
        params, opt_state = jax.tree.unflatten(structure, [*leaves[:i], flipped, *leaves[i + 1 :]])
        seen.add(digest(OuterCopy(params, opt_state)))
    assert len(seen) == 7
    assert digest(OuterCopy(copy.params, copy.opt_state)) in seen


def test_equal_digests_pass():
    for count in (1, 2, 4):
        check_digests([b"a"] * count, NAMES[:count], 3)


@pytest.mark.parametrize("odd", range(3))
def test_the_odd_slice_of_three_is_named(odd):
    digests = [b"b" if i == odd else b"a" for i in range(3)]
    with pytest.raises(DesyncError, match=f"round 3: .* of {NAMES[odd]} differ from .* other 2"):
        check_digests(digests, NAMES[:3], 3)


def test_two_odd_slices_of_five_are_named():
    names = [*NAMES, "japaneast"]
    with pytest.raises(DesyncError, match="of westus2, japaneast differ from those of the other 3"):
        check_digests([b"a", b"b", b"a", b"a", b"c"], names, 3)


@pytest.mark.parametrize("digests", [[b"a", b"b"], [b"a", b"a", b"b", b"b"], [b"a", b"b", b"c"]])
def test_without_a_majority_nobody_is_blamed(digests):
    names = NAMES[: len(digests)]
    with pytest.raises(DesyncError, match=f"of {', '.join(names)} differ, and no majority"):
        check_digests(digests, names, 3)


@pytest.mark.parametrize("schedule", ["gather", "two_phase"])
@pytest.mark.parametrize("optimizer", [NESTEROV, OptimizerConfig(name="adamw", weight_decay=0.1)])
def test_copies_stay_equal_bit_for_bit(schedule, optimizer):
    # Each copy is moved by what its own slice decoded, round after round.
    slices = 3
    step = OuterStep(OuterConfig(optimizer))
    copies = [step.init(tree(0)) for _ in range(slices)]
    layout = make_layout(tree(0), ExchangeConfig(codec="sign"))
    engine = MeshExchange(jax.devices()[:slices])
    synchronizer = Synchronizer(layout, engine, NAMES[:slices], schedule, "tokens")
    leaves = jax.tree.leaves(tree(0))
    feedback = [synchronizer.init_feedback(i, leaves) for i in range(slices)]
    digests = set()
    for round_ in range(50):
        contributions = [
            Contribution(i, jax.tree.leaves(tree(slices * round_ + i)), 10 + i, 5, feedback[i])
            for i in range(slices)
        ]
        merged = synchronizer.exchange(round_, contributions).pseudo_gradients
        for copy, gradient in zip(copies, merged, strict=True):
            step.apply(copy, gradient, round_ / 50)
        assert len({digest(copy) for copy in copies}) == 1
        digests.add(digest(copies[0]))
    assert len(digests) == 50  # and they did move


@pytest.mark.parametrize("merge", ["tokens", "fednova"])
def test_weights_are_shares(merge):
    headers = [Header(1, i, t, 8) for i, t in enumerate((100, 0, 250, 50))]
    weights = merge_weights(headers, merge)
    assert sum(weights) == pytest.approx(1)
    assert weights[1] == 0
    assert merge_weights([h._replace(tokens=0) for h in headers], merge) is None
