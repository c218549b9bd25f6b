# SPDX-License-Identifier: Apache-2.0
"""What happens in a HALoS run, and when: events in modelled time, in order.

Slices send the update of their H inner steps to their region's server and go on at once from what
it answers. After some updates, the region sends what they came to to the global server, and takes
in the answer when it comes; meanwhile it goes on with its slices. A region has one such exchange
under way at most. When all samples are allotted, slices end with the update they are at, and
regions send what is left.

Invariant: events depend on times alone and not on parameters, so a run can be resumed, or only
timed, by making them again from the beginning. Ties go by the order in which events were made.
Lines are not shared: two regions' transfers to the global server do not slow each other.

Kim et al. 2025, "HALoS: Hierarchical Asynchronous Local SGD over Slow Networks for Geo-Distributed
Large Language Model Training" (ICML).
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Literal, NamedTuple

from geojax.geomesh.balance import SliceWork


class Event(NamedTuple):
    """One of a run."""

    seconds: float
    kind: Literal["begin", "update", "push", "pull"]
    """begin: a slice begins its inner steps. update: its update is at the region's server and the
    answer goes back. push: a region's updates are at the global server, whose answer goes back.
    pull: the answer is at the region's."""
    who: int
    """Index of the slice, or for push and pull of the region's first slice."""
    samples: range = range(0)
    """begin, update: the global samples of the inner steps."""
    computed: float = 0.0
    """begin: when the inner steps are done."""
    arrives: float = 0.0
    """begin: when the update is at the server; update: when the answer is at the slice."""
    sends: bool = False
    """update: whether the region then sends to the global server."""


def halos_events(
    work: Sequence[SliceWork],
    hubs: Sequence[int],
    updates_per_push: int,
    samples: int,
    end: Callable[[int, float, float], float],
    link: Callable[[int, int, int], float],
) -> Iterator[Event]:
    """Events of a run over `samples` global samples, more where the last updates exceed them.

    `hubs`: for each slice the first slice of its region, where the region's server is; the global
    server is where slice 0 is. `end(slice, begin, seconds)`: when so much compute is done; `link(
    from, to, number)`: seconds of the number-th transfer, between the places of these slices.
    """
    queue: list[tuple[float, int, Event]] = []
    made, transfers = count(), count()
    allotted = 0
    regions = sorted(set(hubs))
    since_pull = dict.fromkeys(regions, 0)
    under_way = dict.fromkeys(regions, False)
    at_work = {hub: list(hubs).count(hub) for hub in regions}

    def put(event: Event) -> None:
        heapq.heappush(queue, (event.seconds, next(made), event))

    def begin(index: int, now: float, first: int) -> None:
        w, hub = work[index], hubs[index]
        computed = end(index, now, w.compute_seconds)
        arrives = computed + link(index, hub, next(transfers))
        steps = range(first, first + w.sequences)
        put(Event(now, "begin", index, steps, computed, arrives))

    def push(hub: int, now: float) -> None:
        under_way[hub] = True
        put(Event(now + link(hub, 0, next(transfers)), "push", hub))

    for index in range(len(work)):
        begin(index, 0.0, allotted)
        allotted += work[index].sequences
    while queue:
        now, _, event = heapq.heappop(queue)
        who = event.who
        if event.kind == "begin":
            put(Event(event.arrives, "update", who, event.samples))
        elif event.kind == "update":
            hub, back = hubs[who], now
            since_pull[hub] += 1
            if allotted < samples:
                back = now + link(hub, who, next(transfers))
                begin(who, back, allotted)
                allotted += work[who].sequences
            else:
                at_work[hub] -= 1
            sends = not under_way[hub] and (since_pull[hub] >= updates_per_push or not at_work[hub])
            event = event._replace(arrives=back, sends=sends)
            if sends:
                push(hub, now)
        elif event.kind == "push":
            put(Event(now + link(0, who, next(transfers)), "pull", who))
        else:
            under_way[who] = False
            since_pull[who] = 0
        yield event
