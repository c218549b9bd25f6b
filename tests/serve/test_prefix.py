# SPDX-License-Identifier: Apache-2.0
"""What of a prompt is built as a prefix, and what the next request finds of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_serve import MASK, PAGE, QuickEngine

from geojax.bicache.engine import Job
from geojax.config import ConfigError
from geojax.diffusion.request import prompt
from geojax.serve.prefix import segments_of


@pytest.fixture(scope="module")
def engine(model):
    return QuickEngine(model, kv_bytes=4e6, quota_bytes=4e6)


def request(ids):
    return prompt(list(ids), 4, MASK)


def admit(engine, ids, salt):
    """Its segments, and tokens of them that were stored before."""
    segments = segments_of(engine, request(ids), salt, None)
    built = engine.store.counts.built_rows
    slot = engine.admit(Job(request(ids), segments, salt))
    engine.leave(slot)
    return segments, sum(segments) - (engine.store.counts.built_rows - built)


salts = iter(range(10**6))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 200), st.lists(st.integers(0, 60), min_size=3, max_size=3))
def test_each_request_finds_more_of_what_it_has_in_common(engine, shared, own):
    rng, salt = np.random.default_rng(shared), f"s{next(salts)}"
    engine.store.purge()  # under quotas what others store stays
    head = rng.integers(0, 250, shared)
    for number, more in enumerate(own):
        # The next token differs, so that no more than the head is shared.
        ids = [*head, 250 + number, *rng.integers(0, 250, more)]
        segments, cached = admit(engine, ids, salt)
        assert sum(segments) <= len(ids)
        assert all(n > 0 and n % PAGE == 0 for n in segments)
        assert cached <= shared
        pages = shared // PAGE
        if number == 1 and pages:  # the longest that doubling came to
            assert cached == PAGE * 2 ** (pages.bit_length() - 1)
        if number == 2:  # all whole pages, or all but one
            assert cached >= PAGE * (pages - 1)


def test_what_is_marked_is_taken_as_it_is(engine):
    ids = range(100)
    assert segments_of(engine, request(ids), "marked", (7, 50)) == (7, 43)
    assert segments_of(engine, request(ids), "marked", ()) == ()
    with pytest.raises(ConfigError, match="within the prompt"):
        segments_of(engine, request(ids), "marked", (101,))
