# SPDX-License-Identifier: Apache-2.0
"""The store's books: who shares, who is evicted, and that no page is lost or owned twice."""

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from geojax.bicache.pages import CrowdedError, NoPagesError, Pages, QuotaError
from geojax.bicache.store import Store
from geojax.config import ConfigError

PAGE, DEPTH, DEPTHS = 4, 2, 1


def make(kv=41, hidden=21, quota=None):
    return Store(Pages(kv), Pages(hidden), PAGE, DEPTH, DEPTHS, "model 1", quota)


def nothing(entry):
    pass


def hold(store, *segments, salt="", builder="prefix", build=nothing):
    return store.acquire(segments, salt, builder, build)


def use(store, *segments, **kwargs):
    store.release(hold(store, *segments, **kwargs))


def test_the_same_prefix_of_one_salt_is_built_once():
    store, built = make(), []
    for _ in range(3):
        use(store, [1, 2, 3], build=built.append)
    assert (len(built), len(store), store.counts.hits) == (1, 1, 2)


@pytest.mark.parametrize(
    "other",
    [
        {"salt": "b"},
        {"builder": "canvas 64"},
    ],
)
def test_another_salt_or_builder_never_hits(other):
    store = make()
    use(store, [1, 2, 3])
    use(store, [1, 2, 3], **other)
    assert (store.counts.hits, store.counts.builds) == (0, 2)


def test_another_model_never_hits():
    keys = {
        Store(Pages(9), Pages(9), PAGE, DEPTH, DEPTHS, revision).keys([[1, 2]], "", "prefix")[0]
        for revision in ("a", "b")
    }
    assert len(keys) == 2


def test_where_segments_end_is_part_of_what_they_are():
    store = make()
    use(store, [1, 2], [3])
    use(store, [1, 2, 3])
    use(store, [1], [2, 3])
    assert store.counts.hits == 0
    use(store, [1, 2], [4])  # the first segment is shared
    assert store.counts.hits == 1
    assert store.counts.built_rows == 3 + 3 + 3 + 1


def test_the_longest_stored_prefix_is_found_at_the_borders_given():
    store = make()
    use(store, [1, 2], [3, 4, 5])
    use(store, [1, 2], [3])
    prompt = [1, 2, 3, 4, 5, 6]
    assert store.longest(prompt, "", "prefix") == [2, 5]
    assert store.longest(prompt, "", "prefix", ends=[2, 3]) == [2, 3]
    assert store.longest(prompt[:4], "", "prefix") == [2, 3]
    assert store.longest([9, 2, 3], "", "prefix") == []
    # The longest whole, not the longest first step.
    use(store, [1, 2, 3], [9])
    assert store.longest(prompt, "", "prefix") == [2, 5]
    assert store.longest(prompt, "b", "prefix") == []
    assert store.longest(prompt, "", "canvas 64") == []


def test_the_oldest_that_nobody_uses_is_evicted():
    store = make(kv=1 + 3 * DEPTH)
    for i in range(3):
        use(store, [i])
    use(store, [0])
    use(store, [7])
    keys = {entry.tokens[0] for entry in store._entries.values()}
    assert keys == {0, 2, 7}


def test_what_is_in_use_or_pinned_or_has_children_stays():
    store = make(kv=1 + 4 * DEPTH)
    held = hold(store, [1])
    use(store, [2], [3])
    pinned = hold(store, [4])
    store.pin(pinned)
    store.release(pinned)
    use(store, [5])  # only [3], a leaf, could go
    assert {int(e.tokens[0]) for e in store._entries.values()} == {1, 2, 4, 5}
    assert store.purge() == 3  # a pin is against others' wants, not against a purge
    store.release(held)
    assert store.purge() == 1
    assert store.kv_pages == 0


def test_a_pin_holds_until_each_that_asked_for_it_lets_go():
    """A system prompt, and a conversation that begins with it."""
    store = make(kv=1 + 2 * DEPTH)
    for segments in ([[1]], [[1], [2]]):
        chain = hold(store, *segments)
        store.pin(chain)
        store.release(chain)
    known = store.stored([[1], [2], [9]], "", "prefix")
    assert [int(e.tokens[0]) for e in known] == [1, 2]
    store.pin(known, False)
    use(store, [4])  # for which [2] goes
    use(store, [5])
    assert {int(e.tokens[0]) for e in store.entries} == {1, 5}
    store.pin(store.stored([[1]], "", "prefix"), False)
    use(store, [6], [7])
    assert {int(e.tokens[0]) for e in store.entries} == {6, 7}


