# SPDX-License-Identifier: Apache-2.0
"""The guard sees what is wrong with a stored prefix, and little else."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import slow_engine

from geojax.bicache.depth import Depths, Guard
from geojax.bicache.engine import Engine, Job, Sizes
from geojax.bicache.pages import NoPagesError, kv_page_bytes
from geojax.bicache.policy import get_policy
from geojax.bicache.profile import profile_share
from geojax.bicache.shapes import shapes_within
from geojax.bicache.table import guard_of
from geojax.diffusion.request import SamplingConfig, prompt
from geojax.diffusion.sampler import Sampler
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Transformer, init_params

MASK, VOCAB, PREFIX, LENGTH, EVERY, CANVAS = 31, 32, 40, 52, 4, 8
MODEL = TransformerConfig(
    vocab_size=VOCAB, dim=32, layers=4, heads=4, kv_heads=2, mlp_dim=48, bidirectional=True
)
DEPTHS = Depths(((0.0, 2),))
SIZES = Sizes(8e6, 2e6, page=16)


@pytest.fixture(scope="module")
def sampler():
    return Sampler(Transformer(MODEL), init_params(MODEL, 1), MASK, np.arange(VOCAB) == MASK)


@pytest.fixture(scope="module")
def guard(sampler):
    rng = np.random.default_rng(7)
    sequences = rng.integers(0, 30, (200, LENGTH)).astype(np.int32)
    profile = profile_share(
        Transformer(MODEL), sampler.params, sequences, PREFIX, MASK, first_mask=LENGTH - CANVAS
    )
    return guard_of([profile], DEPTHS)


def job(seed):
    ids = np.random.default_rng(seed).integers(0, 30, LENGTH - CANVAS).tolist()
    return Job(prompt(ids, CANVAS, MASK, SamplingConfig(block=0)), (PREFIX,))


JOBS = [job(seed) for seed in range(96)]
BATCH = 32


def run(engine, spoil=lambda i: False):
    """Answers, and which requests retreated, with the stored prefix of some exchanged for noise
    before they begin."""
    answers, retreated, rng = [], [], np.random.default_rng(0)
    for start in range(0, len(JOBS), BATCH):
        slots = [engine.admit(j) for j in JOBS[start : start + BATCH]]
        for i, slot in enumerate(slots, start):
            if spoil(i):
                (entry,) = slot.chain
                pages = entry.hidden[0]
                noise = rng.normal(scale=5, size=(len(pages), *engine.memory.pool.hidden.shape[1:]))
                mixed = engine.memory.pool.hidden.at[pages].add(noise.astype(np.float32))
                engine.memory.pool = engine.memory.pool._replace(hidden=mixed)
        while not all(slot.done for slot in slots):
            engine.run(slots)
        answers += [engine.result(slot).tokens for slot in slots]
        retreated += [not slot.chain for slot in slots]
        for slot in slots:
            engine.leave(slot)
        engine.store.purge()
    engine.check_books()
    assert engine.kv.taken == 0
    assert sum(retreated) == engine.retreats
    return answers, np.array(retreated)


@pytest.mark.runs
def test_requests_like_the_profiled_ones_are_left_alone(sampler, guard):
    watched = Engine(sampler, get_policy("bicache", EVERY), SIZES, DEPTHS, guard=guard)
    free = Engine(sampler, get_policy("bicache", EVERY), SIZES, DEPTHS)
    answers, retreated = run(watched)
    assert retreated.sum() <= 0.02 * len(JOBS)
    for a, b, other in zip(answers, run(free)[0], retreated, strict=True):
        assert other or np.array_equal(a, b)
    work = watched.work
    assert 0 < work["probes"] <= 0.05 * (work["suffix"] + work["prefix"])
    # What runs with it for nothing counts as well.
    assert work["computed"] <= 1.05 * free.work["computed"]


def test_looking_costs_a_twentieth_of_a_refresh_whatever_the_request():
    guard = Guard(((1, 0.1),))
    for layers in (4, 8, 32):
        for depth in range(1, layers):
            for suffix, prefix in product((8, 40, 300), (16, 72, 4000)):
                count = guard.count(suffix, prefix, depth, layers)
                without = suffix * layers + prefix * (layers - depth)
                assert count == 1 or count * depth <= 0.05 * without
                assert 1 <= count <= guard.rows
    assert guard.count(128, 896, 16, 32) == guard.rows


@pytest.mark.runs
def test_a_spoilt_prefix_is_noticed_and_the_answer_is_as_without_it(sampler, guard):
    engine = Engine(sampler, get_policy("bicache", EVERY), SIZES, DEPTHS, guard=guard)
    spoilt = np.arange(len(JOBS)) % 3 == 0
    answers, retreated = run(engine, lambda i: spoilt[i])
    assert retreated[spoilt].mean() >= 0.8
    assert retreated[~spoilt].mean() <= 0.02
    model = slow_engine.SlowModel(MODEL, sampler.params)
    refresh = get_policy("refresh", EVERY)
    right = [
        np.array_equal(
            answers[i], slow_engine.answer(model, JOBS[i].request, refresh, MASK, (PREFIX,))
        )
        for i in np.flatnonzero(retreated & spoilt)[::4]
    ]
    assert all(right)
    # Without a guard they are wrong, or this would show little.
    unguarded, _ = run(
        Engine(sampler, get_policy("bicache", EVERY), SIZES, DEPTHS), lambda i: spoilt[i]
    )
    assert any(not np.array_equal(unguarded[i], answers[i]) for i in np.flatnonzero(spoilt))


def test_every_refresh_is_watched_and_equal_requests_are_told_apart(sampler, guard):
    """Blocks begin in the middle of a call; a fault that comes then is seen then."""
    ids = np.random.default_rng(5).integers(0, 30, LENGTH - 16).tolist()
    ask = SamplingConfig(block=4)
    twin = Job(prompt(ids, 16, MASK, ask), (PREFIX - 8,))
    engine = Engine(sampler, get_policy("bicache", 16), SIZES, DEPTHS, guard=guard)
    slots = [engine.admit(twin), engine.admit(twin)]
    engine.run(slots, 1)
    pages = slots[0].chain[0].hidden[0]
    spoilt = engine.memory.pool.hidden.at[pages].set(np.nan)
    engine.memory.pool = engine.memory.pool._replace(hidden=spoilt)
    while not all(slot.done for slot in slots):
        engine.run(slots)
    assert engine.retreats == 2
    assert not any(slot.broken for slot in slots)
    for slot in slots:
        engine.leave(slot)
    engine.check_books()


def test_a_guard_without_bounds_watches_nothing(sampler):
    engine = Engine(sampler, get_policy("bicache", EVERY), SIZES, DEPTHS, guard=Guard(()))
    engine.answer(JOBS[:1])
    assert (engine.retreats, engine.work["probes"]) == (0, 0)


def full_pool(sampler, name, guard):
    """An engine whose pool two requests of different salts fill to the last page, and these."""
    pages, behind, layers = 3, 1 if name == "bicache-dual" else 0, MODEL.layers
    each = 2 * pages + layers * pages + layers * behind  # the store's, its own, its suffix's
    per = kv_page_bytes(MODEL, np.float32, 16)
    every = EVERY if name == "bicache" else None
    sizes = Sizes((2 * each + 1) * per, 1e6, page=16)
    engine = Engine(sampler, get_policy(name, every), sizes, DEPTHS, guard=guard)
    return engine, [replace(JOBS[0], salt="a"), replace(JOBS[1], salt="b")]


@pytest.mark.parametrize("name", ["bicache", "bicache-dual"])
def test_a_retreat_needs_no_page_that_is_free_and_no_other_program(sampler, name, monkeypatch):
    engine, jobs = full_pool(sampler, name, Guard(((2, 0.5),)))
    monkeypatch.setattr(engine._builds, "_fill", lambda masks, entry: None)
    slots = [engine.admit(job) for job in jobs]
    assert engine.kv.free == 0
    with pytest.raises(NoPagesError):
        engine.admit(replace(jobs[0], salt="c"))
    shape = engine.shapes.of(slots)
    assert shape in set(shapes_within([2], 3, 64, 32))
    monkeypatch.setattr(engine, "_run", lambda *_: (np.array([9.0, 0.0]), 1))
    engine.run(slots, 1)
    assert [bool(slot.chain) for slot in slots] == [False, True]
    assert engine.shapes.of(slots) == shape
    pages = [set(slot.table.flat) for slot in slots]
    assert pages[0] <= set(slots[0].own)
    assert not pages[0] & pages[1]
    for slot in slots:
        engine.leave(slot)
    engine.check_books()
    assert engine.kv.taken == engine.store.kv_pages


@pytest.mark.full
@pytest.mark.parametrize(("name", "after"), [("bicache", "refresh"), ("bicache-dual", "dual")])
def test_a_retreat_in_a_full_pool_is_answered_as_if_never_shared(sampler, guard, name, after):
    engine, jobs = full_pool(sampler, name, guard)
    slots = [engine.admit(job) for job in jobs]
    pages = slots[0].chain[0].hidden[0]
    spoilt = engine.memory.pool.hidden.at[pages].set(np.nan)
    engine.memory.pool = engine.memory.pool._replace(hidden=spoilt)
    while not all(slot.done for slot in slots):
        engine.run(slots)
    assert [bool(slot.chain) for slot in slots] == [False, True]
    model = slow_engine.SlowModel(MODEL, sampler.params)
    for slot, policy, depth in zip(slots, (after, name), (0, 2), strict=True):
        how = get_policy(policy, EVERY if engine.policy.every else None)
        np.testing.assert_array_equal(
            engine.result(slot).tokens,
            slow_engine.answer(model, slot.job.request, how, MASK, (PREFIX,), depth),
        )
