# SPDX-License-Identifier: Apache-2.0
"""Noise is measured alike under every strategy, and measuring it changes no step."""

from dataclasses import replace
from functools import cache, cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import (
    LENGTH,
    MODELS,
    QUICK,
    jitted,
    learnt,
    norms,
    placed,
    random_batch,
    random_params,
    reorder,
)

from geojax.cona.noise import NoiseTracker
from geojax.config import OptimizerConfig, ScheduleConfig, TrainConfig
from geojax.data import Batch, empty_batch
from geojax.meshes.axes import strategy_mesh
from geojax.meshes.gradient import ShardedModel
from geojax.meshes.pipeline import storage_order
from geojax.meshes.squares import Squares, block_norms, block_squares, gradient_parts
from geojax.meshes.strategy import Strategy, enumerate_strategies, parse_strategy
from geojax.models.config import TransformerConfig
from geojax.models.params import block_dims, roles
from geojax.train.noise import make_measure
from geojax.train.optim import make_optimizer
from geojax.train.program import Program, Task
from geojax.train.step import init_state

TOLERANCE = 1e-9


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# --- squares of parts and of sequences ---

ROWS = 32
LENGTHS = {"gpt": LENGTH, "llama": LENGTH, "bert": 15, "dream": LENGTH}
"""15 tokens do not divide by tp: each device then has the whole residual stream."""


