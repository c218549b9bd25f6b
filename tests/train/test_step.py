# SPDX-License-Identifier: Apache-2.0
"""A step is the same however its batch is divided, and does no harm."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.config import AnomalyConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from geojax.data import Batch
from geojax.meshes.gradient import LossSums
from geojax.meshes.strategy import Strategy
from geojax.models.config import TransformerConfig
from geojax.models.transformer import init_params, make_apply
from geojax.train.program import Program, Task
from geojax.train.step import init_state, make_loop, make_train_step

MODEL = TransformerConfig(vocab_size=13, dim=8, layers=2, heads=2, kv_heads=1, mlp_dim=12)
LENGTH = 6
STEPS = 12
CONSTANT = ScheduleConfig(decay="constant", warmup_fraction=0.0, final_fraction=1.0)
# Plain SGD: an update is the gradient times the rate, so that what is compared is not hidden.
SGD = TrainConfig(
    total_tokens=1,
    optimizer=OptimizerConfig(name="sgd", learning_rate=1.0),
    schedule=CONSTANT,
    clip_norm=None,
    compute_dtype="float32",
)
ADAMW = replace(
    SGD,
    optimizer=OptimizerConfig(name="adamw", learning_rate=0.01, weight_decay=0.1),
    schedule=ScheduleConfig(),
    clip_norm=1.0,
)


@cache
def program(config, micro_batches=1, sequences=8, devices=1):
    """Steps of `sequences`, divided over micro-batches and copies."""
    micro = sequences // (micro_batches * devices)
    strategy = Strategy(devices, 1, 1, micro, sequences)
    return Program(Task(MODEL, config, LENGTH), strategy, jax.devices()[:devices])


@cache
def fresh_params():
    return jax.device_get(init_params(MODEL, 0))


def fresh(config):
    """A first state of its own, which a loop may take over."""
    return init_state(jax.tree.map(jnp.array, fresh_params()), config)


def run_step(config, batch, progress=0.0, state=None, **divided):
    """State and stats on the host after a step over sequences [B, T]."""
    steps = program(config, sequences=len(batch.tokens), **divided)
    chunk = steps.put_chunk(Batch(*(x[None] for x in batch)))
    state = steps.put_state(state or fresh(config))
    after, stats = steps.run(state, chunk, 1, progress, 0.0, 0)
    return steps.host(after), jax.device_get(stats)


def model_loss(params, batch):
    """Sum of the losses of sequences [b, T] by the definition, and the tokens that bear one."""
    logits = make_apply(MODEL)(params, batch.tokens, batch.positions, batch.segments)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return jnp.sum(nats * batch.weights), jnp.sum(batch.weights)


def gradient_of(loss):
    """What a step takes, of a loss that is written down."""

    def gradient(params, batch, step):
        (nats, tokens), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return LossSums(nats, tokens), grads

    return gradient


def compiled_loop(loss, config):
    return jax.jit(make_loop(make_train_step(gradient_of(loss), config)), donate_argnums=0)


def sequences(*lead, seed=0):
    """Random sequences [*lead, T] with 0 to 5 loss-bearing tokens each."""
    rng = np.random.default_rng(seed)
    shape = (*lead, LENGTH)
    tokens, targets = rng.integers(0, MODEL.vocab_size, (2, *shape), np.int32)
    bearing = rng.integers(0, LENGTH, (*lead, 1))
    weights = (np.arange(LENGTH) < bearing).astype(np.float32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape).copy()
    samples = np.arange(np.prod(lead), dtype=np.uint32).reshape(lead)
    return Batch(tokens, targets, weights, np.zeros_like(tokens), positions, samples)


def divided(batch, micro_batches):
    return Batch(*(x.reshape(micro_batches, -1, *x.shape[1:]) for x in batch))


def assert_close(a, b, tolerance):
    chex.assert_trees_all_close(a, b, **tolerance)


def assert_same(a, b):
    chex.assert_trees_all_equal(a, b)


# float32 sums in another order: a few roundings of 6e-8 on gradients of size 0.01 to 1.
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize(
    ("config", "micro_batches"), [(SGD, 4), (SGD, 8), (ADAMW, 2)], ids=["sgd-4", "sgd-8", "adamw-2"]
)
def test_micro_batches_with_unequal_tokens_equal_the_whole_batch(config, micro_batches):
    batch = sequences(8)
    counts = divided(batch, micro_batches).weights.sum((1, 2))
    assert len(set(counts.tolist())) > 1  # else a mean of means would be the mean
    whole, parts = (run_step(config, batch, 0.1, micro_batches=m) for m in (1, micro_batches))
    assert_close(parts[1], whole[1], ROUNDING)
    # Adam divides by the size of a gradient, so a gradient near 0 turns roundings into updates.
    assert_close(parts[0], whole[0], ROUNDING if config is SGD else {"rtol": 1e-4, "atol": 1e-4})


def test_update_is_the_gradient_of_the_mean_loss_over_all_loss_bearing_tokens():
    batch, before = sequences(8), fresh_params()
    after, stats = run_step(SGD, batch, micro_batches=4)

    def mean_loss(params):
        nats, tokens = model_loss(params, batch)
        return nats / tokens

    loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(before)
    expected = jax.tree.map(lambda p, g: p - g, before, gradient)
    assert_close(after.params, expected, ROUNDING)
    assert stats.tokens == batch.weights.sum()
    assert stats.loss / stats.tokens == pytest.approx(float(loss), rel=1e-5)
    assert stats.grad_norm == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)
    assert (after.step, stats.steps, stats.skipped) == (1, 1, 0)
    assert after.mean_loss == pytest.approx(float(loss), rel=1e-5)


def test_loss_equals_cross_entropy_in_float64():
    batch = sequences(8)
    logits = make_apply(MODEL)(fresh_params(), batch.tokens, batch.positions, batch.segments)
    exponentials = np.exp(np.asarray(logits, np.float64))
    chosen = np.take_along_axis(exponentials, batch.targets[..., None], -1)[..., 0]
    nats = -np.log(chosen / exponentials.sum(-1))
    _, stats = run_step(SGD, batch, micro_batches=4)
    assert stats.loss == pytest.approx((nats * batch.weights).sum(), rel=1e-5)
    assert stats.tokens == batch.weights.sum()


def test_targets_without_weight_do_not_matter():
    batch = sequences(8)
    other = batch._replace(targets=np.where(batch.weights > 0, batch.targets, 0))
    assert (other.targets != batch.targets).any()
    assert_same(*(run_step(SGD, x, micro_batches=4) for x in (batch, other)))


def test_four_devices_equal_one():
    batch = sequences(8)
    one, four = (run_step(ADAMW, batch, 0.1, micro_batches=2, devices=n) for n in (1, 4))
    assert_close(four[1], one[1], ROUNDING)
    assert_close(four[0], one[0], {"rtol": 1e-4, "atol": 1e-4})


def run_loop(state, chunk, count, begin, stride, done):
    """The compiled loop of ADAMW, over a chunk [STEPS, 2, T]."""
    steps = program(ADAMW, sequences=2)
    state, stats = steps.run(
        steps.put_state(state), steps.put_chunk(chunk), count, begin, stride, done
    )
    return steps.host(state), jax.device_get(stats)


def filled(chunk, start, stop):
    """Steps start..stop of `chunk`, filled up to STEPS with steps that must not be taken."""
    padding = STEPS - (stop - start)
    return Batch(*(np.concatenate([x[start:stop], x[:1].repeat(padding, 0)]) for x in chunk))


def test_one_compilation_serves_every_count_and_progress():
    loop = compiled_loop(value_loss, SGD)
    for count, progress in ((4, 0.0), (1, 0.5), (3, 0.25), (0, 0.0)):
        state = init_state({"w": jnp.ones(())}, SGD)
        state, stats = loop(state, numbers([1.0] * 4), count, progress, 0.01, 0)
        assert (state.step, stats.steps) == (count, count)
    assert loop._cache_size() == 1


def test_steps_beyond_the_count_have_no_effect():
    chunk = sequences(STEPS, 2)
    poisoned = Batch(*(x.copy() for x in chunk))
    poisoned.weights[2:] = np.nan
    poisoned.tokens[2:] = 0
    assert_same(*(run_loop(fresh(ADAMW), c, 2, 0.0, 0.01, 0) for c in (poisoned, chunk)))


def test_a_loop_is_its_steps_one_after_the_other():
    chunk, stride = sequences(STEPS, 2), 0.05
    state, total = run_loop(fresh(ADAMW), chunk, 3, 0.1, stride, 0)
    expected, stats = fresh(ADAMW), []
    for i in range(3):
        batch = Batch(*(x[i] for x in chunk))
        expected, one = run_step(ADAMW, batch, 0.1 + stride * i, expected)
        stats.append(one)
    # Two programs, which XLA may fuse differently.
    assert_close(state, expected, {"rtol": 1e-5, "atol": 1e-5})
    assert_close(total, jax.tree.map(lambda *x: sum(x), *stats), ROUNDING)


@settings(deadline=None, max_examples=15)
@given(cuts=st.sets(st.integers(1, STEPS - 1), max_size=5))
def test_a_run_is_the_same_however_it_is_cut_into_chunks(cuts):
    begin, stride = 0.1, 1 / 70  # not exact in float32, nor are their sums
    chunk = sequences(STEPS, 2)
    whole, _ = run_loop(fresh(ADAMW), chunk, STEPS, begin, stride, 0)
    state, borders = fresh(ADAMW), [0, *sorted(cuts), STEPS]
    for start, stop in pairwise(borders):
        part = filled(chunk, start, stop)
        state, _ = run_loop(state, part, stop - start, begin, stride, start)
    assert_same(state, whole)


def broken(kind):
    """A state and a batch whose loss or gradient is not finite."""
    state, batch = fresh(ADAMW), Batch(*(x.copy() for x in sequences(8)))
    if kind == "infinite weight":
        batch.weights[4, 0] = np.inf  # in the second micro-batch
    elif kind == "NaN weight":
        batch.weights[0, 0] = np.nan
    elif kind == "NaN parameter":
        params = state.params | {"norm": {"scale": jnp.full(MODEL.dim, jnp.nan, jnp.float32)}}
        state = replace(state, params=params)
    elif kind == "overflow":
        head = jnp.full((MODEL.padded_vocab, MODEL.dim), 3e38, jnp.float32)
        state = replace(state, params=state.params | {"head": head})
    return state, batch


@pytest.mark.parametrize("kind", ["infinite weight", "NaN weight", "NaN parameter", "overflow"])
def test_a_step_that_is_not_finite_leaves_the_state_as_it_was(kind):
    state, batch = broken(kind)
    after, stats = run_step(ADAMW, batch, 0.5, state, micro_batches=2)
    assert_same(after, jax.device_get(state))
    assert stats.skipped == 1
    assert not any(getattr(stats, name) for name in ("loss", "tokens", "grad_norm", "steps"))


def test_a_gradient_that_is_not_finite_is_skipped_although_the_loss_is():
    # The root of 0 has an infinite slope.
    def loss(params, batch):
        return jnp.sum(jnp.sqrt(jnp.abs(params["w"])) * batch.weights), jnp.sum(batch.weights)

    state = init_state({"w": jnp.zeros(())}, SGD)
    batch = sequences(1, 2)
    assert np.isfinite(loss(state.params, batch)[0])
    after, stats = make_train_step(gradient_of(loss), SGD)(state, batch, 0.0)
    assert_same(after, state)
    assert stats.skipped == 1


def test_a_broken_step_in_the_middle_costs_only_itself():
    chunk = sequences(STEPS, 2)
    damaged = Batch(*(x.copy() for x in chunk))
    damaged.weights[1] = np.nan
    state, stats = run_loop(fresh(ADAMW), damaged, 3, 0.5, 0.0, 0)
    healthy = Batch(*(np.delete(x, 1, 0)[[*range(STEPS - 1), 0]] for x in chunk))
    expected, total = run_loop(fresh(ADAMW), healthy, 2, 0.5, 0.0, 0)
    assert_same(state, expected)
    assert_same(stats, total._replace(skipped=np.int32(1)))


def numbers(values):
    """A chunk of steps whose loss is the given value: its one parameter times a token's weight."""
    weights = np.asarray(values, np.float32).reshape(-1, 1, 1, 1)
    zeros = np.zeros(weights.shape, np.int32)
    return Batch(zeros, zeros, weights, zeros, zeros, zeros[..., 0].astype(np.uint32))


