# SPDX-License-Identifier: Apache-2.0
"""Who is next: shares of tenants, priorities within one, and that nobody waits for ever."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.diffusion.request import SamplingConfig
from geojax.serve.quantum import Quantum
from geojax.serve.tenants import Tenant
from geojax.serve.ticket import Ask, Ticket
from geojax.serve.waiting import Waiting

ASK = Ask(np.zeros(4, np.int32), SamplingConfig(), tokens=8, canvas=8)


def ticket(tenant, arrived=0.0, tokens=8, priority=0):
    ask = replace(ASK, tokens=tokens, canvas=tokens, priority=priority)
    return Ticket(ask, Tenant(tenant, tenant), arrived, 1e9, lambda: None)


def serve(waiting, now=0.0, skipped=()):
    found = waiting.next(now, set(skipped))
    waiting.take(found)
    return found


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 64)), min_size=1, max_size=60))
def test_tenants_that_wait_get_equal_shares_of_cost(wanted):
    """While two tenants both wait, what they were given differs by no more than one request of
    each."""
    waiting, given_ = Waiting(1000, 10.0), dict.fromkeys("abc", 0.0)
    tickets = [ticket(name, i, tokens) for i, (name, tokens) in enumerate(wanted)]
    largest = max(t.cost for t in tickets)
    for one in tickets:
        waiting.add(one)
    while len(waiting):
        there = [name for name in "abc" if waiting.count(name)]
        shares = [given_[name] for name in there]
        assert max(shares) - min(shares) <= largest
        found = serve(waiting)
        given_[found.tenant.name] += found.cost
    assert sum(given_.values()) == sum(t.cost for t in tickets)


def test_a_tenant_that_was_idle_neither_saves_up_nor_owes():
    waiting = Waiting(1000, 10.0)
    for i in range(20):
        waiting.add(ticket("busy", i))
    for _ in range(10):
        serve(waiting)
    waiting.add(ticket("new"))
    waiting.add(ticket("new", 1))
    order = [serve(waiting).tenant.name for _ in range(4)]
    assert order.count("new") == 2
    # It was served all the while: now it is no further behind than one that comes.
    for i in range(4):
        waiting.add(ticket("late", i))
    order = [serve(waiting).tenant.name for _ in range(6)]
    assert 2 <= order.count("busy") <= 4


def test_a_long_answer_is_weighed_again_at_each_canvas():
    """One row: a tenant that comes later gets every other canvas until it has what it wanted."""
    waiting, growing, order = Waiting(1000, 10.0), [], []
    long = ticket("long", tokens=160)
    long.ask = replace(long.ask, canvas=8)
    waiting.add(long)
    for turn in range(12):
        found = waiting.next(0.0, set(), growing)
        order.append(found.tenant.name)
        if found in growing:
            growing.remove(found)
            waiting.charge(found)
        else:
            waiting.take(found)
        if turn == 3:  # the long one has had four canvases
            for i in range(3):
                waiting.add(ticket("short", i))
        if found is long:
            growing.append(long)
    assert order[:5] == ["long"] * 4 + ["short"]
    assert order[4:9].count("short") == 3
    assert "long" in order[4:7]
    waiting.add(ticket("long", priority=-10))
    assert waiting.next(0.0, set(), growing) is long  # what has begun comes first


def test_what_is_filled_before_a_suffix_is_paid_for_as_a_whole():
    whole = ticket("a", tokens=64)
    whole.ask = replace(whole.ask, canvas=8, suffix=np.zeros(100, np.int32))
    request = whole.request(263)
    assert whole.cost == len(request.tokens) * 64 == (4 + 64 + 100) * 64
    few = replace(whole.ask, sampling=SamplingConfig(steps=8))
    assert replace(whole, ask=few).cost == 168 * 8


def test_priorities_order_a_tenants_own_requests_only():
    waiting = Waiting(1000, 10.0)
    for name, priority in (("a", 0), ("a", -5), ("b", 10), ("a", 3)):
        waiting.add(ticket(name, priority=priority))
    order = [serve(waiting) for _ in range(4)]
    assert [t.ask.priority for t in order if t.tenant.name == "a"] == [-5, 0, 3]
    assert order.index(next(t for t in order if t.tenant.name == "b")) <= 1


def test_waiting_outweighs_priority():
    waiting = Waiting(1000, 10.0)
    old = ticket("a", arrived=0.0, priority=10)
    waiting.add(old)
    for second in range(500):
        waiting.add(ticket("a", arrived=float(second), priority=-10))
        if serve(waiting, float(second)) is old:
            break
    assert second == 200  # 20 levels of 10 seconds


def test_a_tenant_that_is_passed_over_keeps_its_place():
    waiting = Waiting(2, 10.0)
    waiting.add(ticket("a"))
    waiting.add(ticket("b"))
    assert waiting.next(0.0, {"a"}).tenant.name == "b"
    assert waiting.next(0.0, {"a", "b"}) is None
    assert (waiting.room("a"), waiting.room("c")) == (1, 2)
    assert serve(waiting).tenant.name == "a"


def test_a_quantum_ends_in_time_once_its_shape_is_known():
    quantum = Quantum(0.25, 16)
    assert 1 <= quantum.steps("new") <= 16
    quantum.learn("new", 4, 40.0)  # it was compiled
    assert quantum.steps("new") == 1
    quantum.learn("new", 1, 0.05)
    assert quantum.steps("new") == 5
    assert quantum.steps("new", watched=True) == 2
    quantum.learn("fast", 4, 0.004)
    assert quantum.steps("fast") == 16
    # Who looks at each step does not take the others' time by many short calls.
    assert quantum.steps("fast", watched=True) == 16
    assert quantum.steps("other", watched=True) == 2
    quantum.learn("slow", 1, 3.0)
    assert quantum.steps("slow") == 1
    assert quantum.steps("slow", watched=True) == 2