def test_a_store_of_entries_in_use_says_so():
    store = make(kv=1 + DEPTH)
    held = hold(store, [1])
    with pytest.raises(NoPagesError, match=r"2 key/value .* 0 and \d+ are free, and 0 and \d+ can"):
        hold(store, [2])
    store.release(held)
    use(store, [2])
    assert len(store) == 1


def test_what_can_never_fit_evicts_nobody():
    store = make(kv=1 + 3 * DEPTH)
    use(store, [1])
    with pytest.raises(NoPagesError, match=r"20 key/value .* are wanted"):
        use(store, range(40))
    assert len(store) == 1


def test_under_quotas_a_tenant_evicts_its_own_entries():
    store = make(kv=1 + 4 * DEPTH, quota=4 * DEPTH)
    for i in range(2):
        use(store, [i], salt="a")
    for i in range(9):
        use(store, [i], salt="b")
    assert sorted(e.salt for e in store._entries.values()) == ["a", "a", "b", "b"]


def test_under_quotas_nobodys_pages_are_had_from_another_tenants_entries():
    store = make(kv=1 + 6 * DEPTH, quota=5 * DEPTH)
    for i in range(5):
        use(store, [i], salt="a")
    with pytest.raises(CrowdedError, match=r"2 and \d+ can be; prefixes of others stay"):
        store.make_room(2 * DEPTH, salt="b")  # of a request, not of an entry
    use(store, [1], salt="b")
    use(store, [2], salt="b")
    with pytest.raises(CrowdedError, match="prefixes of others stay"):
        use(store, range(8), salt="b")
    held = hold(store, [2], salt="b")
    with pytest.raises(NoPagesError, match="wait for requests to end") as waits:
        use(store, [3], salt="b")
    assert not isinstance(waits.value, CrowdedError)
    store.release(held)
    assert sorted(e.salt for e in store._entries.values()) == ["a"] * 5 + ["b"]
    store.make_room(2 * DEPTH, salt="a")
    assert sorted(e.salt for e in store._entries.values()) == ["a"] * 3 + ["b"]


def test_what_a_quota_refuses_evicts_nothing():
    store = make(quota=3 * DEPTH)
    use(store, [0])
    held = hold(store, [1])
    with pytest.raises(QuotaError, match="holds 4 pages, 2 of them in use or pinned, wants 6 more"):
        use(store, range(3 * PAGE))
    assert (len(store), store.counts.evictions) == (2, 0)
    store.release(held)


def test_one_tenant_cannot_evict_anothers_beyond_its_quota():
    store = make(kv=1 + 6 * DEPTH, quota=3 * DEPTH)
    for i in range(3):
        use(store, [i], salt="a")
    for i in range(9):
        use(store, [i], salt="b")
    held = [e.salt for e in store._entries.values()]
    assert sorted(held) == ["a"] * 3 + ["b"] * 3
    with pytest.raises(ConfigError, match=r"17 tokens takes 10 pages, more than the quota of 6"):
        use(store, range(17), salt="b")
    kept = [hold(store, [i], salt="b") for i in (6, 7, 8)]
    with pytest.raises(NoPagesError, match="salt 'b' holds 6 pages, 6 of them in use"):
        use(store, [9], salt="b")
    for chain in kept:
        store.release(chain)
    assert store.purge("a") == 3
    assert {e.salt for e in store._entries.values()} == {"b"}


def test_a_build_that_fails_leaves_nothing_and_the_next_one_builds():
    store = make()

    def fail(entry):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        hold(store, [1], [2], build=lambda e: fail(e) if e.parent else None)
    assert len(store) == 1
    assert all(not e.users for e in store._entries.values())
    use(store, [1], [2])
    assert len(store) == 2