@cache
def sequence_gradients(name):
    """The sequences [1, B, t] of a batch, and the gradient of each alone: leaves [B, ...].

    Of the first quarter's second half, and of the last but its end, no token bears loss.
    """
    model, length = MODELS[name], LENGTHS[name]
    batch = random_batch(model, 8, ROWS // 8, length)
    batch = jax.tree.map(lambda x: x.reshape(1, ROWS, *x.shape[2:]), batch)
    on, gradient, _ = jitted(model, Strategy(1, 1, 1, 1, 1), length)
    found = []
    for i in range(ROWS):
        one = jax.tree.map(lambda x, i=i: x[:, i : i + 1], batch)
        _, grads = gradient(*placed(on, random_params(model), one), jax.random.key(0))
        found.append(jax.tree.map(np.asarray, grads))
    return batch, jax.tree.map(lambda *leaves: np.stack(leaves), *found)


def part_of(strategy):
    """Number of the part that each sequence of a batch belongs to."""
    micro, row = np.divmod(np.arange(strategy.global_batch), strategy.dp * strategy.micro_batch)
    copy = row // strategy.micro_batch
    if strategy.pp > 1:  # all micro-batches are differentiated at once
        micro = 0 * micro
    if strategy.sharding == "all":  # copies are summed layer by layer
        copy = 0 * copy
    return np.unique(micro * strategy.dp + copy, return_inverse=True)[1]


def summed_squares(gradients, part):
    """By block, of the gradients [B, ...] summed over the sequences of a part, over the parts."""

    def squares(path, x):
        parts = np.stack([x[part == i].sum(0) for i in range(part.max() + 1)])
        return np.square(parts).sum((0, *range(1 + block_dims(path), x.ndim)))

    return jax.tree_util.tree_map_with_path(squares, gradients)


def measured(name, strategy, batch):
    """Sums, gradient and squares on the host, layers in the model's order."""
    model = MODELS[name]
    mesh = strategy_mesh(strategy, jax.devices()[: strategy.devices])
    on = ShardedModel(model, strategy, mesh, "float64", True, LENGTHS[name])
    split = jax.tree.map(lambda x: x.reshape(strategy.micro_batches, -1, *x.shape[2:]), batch)
    run = jax.jit(on.measured, compiler_options=QUICK)
    found = run(*placed(on, random_params(model), split), jax.random.key(0))
    sums, grads, squares = jax.tree.map(np.asarray, found)
    order = storage_order(model.layers, strategy)
    back = None if order is None else np.argsort(order)
    grads, parts = (reorder(tree, back) for tree in (grads, squares.parts))
    layers = reorder({"blocks": squares.norms}, back)["blocks"]
    return sums, grads, squares._replace(parts=parts, norms=layers)


def assert_close(found, expected):
    worst = norms(found, expected)
    assert max(worst.values()) < TOLERANCE, worst


FEW = [
    ("gpt", "dp2-tp2-pp1-mb2-gb32"),
    ("llama", "dp2-tp2-pp2x2-mb4-gb32-fsdp"),
    ("bert", "dp2-tp4-pp1-mb2-gb32-zero-matmuls"),
]
MORE = [
    ("gpt", "dp1-tp2-pp4x2-mb4-gb32"),
    ("gpt", "dp2-tp1-pp1-mb4-gb32-fsdp-full"),
    ("llama", "dp8-tp1-pp1-mb2-gb32"),
    ("bert", "dp1-tp2-pp2-mb8-gb32"),
    ("dream", "dp2-tp2-pp1-mb2-gb32"),
]


def full():
    """Every layout of 8 devices, with every schedule and sharding that it can have."""
    shardings = ("none", "optimizer", "all")
    for name in LENGTHS:
        found = enumerate_strategies(MODELS[name], 8, [ROWS], [2], [1, 2], shardings=shardings)
        yield from ((name, str(s)) for s in found.legal)


ALL = [
    *(pytest.param(*case, id="-".join(case)) for case in FEW),
    *(
        pytest.param(*case, id="-".join(case), marks=pytest.mark.full)
        for case in (*MORE, *full())
        if case not in FEW
    ),
]


@pytest.mark.parametrize(("name", "text"), ALL)
def test_squares_are_those_of_gradients_computed_one_by_one(name, text, x64):
    strategy = parse_strategy(text)
    batch, gradients = sequence_gradients(name)
    tokens, part = batch.weights[0].sum(-1), part_of(strategy)
    counts = np.bincount(part, tokens)
    expected = Squares(
        summed_squares(gradients, part),
        np.square(counts).sum(),
        block_norms(summed_squares(gradients, np.arange(ROWS))["blocks"]),
        np.square(tokens).sum(),
    )
    sums, grads, squares = measured(name, strategy, batch)
    assert gradient_parts(strategy) == len(counts)
    assert sums.tokens == counts.sum()
    assert_close(grads, jax.tree.map(lambda x: x.sum(0), gradients))
    assert min(learnt(norms(expected))) > 1e-3  # a wrong factor shows in each leaf
    assert_close(squares, expected)


def test_cases_hold_parts_without_tokens_and_parts_of_one(x64):
    tokens = sequence_gradients("gpt")[0].weights[0].sum(-1)
    counts = np.bincount(part_of(parse_strategy("dp2-tp2-pp1-mb2-gb32")), tokens)
    assert 0 in counts
    assert 1 in counts
    assert len(set(counts)) > 4


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dp1-tp8-pp1-mb4-gb32", 8),
        ("dp2-tp4-pp1-mb4-gb32", 8),
        ("dp2-tp4-pp1-mb4-gb32-zero", 8),
        ("dp2-tp4-pp1-mb4-gb32-fsdp", 4),
        ("dp2-tp2-pp2-mb1-gb32", 2),
        ("dp2-tp2-pp2x2-mb1-gb32-fsdp", 1),
        ("dp1-tp1-pp1-mb32-gb32", 1),
        ("dp8-tp1-pp1-mb1-gb8", 8),
    ],
)
def test_a_strategy_has_micro_batches_and_copies_apart_where_it_can(text, parts):
    assert gradient_parts(parse_strategy(text)) == parts


# --- steps ---

STEPS, BATCH, EMPTY = 6, 16, 3  # in step EMPTY no token bears a loss
SMALL = replace(MODELS["llama"], layers=4)
ADAMW = OptimizerConfig("adamw", 1e-2, weight_decay=0.1)
LION = OptimizerConfig("lion", 1e-3)
PARTS = "dp1-tp1-pp1-mb1-gb16"
STAGES = "dp2-tp2-pp2x2-mb1-gb16-zero"


class Exact(Program):
    """A program whose state is float64."""

    @cached_property
    def abstract_state(self):
        def widen(x, sharding):
            wide = x.ndim and x.dtype == np.float32
            return jax.ShapeDtypeStruct(x.shape, "float64" if wide else x.dtype, sharding=sharding)

        return jax.tree.map(widen, super().abstract_state, self.state_shardings)