def value_loss(params, batch):
    return params["w"] * jnp.sum(batch.weights), jnp.float32(1)


def run_values(values, spike_factor):
    config = replace(
        SGD,
        optimizer=OptimizerConfig("sgd", learning_rate=1e-9),
        anomalies=AnomalyConfig(spike_factor=spike_factor),
    )
    loop = compiled_loop(value_loss, config)
    state = init_state({"w": jnp.ones(())}, config)
    return loop(state, numbers(values), len(values), 0.0, 0.0, 0)


def test_spikes_are_skipped_only_after_the_mean_is_warm():
    early = [1.0] * 5 + [100.0] + [1.0] * 5
    assert run_values(early, 2.0)[1].skipped == 0
    late = [1.0] * 30 + [100.0, 1.9, 1.0]
    state, stats = run_values(late, 2.0)
    assert (stats.skipped, stats.steps, state.step) == (1, 32, 32)
    assert stats.loss == pytest.approx(30 + 1.9 + 1.0)
    assert run_values(late, None)[1].skipped == 0


def test_the_running_mean_forgets_by_a_twentieth_a_step():
    state, _ = run_values([4.0, 2.0, 6.0], None)
    assert state.mean_loss == pytest.approx(0.95 * (0.95 * 4 + 0.05 * 2) + 0.05 * 6)