def test_many_that_want_a_prefix_at_once_build_it_once():
    store, began, go, built = make(), threading.Event(), threading.Event(), []

    def build(entry):
        built.append(entry)
        began.set()
        assert go.wait(30)

    chains = []
    threads = [
        threading.Thread(target=lambda: chains.append(hold(store, [1, 2], build=build)))
        for _ in range(5)
    ]
    threads[0].start()
    assert began.wait(30)
    for thread in threads[1:]:
        thread.start()
    while store.counts.waits < 4:
        threading.Event().wait(0.01)
    go.set()
    for thread in threads:
        thread.join(30)
    assert (len(built), len(chains), store.counts.builds) == (1, 5, 1)
    assert chains[0][0].users == 5


class Books(RuleBasedStateMachine):
    """Any order of holding, releasing, pinning and purging keeps the books straight."""

    def __init__(self):
        super().__init__()
        self.kv, self.hidden = Pages(23), Pages(12)
        self.store = Store(self.kv, self.hidden, PAGE, DEPTH, DEPTHS, "", quota_pages=14)
        self.held, self.contents = [], {}

    def build(self, entry):
        # What a build writes; a stale hit would read another's.
        for page in entry.kv.flat:
            self.contents[int(page)] = entry.key

    @rule(
        segments=st.lists(
            st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=3
        ),
        salt=st.sampled_from(["", "b"]),
    )
    def hold(self, segments, salt):
        others = self.of_others(salt)
        try:
            chain = self.store.acquire(segments, salt, "prefix", self.build)
        except NoPagesError:
            pinned = any(entry.pins for entry in self.store._entries.values())
            assert self.held or pinned or others, "nobody holds anything, and there is no room"
            return
        finally:
            assert self.of_others(salt) == others
        assert [entry.tokens.tolist() for entry in chain] == segments
        assert {entry.salt for entry in chain} == {salt}
        self.held.append(chain)

    def of_others(self, salt):
        """What the store keeps of other tenants, which `salt` can do nothing about."""
        return {e.key for e in self.store._entries.values() if e.salt != salt}

    @rule(kv=st.integers(0, 22), hidden=st.integers(0, 11), salt=st.sampled_from(["", "b"]))
    def make_room(self, kv, hidden, salt):
        others, evicted = self.of_others(salt), self.store.counts.evictions
        try:
            self.store.make_room(kv, hidden, salt)
        except NoPagesError:
            assert self.store.counts.evictions == evicted
        else:
            assert self.kv.free >= kv
            assert self.hidden.free >= hidden
        assert self.of_others(salt) == others

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.store.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data, pinned):
        self.store.pin(self.held[data.draw(st.integers(0, len(self.held) - 1))], pinned)

    @rule(salt=st.sampled_from([None, "", "b"]))
    def purge(self, salt):
        self.store.purge(salt)

    @rule()
    def forget(self):
        self.store.forget()
        assert len(self.store) == 0

    def living(self):
        """Entries that hold pages: those of the store, and forgotten ones that are in use."""
        held = [entry for chain in self.held for entry in chain]
        return list({id(e): e for e in [*self.store._entries.values(), *held]}.values())

    @invariant()
    def pages_add_up(self):
        entries = self.living()
        for books, pages in (
            (self.kv, [e.kv for e in entries]),
            (self.hidden, [e.hidden for e in entries]),
        ):
            flat = [int(p) for array in pages for p in array.flat]
            assert len(flat) == len(set(flat)) == books.taken
            assert books.free + books.taken == books.count - 1
            assert 0 not in flat

    @invariant()
    def what_is_held_is_there_and_its_own(self):
        for chain in self.held:
            for entry in chain:
                assert all(self.contents[int(p)] == entry.key for p in entry.kv.flat)
        users = sum(e.users for e in self.living())
        assert users == sum(map(len, self.held))

    @invariant()
    def tenants_keep_to_their_quota(self):
        for salt in ("", "b"):
            held = sum(e.kv.size for e in self.store._entries.values() if e.salt == salt)
            assert held <= 14


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBooks = Books.TestCase


def test_pages_are_given_back_once():
    pages = Pages(5)
    ids = pages.take(3)
    assert 0 not in ids
    pages.give(ids)
    with pytest.raises(AssertionError, match="nobody had it"):
        pages.give(ids[:1])
    with pytest.raises(NoPagesError, match="5 pages are wanted and 4 are free"):
        pages.take(5)
    assert np.unique(pages.take(4)).size == 4