def train_config(optimizer):
    return TrainConfig(
        total_tokens=1,
        optimizer=optimizer,
        schedule=ScheduleConfig("constant", 0.0, 1.0),
        compute_dtype="float64",  # no run may have it
    )


@cache
def program(text, noise, optimizer=ADAMW, base_batch=None):
    strategy = parse_strategy(text)
    task = Task(SMALL, train_config(optimizer), LENGTH, True, 5, noise, base_batch)
    return Exact(task, strategy, jax.devices()[: strategy.devices], QUICK)


@cache
def chunk():
    """Steps of uneven sequences [c, B, T], one of them without loss."""
    batch = random_batch(SMALL, 8, BATCH // 8, steps=STEPS)
    found = Batch(*(x.reshape(STEPS, BATCH, *x.shape[3:]) for x in batch))
    found.weights[EMPTY] = 0
    return found


@cache
def outcome(text, noise, optimizer=ADAMW, base_batch=None, probe=False, count=STEPS, scale=1.0):
    """Host state and stats of `count` steps."""
    on = program(text, noise, optimizer, base_batch)
    state = on.put_state(init_state(random_params(SMALL), on.task.train))
    state, stats = on.run(state, on.put_chunk(chunk()), count, 0.0, 0.1, 0, scale, probe)
    return on.host(state), jax.tree.map(float, stats)


def assert_same_noise(found, expected, sources):
    assert found.keys() == expected.keys() == sources
    for source in sources:
        assert found[source] == pytest.approx(expected[source], rel=TOLERANCE), source


@pytest.mark.parametrize(
    ("noise", "optimizer", "text"),
    [
        ("preconditioned", ADAMW, STAGES),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("plain", ADAMW, STAGES),
                ("preconditioned", ADAMW, "dp2-tp4-pp1-mb2-gb16-fsdp-full"),
                ("preconditioned", LION, STAGES),
                ("plain", LION, "dp8-tp1-pp1-mb2-gb16-zero"),
                ("preconditioned", LION, "dp4-tp1-pp2-mb1-gb16-fsdp"),
                ("preconditioned", ADAMW, "dp1-tp2-pp4-mb2-gb16-matmuls"),
            ]
        ),
    ],
)
@pytest.mark.full
def test_halves_and_norms_say_the_same_under_every_strategy(noise, optimizer, text, x64):
    _, stats = outcome(PARTS, noise, optimizer, probe=True)
    _, other = outcome(text, noise, optimizer, probe=True)
    assert_same_noise(other.noise, stats.noise, {"norms", "probe"})
    # A probe measures norms as any step does.
    _, plain = outcome(PARTS, noise, optimizer)
    assert plain.noise["norms"] == pytest.approx(stats.noise["norms"], rel=TOLERANCE)


@pytest.mark.runs
@pytest.mark.parametrize("noise", [pytest.param("plain", marks=pytest.mark.full), "preconditioned"])
def test_equal_parts_say_the_same_under_every_strategy(noise, x64):
    _, stats = outcome(PARTS, noise)
    _, other = outcome("dp4-tp2-pp1-mb1-gb16-zero", noise)
    assert_same_noise(other.noise, stats.noise, {"norms", "parts"})


def test_one_part_says_nothing(x64):
    alone = program("dp1-tp2-pp2-mb2-gb16", "plain")
    assert alone.parts == 1
    assert alone.lower(STEPS).out_info[1].noise.keys() == {"norms"}


