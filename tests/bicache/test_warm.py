# SPDX-License-Identifier: Apache-2.0
"""After a warm-up nothing is compiled, whatever requests come, and memory is what the books say."""

import gc

import jax
import numpy as np
import pytest

from geojax.bicache.depth import Depths
from geojax.bicache.engine import Engine, Job, Sizes
from geojax.bicache.pages import NoPagesError
from geojax.bicache.policy import get_policy
from geojax.diffusion.request import SamplingConfig, prompt
from geojax.diffusion.sampler import Sampler
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Transformer, init_params

MASK, VOCAB, PAGE = 31, 32, 16
MODEL = TransformerConfig(
    vocab_size=VOCAB, dim=16, layers=3, heads=2, kv_heads=1, mlp_dim=24, bidirectional=True
)


def random_job(rng, prefixes=6, most_segments=2):
    """With a prefix or without, of a few that are shared, in segments; of any policy of filling."""
    which = int(rng.integers(0, prefixes))
    prefix = np.random.default_rng(which).integers(0, 30, int(7 + 5 * which))
    private = rng.integers(0, 30, rng.integers(1, 9))
    cut = int(rng.integers(1, len(prefix)))
    ways = [(), (len(prefix),), (cut, len(prefix) - cut)]
    segments = ways[rng.integers(0, most_segments + 1)]
    policy = ["confidence", "threshold", "margin", "entropy", "origin"][rng.integers(0, 5)]
    ask = SamplingConfig(
        policy=policy,
        block=int(rng.integers(0, 12)),
        temperature=float(rng.choice([0.0, 0.7])),
        seed=int(rng.integers(0, 1000)),
    )
    canvas = int(rng.integers(1, 14))
    request = prompt([*prefix.tolist(), *private.tolist()], canvas, MASK, ask)
    return Job(request, segments, f"tenant {which % 2}", exact=bool(rng.random() < 0.1))


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.fixture
def compiled():
    """Seconds of every compilation from now on."""
    seen = []

    def listen(name, seconds, **kwargs):
        if name.endswith("backend_compile_duration"):
            seen.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


FEW = {"prefixes": 2, "most_segments": 1}  # of 12 tokens at most


@pytest.mark.parametrize(
    ("name", "most", "requests", "kv_bytes", "kinds"),
    [
        ("bicache", 1, 20, 6 * 1024, FEW),  # five pages, and requests take four
        pytest.param("bicache", 2, 60, 6e4, {}, marks=pytest.mark.full),
        pytest.param("bicache", 4, 500, 6e4, {}, marks=pytest.mark.full),
        pytest.param("bicache-dual", 4, 500, 6e4, {}, marks=pytest.mark.full),
    ],
)
def test_nothing_is_compiled_after_a_warm_up(name, most, requests, kv_bytes, kinds, compiled):
    sampler = Sampler(Transformer(MODEL), init_params(MODEL, 0), MASK, np.arange(VOCAB) == MASK)
    engine = Engine(
        sampler,
        get_policy(name),
        Sizes(kv_bytes, 1e5, page=PAGE),
        Depths(((0.0, 1), (0.6, 2))),
    )
    rows, segments = [n for n in (1, 2, 4) if n <= most], kinds.get("most_segments", 2)
    seconds = engine.warm(rows, 16 if kinds else 32, suffix=64, block=13, segments=segments)
    assert seconds > 0
    assert engine.programs <= 64
    warmed = len(compiled)
    assert warmed
    live = live_bytes()
    pool = sum(x.nbytes for x in engine.memory.pool)
    assert pool == engine.kv.count * 1024 + engine.memory.hidden.count * 1024
    assert engine.kv.count * 1024 <= kv_bytes
    rng, slots, answered = np.random.default_rng(0), [], 0
    while answered < requests:
        while len(slots) < most:
            try:
                slots.append(engine.admit(random_job(rng, **kinds)))
            except NoPagesError:
                assert slots, "one request alone must fit"
                break
        engine.run(slots)
        for slot in [s for s in slots if s.done]:
            slots.remove(slot)
            assert MASK not in engine.result(slot).tokens
            engine.leave(slot)
            answered += 1
        engine.check_books(slots)
    assert len(compiled) == warmed
    assert engine.store.counts.hits
    assert engine.store.counts.evictions
    # The pool is the same memory as before, and nothing else is kept on the device.
    assert live_bytes() == live
