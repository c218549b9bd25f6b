# SPDX-License-Identifier: Apache-2.0
"""Programs of one task do the same to the same state, and hand it to each other whole."""

import threading
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import pairwise, permutations

import jax
import numpy as np
import pytest
from strategies import (
    LENGTH,
    QUICK,
    assert_one_leaf_at_a_time,
    learnt,
    norms,
    random_batch,
    random_params,
)
from strategies import MODELS as EIGHT_LAYERS

from geojax.config import ConfigError, OptimizerConfig, ScheduleConfig, TrainConfig
from geojax.data import Batch
from geojax.meshes.strategy import enumerate_strategies, parse_strategy
from geojax.train import programs as module
from geojax.train.losses import Losses
from geojax.train.program import Program, Task
from geojax.train.programs import Programs
from geojax.train.step import init_state

STEPS, ROWS, EMPTY = 20, 16, 7  # in step EMPTY no token bears a loss
CLIP = 0.5
BETA = 0.9  # of Adam's first moment
TRAIN = TrainConfig(
    total_tokens=1,
    optimizer=OptimizerConfig("adamw", 1e-2, b1=BETA, weight_decay=0.1),
    schedule=ScheduleConfig(),
    clip_norm=CLIP,
    compute_dtype="float64",  # no run may have it
)
TOLERANCE = 1e-9
MODELS = {"short": replace(EIGHT_LAYERS["llama-tied"], layers=4), **EIGHT_LAYERS}
ONE = "dp1-tp1-pp1-mb4-gb16"


class Exact(Program):
    """A program whose state is float64."""

    @cached_property
    def abstract_state(self):
        def widen(x, sharding):
            wide = x.ndim and x.dtype == np.float32
            return jax.ShapeDtypeStruct(x.shape, "float64" if wide else x.dtype, sharding=sharding)

        return jax.tree.map(widen, super().abstract_state, self.state_shardings)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def task(name):
    return Task(MODELS[name], TRAIN, LENGTH, documents=True, seed=5)


