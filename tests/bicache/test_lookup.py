# SPDX-License-Identifier: Apache-2.0
"""Prefixes are found where callers do not name them."""

import pytest

from geojax.bicache.lookup import Lookup
from geojax.bicache.pages import Pages
from geojax.bicache.store import Store
from geojax.config import ConfigError

PAGE = 4


@pytest.fixture
def store():
    return Store(Pages(99), Pages(99), PAGE, 2, 1, "model")


def use(store, prompt, segments, salt=""):
    parts, at = [], 0
    for length in segments:
        parts.append(prompt[at : at + length])
        at += length
    store.release(store.acquire(parts, salt, "prefix", lambda entry: None))


def test_a_prefix_seen_twice_is_shared_from_the_second_time_on(store):
    lookup = Lookup(store, PAGE, fewest=4)
    first = list(range(20))
    assert lookup.segments(first, "", "prefix") == ()
    second = [*range(11), 77, 78, 79]
    found = lookup.segments(second, "", "prefix")
    assert found == (8,)  # whole pages
    use(store, second, found)
    third = [*range(9), 55]
    found = lookup.segments(third, "", "prefix")
    assert found == (8,)
    use(store, third, found)
    assert store.counts.hits == 1


def test_another_salt_has_seen_nothing(store):
    lookup = Lookup(store, PAGE, fewest=4)
    for salt in ("a", "b"):
        assert lookup.segments(range(20), salt, "prefix") == ()
    assert lookup.segments(range(20), "b", "prefix") == (20,)


def test_a_stored_prefix_that_is_nearly_as_long_is_taken(store):
    lookup = Lookup(store, PAGE, fewest=4)
    use(store, list(range(10)), (6, 4))
    prompt = list(range(12))
    assert lookup.segments(prompt, "", "prefix") == (6, 4)
    assert lookup.segments(prompt, "", "prefix") == (6, 4)  # 12 were seen: not a page more
    longer = list(range(20))
    lookup.segments(longer, "", "prefix")
    assert lookup.segments(longer, "", "prefix") == (20,)


def test_short_prefixes_are_left_alone(store):
    lookup = Lookup(store, PAGE, fewest=9)
    for _ in range(2):
        assert lookup.segments(range(8), "", "prefix") == ()
    for _ in range(2):
        found = lookup.segments(range(12), "", "prefix")
    assert found == (12,)


def test_borders_that_the_caller_gives_are_kept(store):
    lookup = Lookup(store, PAGE, fewest=4)
    assert lookup.segments(range(20), "", "prefix", ends=[3, 10]) == (3, 7)
    with pytest.raises(ConfigError, match=r"segments end at \[10, 3\] of 20"):
        lookup.segments(range(20), "", "prefix", ends=[10, 3])
    with pytest.raises(ConfigError, match=r"segments end at \[30\] of 20"):
        lookup.segments(range(20), "", "prefix", ends=[30])


def test_memory_is_bounded_and_the_newest_stays(store):
    lookup = Lookup(store, PAGE, fewest=4, most=6)
    for i in range(10):
        lookup.segments([i] * 8, "", "prefix")
    assert sum(map(len, lookup._seen.values())) == lookup._count == 6
    assert lookup.segments([9] * 8, "", "prefix") == (8,)
    assert lookup.segments([0] * 8, "", "prefix") == ()
    for i in range(10, 20):
        lookup.segments([i] * 8, "another", "prefix")
    assert sum(map(len, lookup._seen.values())) == lookup._count == 6
    assert lookup.segments([0] * 8, "", "prefix") == (8,)  # who asks for more has no more
