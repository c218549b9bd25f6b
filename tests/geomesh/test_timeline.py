# SPDX-License-Identifier: Apache-2.0
"""Waits where an exchange goes on beside inner steps, by hand and as they must add up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.geomesh.timeline import Part, closing_seconds, round_times

SECONDS = st.floats(0, 10)


def rounds(parts, number, closing=0.0):
    """That many of the same, the first begun with nothing done ahead."""
    late, found = [0.0] * len(parts), []
    for _ in range(number):
        found.append(round_times(parts, late, closing))
        late = found[-1].late
    return found


def test_what_steps_ahead_cover_nobody_waits_for():
    """Two slices: 8 and 6 seconds of steps a round, 3 seconds of exchange. Of the next round's,
    half goes ahead: the slower one does 4 seconds and is a second late; the faster one was done 2
    seconds earlier, does 3, and waits 2 until the slower one's message is there."""
    without = round_times([Part(8, 0, 0, 3), Part(6, 0, 0, 3)], [0, 0], 0.0)
    assert (without.total, without.wan, without.straggler) == (11, 3, [0, 2])
    first = round_times([Part(8, 4, 0, 3), Part(6, 3, 0, 3)], [0, 0], 0.0)
    assert first == (11, [11, 9], [0, 2], 0, [0, 0], [1, 0])
    # From then on: a second of the last round's steps, 4 of the rest, 3 until all have it.
    later = round_times([Part(4, 4, 0, 3), Part(3, 3, 0, 3)], first.late, 0.0)
    assert later == (8, [8, 6], [0, 2], 0, [0, 0], [1, 0])


def test_what_they_do_not_cover_is_wan_wait():
    """Half of 8 seconds beside an exchange of 10: six are left, and with a quarter, eight."""
    assert rounds([Part(4, 4, 0, 10)] * 2, 3)[-1][:4] == (14, [8, 8], [0, 0], 6)
    assert rounds([Part(6, 2, 0, 10)] * 2, 3)[-1][:4] == (16, [8, 8], [0, 0], 8)
    # And with a whole round of lag the exchange is all that there is.
    assert rounds([Part(0, 8, 0, 10)] * 2, 3)[-1][:4] == (10, [8, 8], [0, 0], 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=4),
    st.floats(0, 1),
)
def test_every_second_is_accounted_for_and_no_step_is_lost(rows, closing):
    parts = [Part(*row) for row in rows]
    found = rounds(parts, 4, closing)
    for times in found:
        for compute, straggler, outer in zip(
            times.compute, times.straggler, times.outer, strict=True
        ):
            assert min(compute, straggler, times.wan, outer) >= -1e-9
            assert compute + straggler + times.wan + outer == pytest.approx(times.total)
    for i, part in enumerate(parts):
        steps = 4 * (part.rest + part.ahead)
        assert sum(t.compute[i] for t in found) + found[-1].late[i] == pytest.approx(steps)


def test_waits_do_not_depend_on_when_slices_began():
    """One of two slices evaluates 5 seconds longer, so the other waits for it; both are told of the
    end 0.2 seconds after the last message, the later one's, has come."""
    parts = [Part(4, 0, 0.5, 2), Part(4, 0, 0.5, 3)]
    for later, waited in ((0, [3.2, 3.2]), (5, [8.2, 3.2]), (-5, [2.2, 7.2])):
        closing = closing_seconds(parts, waited)
        assert closing == pytest.approx(0.2), later
        assert round_times(parts, [0, 0], closing).wan == pytest.approx(3.2)