@pytest.mark.parametrize(
    ("text", "probe"),
    [
        (PARTS, False),
        pytest.param(STAGES, True, marks=pytest.mark.full),
        pytest.param(PARTS, True, marks=pytest.mark.full),
        pytest.param(STAGES, False, marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_measuring_changes_no_step(text, probe, x64):
    state, stats = outcome(text, None)
    assert stats.noise == {}
    other, others = outcome(text, "plain", probe=probe)
    for part in ("params", "opt_state"):
        worst = norms(getattr(other, part), getattr(state, part))
        assert max(worst.values()) < 1e-12, worst
    assert others[:5] == pytest.approx(stats[:5], rel=1e-12)


@pytest.mark.parametrize("noise", ["plain", "preconditioned"])
@pytest.mark.parametrize("source", ["norms", "parts"])
def test_only_steps_that_say_something_count(noise, source, x64):
    """Before the first step the optimizer knows no gradient, so there is nothing to divide by."""
    known = noise == "plain"
    _, first = outcome(PARTS, noise, count=1)
    _, before = outcome(PARTS, noise, count=EMPTY)
    _, after = outcome(PARTS, noise, count=EMPTY + 1)
    _, last = outcome(PARTS, noise)
    assert (after.skipped, last.steps) == (1, STEPS - 1)
    counts = [stats.noise[source].steps for stats in (first, before, after, last)]
    assert counts == [known, EMPTY - 1 + known, EMPTY - 1 + known, STEPS - 2 + known]
    assert after.noise[source] == before.noise[source]
    if not known:
        assert set(first.noise[source]) == {0}
    # Rows of the table that no token has had yet have no gradient to divide by either.
    seen = np.union1d(chunk().tokens[:2], chunk().targets[:2])
    assert len(seen) < SMALL.vocab_size
    assert np.isfinite([*before.noise[source], *last.noise[source]]).all()


@pytest.mark.parametrize("optimizer", [ADAMW, LION])
@pytest.mark.parametrize("steps", [1, 7])
def test_a_preconditioned_square_is_over_the_size_of_its_block(optimizer, steps, x64):
    """Of a gradient that never changes the optimizer knows the size from its first step on, so a
    block of n elements of root mean square r weighs n r^2 / r, and a row without gradient 0."""
    rng = np.random.default_rng(0)
    params = random_params(SMALL)
    spread = jax.tree.map(lambda x: 10 ** rng.uniform(-3, 3, x.shape), block_squares(params))
    gradient = jax.tree.map(
        lambda x, f: x * f.reshape(f.shape + (1,) * (x.ndim - f.ndim)), params, spread
    )
    squares = block_squares(gradient)

    core = make_optimizer(optimizer)
    state = core.init(params)
    for _ in range(steps):
        _, state = core.update(gradient, state, params)
    halves = jax.tree.map(lambda x: x / 2, squares)  # 2 (g / 2)^2: two parts alike, no noise
    tokens = 6.0
    found = make_measure("preconditioned", optimizer, 4, "parts")(
        gradient,
        Squares(halves, tokens**2 / 2, block_norms(halves["blocks"]), tokens**2 / 2),
        jnp.float64(tokens),
        state,
    )
    weighed = jax.tree.map(lambda x, q: np.sqrt(q * x.size / q.size).sum(), params, squares)
    for source, tree in (("parts", weighed), ("norms", block_norms(weighed["blocks"]))):
        expected = sum(jax.tree.leaves(tree)) / tokens**2
        assert (found[source].steps, found[source].g) == (1, pytest.approx(expected, rel=1e-6))
        assert abs(found[source].s) < 1e-9 * expected


# --- rate and decay ---


def test_weights_decay_by_samples_whatever_the_rate(x64):
    before, steps, rate = random_params(SMALL), {}, ADAMW.learning_rate
    moved = {"vector": 0.0, "matrix": rate * ADAMW.weight_decay, "table": rate * ADAMW.weight_decay}
    for base, factor in ((None, 1.0), (BATCH // 2, 2.0)):
        whole, half, double = (
            jax.tree.map(
                np.subtract, before, outcome(PARTS, None, ADAMW, base, count=1, scale=x)[0].params
            )
            for x in (1.0, 0.5, 2.0)
        )
        decay = jax.tree.map(lambda w, h: 2 * h - w, whole, half)
        steps[base] = jax.tree.map(np.subtract, whole, decay)
        assert_close(
            decay,
            jax.tree.map(
                lambda x, role, factor=factor: moved[role.kind] * factor * x, before, roles(before)
            ),
        )
        assert_close(double, jax.tree.map(lambda s, d: 2 * s + d, steps[base], decay))
        # A first step of Adam's is of size 1.
        largest = [np.abs(x).max() for x in jax.tree.leaves(steps[base])]
        assert largest == pytest.approx([rate] * len(largest), rel=1e-3)
    assert_close(steps[None], steps[BATCH // 2])


def test_the_second_moment_forgets_by_samples(x64):
    b2 = 0.95
    (plain, *_), (scaled, *_) = (
        outcome(PARTS, None, ADAMW, base, count=1)[0].opt_state for base in (None, BATCH // 2)
    )
    ratio = (1 - b2**2) / (1 - b2)
    assert_close(scaled.nu, jax.tree.map(lambda x: ratio * x, plain.nu))
    assert_close(scaled.mu, plain.mu)
    task = program(PARTS, None, ADAMW, BATCH // 2).task
    for batch in (1, 8, 40):
        assert task.optimizer(batch).b2 ** (8 / batch) == pytest.approx(b2)
    lion = replace(task, train=train_config(LION))  # its second decay is of the step itself
    assert lion.optimizer(40) == LION


# --- training for real ---

TEXT = TransformerConfig(64, 32, 2, 4, 4, 64, family="llama")
TEXT_BATCH, TEXT_LENGTH, CHUNK = 128, 32, 5


def markov_text(count):
    """`count` chunks of steps [c, B, T]; an entry is followed by few of the others."""
    rng, vocab = np.random.default_rng(0), TEXT.vocab_size
    bounds = np.cumsum(rng.dirichlet(np.full(vocab, 0.1), vocab), 1)
    shape = (CHUNK, TEXT_BATCH)
    positions = np.broadcast_to(np.arange(TEXT_LENGTH, dtype=np.int32), (*shape, TEXT_LENGTH))
    for _ in range(count):
        text = [rng.integers(0, vocab, shape)]
        for _ in range(TEXT_LENGTH):
            below = bounds[text[-1]] < rng.random((*shape, 1))
            text.append(np.minimum(below.sum(-1), vocab - 1))
        tokens = np.stack(text, -1).astype(np.int32)
        yield empty_batch(shape, TEXT_LENGTH)._replace(
            tokens=tokens[..., :-1],
            targets=tokens[..., 1:],
            weights=np.ones((*shape, TEXT_LENGTH), np.float32),
            positions=positions,
        )


@pytest.mark.full
@pytest.mark.parametrize("noise", ["plain", "preconditioned"])
def test_all_sources_agree_on_a_run_that_learns(noise):
    """Over steps 200 to 400 the averages of parts and of halves agree, and so do norms that halves
    of a step in ten calibrate. In the first 100 steps, where the loss falls from 4.5 to 2.5 nats,
    the noise scale of the norms grows faster than that of the whole, and averages over them say
    little."""
    config = replace(train_config(OptimizerConfig("adamw", 3e-3)), compute_dtype="float32")
    strategy = parse_strategy(f"dp1-tp1-pp1-mb16-gb{TEXT_BATCH}")
    task = Task(TEXT, config, TEXT_LENGTH, noise=noise)
    on = Program(task, strategy, jax.devices()[:1], {"xla_backend_optimization_level": 2})
    states = {False: on.init(0)}
    parts, probe, calibrated = (NoiseTracker(50 * TEXT_BATCH) for _ in range(3))
    found = []
    for number, batches in enumerate(markov_text(80)):
        if number == 20:
            states[True] = on.put_state(on.host(states[False]))
        placed, moments = on.put_chunk(batches), {}
        for way in states:
            states[way], stats = on.run(states[way], placed, CHUNK, 0.0, 0.0, 0, probe=way)
            moments |= stats.noise
        if number < 20:
            continue
        parts.update("parts", TEXT_BATCH, moments["parts"])
        probe.update("probe", TEXT_BATCH, moments["probe"])
        calibrated.update("norms", TEXT_BATCH, moments["norms"])
        if number % 10 == 0:
            calibrated.update("probe", TEXT_BATCH, moments["probe"])
        if number >= 40:
            found.append([tracker.estimate() for tracker in (parts, probe, calibrated)])
    assert len(found) * CHUNK >= 200
    assert found[-1][2].source == "norms, calibrated"
    truth, halves, norms_say = np.mean([[e.value for e in row] for row in found], 0)
    print(f"{noise}: probe / parts {halves / truth:.3f}, norms / parts {norms_say / truth:.3f}")
    assert halves == pytest.approx(truth, rel=0.1)
    assert norms_say == pytest.approx(truth, rel=0.1)