def chunk_of(model):
    """Steps of uneven sequences [c, B, T], one of them without loss."""
    batch = random_batch(model, 8, ROWS // 8, steps=STEPS)
    chunk = Batch(*(x.reshape(STEPS, ROWS, *x.shape[3:]) for x in batch))
    chunk.weights[EMPTY] = 0
    return chunk


def train(name, text):
    """Host states after 1 and after 20 steps, their stats, and the last state on the devices."""
    strategy = parse_strategy(text)
    program = Exact(task(name), strategy, jax.devices()[: strategy.devices], QUICK)
    chunk = program.put_chunk(chunk_of(MODELS[name]))
    results = []
    for count in (1, STEPS):
        state = program.put_state(init_state(random_params(MODELS[name]), TRAIN))
        state, stats = program.run(state, chunk, count, 0.1, 0.04, 0)
        results.append((program.host(state), jax.tree.map(float, stats)))
    return *results, state


@cache
def on_one_device(name):
    return train(name, ONE)[:2]


def full(names):
    """Every layout of 8 devices, with every schedule and sharding that it can have."""
    shardings = ("none", "optimizer", "all")
    for name in names:
        found = enumerate_strategies(MODELS[name], 8, [ROWS], [1], [1, 2], shardings=shardings)
        yield from ((name, str(s)) for s in found.legal)


FEW = [
    ("short", "dp2-tp2-pp2x2-mb1-gb16"),
    ("short", "dp2-tp2-pp2-mb2-gb16-fsdp-full"),
    ("short", "dp8-tp1-pp1-mb1-gb16-zero"),
    ("short", "dp1-tp8-pp1-mb4-gb16"),
    ("short", "dp2-tp1-pp4-mb2-gb16-zero-matmuls"),
]
ALL = [
    *(
        pytest.param(*case, id="-".join(case), marks=() if i < 1 else pytest.mark.full)
        for i, case in enumerate(FEW)
    ),
    *(
        pytest.param(*case, id="-".join(case), marks=pytest.mark.full)
        for case in full(("gpt", "bert", "llama"))
    ),
]


@pytest.mark.parametrize(("name", "text"), ALL)
def test_twenty_steps_equal_those_of_one_device(name, text, x64):
    expected = on_one_device(name)
    *found, state = train(name, text)
    for (ours, stats), (theirs, their_stats) in zip(found, expected, strict=True):
        assert stats[:5] == pytest.approx(their_stats[:5], abs=TOLERANCE)
        for part in ("params", "opt_state"):
            worst = norms(getattr(ours, part), getattr(theirs, part))
            assert max(worst.values()) < TOLERANCE, worst
        assert ours.step == theirs.step
        assert ours.mean_loss == pytest.approx(theirs.mean_loss, rel=1e-6)  # kept in float32
    assert_clipped(*found[0])
    after, stats = found[1]
    assert (stats.steps, stats.skipped, after.step) == (STEPS - 1, 1, STEPS - 1)
    assert stats.tokens == chunk_of(MODELS[name]).weights.sum()
    assert_learnt_but_for_padding(MODELS[name], after.params)
    assert_copies_are_equal(state)


def assert_clipped(after, stats):
    """The norm is of all stages and shards together: elsewhere it is one stage's."""
    assert stats.grad_norm > 1.5 * CLIP
    (adam, *_) = after.opt_state
    moments = np.array(list(norms(adam.mu).values()))
    assert np.sqrt((moments**2).sum()) == pytest.approx((1 - BETA) * CLIP, rel=1e-9)


def assert_learnt_but_for_padding(model, params):
    # Elsewhere a vocabulary that does not divide is padded by each layout in its own way.
    assert min(learnt(norms(params, random_params(model)))) > 1e-3
    for name in {"embed", "head", "head_bias"} & params.keys():
        assert (params[name][model.vocab_size :] == 0).all()


def assert_copies_are_equal(state):
    """Elsewhere an embedding that two stages have drifts apart."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for first, *others in copies.values():
            assert all((first == other).all() for other in others), path


# --- moving ---

PLACES = [
    "dp8-tp1-pp1-mb1-gb16",
    "dp8-tp1-pp1-mb1-gb16-fsdp",
    "dp1-tp8-pp1-mb1-gb16",
    "dp1-tp1-pp8-mb1-gb16",
    "dp2-tp2-pp2-mb1-gb16-zero",
    "dp2-tp2-pp2x2-mb1-gb16-fsdp",
    "dp2-tp1-pp4x2-mb1-gb16-zero",
    "dp1-tp2-pp4x2-mb1-gb16",
]
# Few shapes, since copies are compiled for each.
MOVED = replace(TRAIN, optimizer=OptimizerConfig("sgd", momentum=0.9))


@cache
def place(text):
    model = replace(MODELS["llama"], kv_heads=8, mlp_dim=32, vocab_size=256)
    return Program(Task(model, MOVED, LENGTH), parse_strategy(text), jax.devices(), QUICK)


def host_state():
    """Random, moments too."""
    state = init_state(random_params(place(PLACES[0]).task.model), MOVED)
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: rng.standard_normal(x.shape).astype(np.float32) if x.ndim else np.asarray(x),
        state,
    )


def walk_over_pairs(count):
    """A closed walk that takes every ordered pair of `count` places once (Hierholzer 1873)."""
    left, open_, walk = {(a, b) for a, b in permutations(range(count), 2)}, [0], []
    while open_:
        ways = [pair for pair in sorted(left) if pair[0] == open_[-1]]
        if ways:
            left.remove(ways[0])
            open_.append(ways[0][1])
        else:
            walk.append(open_.pop())
    assert len(walk) == count * (count - 1) + 1
    return walk


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    "walk",
    [
        pytest.param([0, 5, 6, 1, 0], id="few"),
        pytest.param(walk_over_pairs(len(PLACES)), id="pairs", marks=pytest.mark.full),
    ],
)
def test_a_state_survives_every_move_bit_by_bit(walk):
    expected = host_state()
    state = place(PLACES[0]).put_state(expected)
    for old, new in pairwise(walk):
        before, after = place(PLACES[old]), place(PLACES[new])
        state = after.move([state], before)
        assert jax.tree.map(lambda x: x.sharding, state) == after.state_shardings
        assert_same(after.host(state), expected)


@pytest.mark.parametrize(("old", "new"), [(PLACES[0], PLACES[5]), (PLACES[6], PLACES[1])])
def test_no_more_than_a_state_and_its_largest_leaf_is_alive(old, new, monkeypatch):
    before, after = place(old), place(new)
    taken = [before.put_state(host_state())]
    move = partial(after.move, before=before)
    assert_one_leaf_at_a_time(monkeypatch, move, taken, after.state_shardings)


def test_a_first_state_is_the_same_everywhere():
    first = place(PLACES[0]).host(place(PLACES[0]).init(3))
    assert min(norms(first.params).values()) > 0  # a llama has no biases
    program = place(PLACES[5])
    state = program.init(3)
    assert jax.tree.map(lambda x: x.sharding, state) == program.state_shardings
    assert_same(program.host(state), first)


# --- batches, evaluation, refusals ---


@pytest.mark.parametrize("text", ["dp4-tp2-pp1-mb2-gb16", "dp2-tp2-pp2x2-mb1-gb16"])
def test_sequences_keep_their_order_in_micro_batches(text):
    program, chunk = place(text), chunk_of(MODELS["gpt"])
    placed = program.put_chunk(chunk)
    s = program.strategy
    for x, whole in zip(placed, chunk, strict=True):
        assert x.shape[:3] == (STEPS, s.micro_batches, s.dp * s.micro_batch)
        np.testing.assert_array_equal(np.asarray(x).reshape(whole.shape), whole)
        for shard in x.addressable_shards:  # a copy has neighbours, and all of their tokens
            assert shard.data.shape == (STEPS, s.micro_batches, s.micro_batch, *x.shape[3:])


def test_evaluation_is_the_same_on_stages():
    chunk = chunk_of(MODELS["gpt"])
    held_out = Batch(*(x.reshape(-1, *x.shape[2:])[:24] for x in chunk))

    def batches(rows):
        """Of `rows` sequences, the last one filled up with others that bear no loss."""
        fill = -len(held_out.tokens) % rows
        more = Batch(*(np.concatenate([x, x[:fill]]) for x in held_out))
        more.weights[len(held_out.tokens) :] = 0
        assert len(more.tokens) % rows == 0
        for i in range(0, len(more.tokens), rows):
            yield Batch(*(x[i : i + rows] for x in more))

    results = []
    for text in ("dp1-tp1-pp1-mb4-gb16", "dp2-tp2-pp2x2-mb1-gb16-fsdp"):
        strategy = parse_strategy(text)
        plain = replace(TRAIN, compute_dtype="float32")
        devices = jax.devices()[: strategy.devices]
        program = Program(replace(task("gpt"), train=plain), strategy, devices, QUICK)
        params = program.put_params(
            jax.tree.map(lambda x: x.astype(np.float32), random_params(MODELS["gpt"]))
        )
        results.append(program.evaluate(params, batches, 9))
    assert results[0].tokens == results[1].tokens == held_out.weights.sum()
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)  # float32


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        (
            "dp1-tp1-pp4-mb1-gb3",
            4,
            "3 micro-batches are fewer than pp 4 stages; use global_batch 4",
        ),
        ("dp1-tp1-pp3-mb1-gb8", 3, "layers 8 does not divide by pp 3; use pp 2 or 4"),
        ("dp2-tp2-pp1-mb1-gb8", 8, "wants 4 devices, and there are 8; use dp 4"),
    ],
)
def test_a_strategy_that_cannot_train_is_refused_by_name(text, devices, message):
    with pytest.raises(ConfigError, match=message):
        Program(task("gpt"), parse_strategy(text), jax.devices()[:devices])


# --- programs ---


class Slow:
    """Stands for what is lowered; compiling waits until it is let go on."""

    def __init__(self):
        self.begun, self.go_on = threading.Event(), threading.Event()

    def compile(self):
        self.begun.set()
        assert self.go_on.wait(60)
        return self


@pytest.mark.parametrize("kind", ["steps", "losses"])
def test_what_is_compiled_is_had_while_another_thread_compiles(kind, monkeypatch):
    first, second = Slow(), Slow()
    if kind == "losses":
        losses = Losses()
        gets = [
            lambda s=s, x=x: losses.get(s, lambda _: x)
            for s, x in ((FIRST, first), (SECOND, second))
        ]
    else:
        program = Program(task("gpt"), FIRST, jax.devices())
        monkeypatch.setattr(program, "lower", lambda steps, probe: {7: first, 8: second}[steps])
        gets = [lambda steps=steps: program.compile(steps) for steps in (7, 8)]
    first.go_on.set()
    assert gets[0]() is first
    other = threading.Thread(target=gets[1])
    other.start()
    assert second.begun.wait(60)
    found = []
    again = threading.Thread(target=lambda: found.append(gets[0]()), daemon=True)
    again.start()
    again.join(10)
    assert found == [first]
    second.go_on.set()
    other.join()


class Counted:
    """Stands for a program: remembers what was compiled, and fails where it is told to."""

    made: list
    wait: threading.Event
    fails: bool

    def __init__(self, task, strategy, devices, losses):
        self.strategy = strategy

    def compile_all(self, steps):
        Counted.wait.wait(10)
        Counted.made.append((self.strategy, steps))
        if Counted.fails:
            raise MemoryError("too large")


@pytest.fixture
def programs(monkeypatch):
    Counted.made, Counted.wait, Counted.fails = [], threading.Event(), False
    Counted.wait.set()
    monkeypatch.setattr(module, "Program", Counted)
    return Programs(task("gpt"), jax.devices(), 7, limit=2)


FIRST, SECOND, THIRD = map(parse_strategy, PLACES[:3])


def test_programs_are_compiled_once_and_beside_what_runs(programs):
    Counted.wait.clear()
    ready = programs.prefetch(FIRST)
    assert not ready.done()
    assert programs.prefetch(FIRST) is ready
    Counted.wait.set()
    assert programs.get(FIRST) is ready.result()
    assert Counted.made == [(FIRST, 7)]


def test_the_least_recently_used_program_is_dropped(programs):
    for strategy in (FIRST, SECOND, FIRST, THIRD, FIRST, SECOND):
        assert programs.get(strategy).strategy == strategy
    assert [s for s, _ in Counted.made] == [FIRST, SECOND, THIRD, SECOND]


def test_what_is_being_compiled_is_known_of_to_its_end(programs):
    """Else it would be compiled twice, or beside a round whose time counts."""
    Counted.wait.clear()
    futures = [programs.prefetch(s) for s in (FIRST, SECOND, THIRD)]
    # By the order of calls, whatever is compiled by now: other processes must drop the same.
    assert list(programs.found()) == [SECOND, THIRD]
    assert programs.busy
    assert programs.prefetch(FIRST) is futures[0]
    assert list(programs.found()) == [THIRD, FIRST]
    Counted.wait.set()
    assert [f.result().strategy for f in futures] == [FIRST, SECOND, THIRD]
    assert not programs.busy
    assert len(Counted.made) == 3


def test_a_program_that_failed_is_tried_again(programs):
    Counted.fails = True
    with pytest.raises(MemoryError):
        programs.get(FIRST)
    Counted.fails = False
    assert programs.get(FIRST).strategy == FIRST
    assert len(Counted.made) == 2