@pytest.mark.parametrize("limit", [None, 0.5, 5.0, 20.0])
def test_clipping_scales_the_whole_gradient(limit):
    slopes = {"a": jnp.array([3.0, 0.0, -4.0]), "b": {"c": jnp.array([[12.0]])}}  # norm 13

    def loss(params, batch):
        return optax.tree.vdot(params, slopes), jnp.float32(1)

    config = replace(SGD, clip_norm=limit)
    state = init_state(optax.tree.zeros_like(slopes), config)
    after, stats = make_train_step(gradient_of(loss), config)(state, sequences(1, 1), 0.0)
    assert stats.grad_norm == 13
    factor = min(1, limit / 13) if limit else 1
    assert_close(after.params, optax.tree.scale(-factor, slopes), {"rtol": 1e-6})


def test_slices_with_unlike_numbers_of_steps_follow_one_schedule():
    # Both go from progress 0 to 1/2, in 4 and in 16 steps; the loss has slope 1, so that an update
    # is the rate. The rate at one progress is one; the last steps differ by a stride.
    config = replace(SGD, schedule=ScheduleConfig("linear", 0.25, 0.0))
    loop = compiled_loop(value_loss, config)

    def rates(steps):
        out = []
        for i in range(steps):
            state = init_state({"w": jnp.zeros(())}, config)
            stride = 0.5 / steps
            state, _ = loop(state, numbers([1.0] * 16), 1, 0.0, stride, i)
            out.append(-float(state.params["w"]))
        return np.array(out)

    few, many = rates(4), rates(16)
    np.testing.assert_allclose(many[::4], few, rtol=1e-6)
    np.testing.assert_allclose(few, [0.0, 0.5, 1.0, 5 / 6], rtol=1e-6)


def test_the_rate_moves_by_the_stride_inside_a_loop():
    config = replace(SGD, schedule=ScheduleConfig("linear", 0.25, 0.0))
    loop = compiled_loop(value_loss, config)
    state = init_state({"w": jnp.zeros(())}, config)
    state, _ = loop(state, numbers([1.0] * 4), 4, 0.0, 0.125, 0)
    assert -float(state.params["w"]) == pytest.approx(0.0 + 0.5 + 1.0 + 5 / 6)


def test_a_repeated_batch_is_learned():
    batch = sequences(1, 2)
    batch.weights[:] = 1
    chunk = Batch(*(x.repeat(STEPS, 0) for x in batch))
    state, losses = fresh(ADAMW), []
    for _ in range(10):
        state, stats = run_loop(state, chunk, STEPS, 0.05, 0.0, 0)  # at the peak rate
        losses.append(float(stats.loss))
    # Two sequences of 6 targets, which differ in their first tokens, can be learned by heart.
    assert losses[-1] < 0.1 * losses[0]
    assert losses == sorted(losses, reverse=True)
