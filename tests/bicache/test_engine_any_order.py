# SPDX-License-Identifier: Apache-2.0
"""Requests that come, run and go in any order, in a pool that is too small for all of them."""

from functools import cache

import jax
import numpy as np
import pytest
import slow_engine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from geojax.bicache.depth import Depths
from geojax.bicache.engine import Engine, Job, Sizes
from geojax.bicache.pages import NoPagesError, kv_page_bytes
from geojax.bicache.policy import get_policy
from geojax.diffusion.request import SamplingConfig, prompt
from geojax.diffusion.sampler import Sampler
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Transformer, init_params

MASK, VOCAB, PAGE, DEPTH = 31, 32, 16, 2
MODEL = TransformerConfig(
    vocab_size=VOCAB, dim=16, layers=3, heads=2, kv_heads=1, mlp_dim=24, bidirectional=True
)
POLICY = get_policy("bicache", 3)


@cache
def params():
    tree = init_params(MODEL, 1)
    return jax.tree.map(lambda x: x * 2.5 if x.ndim > 2 else x, tree)


@cache
def job(number):
    """Six requests of two tenants, some with a prefix in common, in one segment or two."""
    prefix = np.random.default_rng(number // 2).integers(0, 30, 40).tolist()
    private = np.random.default_rng(100 + number).integers(0, 30, 4).tolist()
    request = prompt([*prefix, *private], 6, MASK, SamplingConfig(block=3))
    return Job(request, [(40,), (16, 24)][number % 3 == 0], f"tenant {number % 2}")


@cache
def expected(number):
    asked = job(number)
    model = slow_engine.SlowModel(MODEL, params())
    return slow_engine.answer(model, asked.request, POLICY, MASK, asked.segments, DEPTH)


class AnyOrder(RuleBasedStateMachine):
    """The books are exact at every moment, and every answer is as if it were alone."""

    def __init__(self):
        super().__init__()
        sampler = Sampler(Transformer(MODEL), params(), MASK, np.arange(VOCAB) == MASK)
        per = kv_page_bytes(MODEL, np.float32, PAGE)
        # A request takes 9 pages, 6 of them the store's; two of unlike prefixes fit, and no more.
        sizes = Sizes(20 * per, 1e5, page=PAGE, quota_bytes=9 * per)
        self.engine = Engine(sampler, POLICY, sizes, Depths(((0.0, DEPTH),)))
        self.slots, self.numbers = [], {}

    @precondition(lambda self: len(self.slots) < 2)
    @rule(number=st.integers(0, 5))
    def admit(self, number):
        asked = job(number)
        others = {e.key for e in self.engine.store.entries if e.salt != asked.salt}
        try:
            slot = self.engine.admit(asked)
        except NoPagesError:
            assert self.slots or others, "it is alone, and finds no memory"
            return
        finally:
            left = {e.key for e in self.engine.store.entries if e.salt != asked.salt}
            assert left == others
        self.slots.append(slot)
        self.numbers[id(slot)] = number

    @precondition(lambda self: self.slots)
    @rule(steps=st.integers(1, 5))
    def run(self, steps):
        self.engine.run(self.slots, steps)
        for slot in [slot for slot in self.slots if slot.done]:
            tokens = self.engine.result(slot).tokens
            np.testing.assert_array_equal(tokens, expected(self.numbers[id(slot)]))
            self.engine.leave(slot)
            self.slots.remove(slot)

    @precondition(lambda self: self.slots)
    @rule(which=st.integers(0, 1))
    def give_up(self, which):
        self.engine.leave(self.slots.pop(which % len(self.slots)))

    @rule(salt=st.sampled_from([None, "tenant 0"]))
    def purge(self, salt):
        self.engine.store.purge(salt)

    @invariant()
    def every_page_has_one_owner(self):
        self.engine.check_books(self.slots)


@pytest.mark.runs
class TestAFewOrders(AnyOrder.TestCase):
    settings = settings(max_examples=3, stateful_step_count=15, deadline=None, derandomize=True)


@pytest.mark.full
class TestAnyOrder(AnyOrder.TestCase):
    settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
