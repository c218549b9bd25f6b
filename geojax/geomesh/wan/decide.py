# SPDX-License-Identifier: Apache-2.0
"""What the coordinator decides next: a pure function of time, history and what slices last said.

A round is over when every member that is still awaited has every message, and more than `quorum`
of all configured slices have reported. A dead member is awaited until its lease ends, a living one
until it takes longer than slices take (median + k x MAD of past report times, as multiples of what
the plan expected), and one that is busy until it takes longer than the slowest one does, and one
that starts with all the others for `join_seconds`. A
message is awaited, from its sender's report on, until it takes longer than the slowest one of a
round does (median + k x MAD over past rounds). A slice that was left out comes back when it says
that it holds the state again.

Invariant: of any two decisions that a journal or two could hold, each had a majority of all
configured slices behind it, and a merged message, in the version that the journal names, lies with
a majority, so that a later majority can fetch it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from geojax.config import GrpcConfig
from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.journal import Entry

_REMEMBERED_ROUNDS = 32
_REMEMBERED_LONGEST = 8  # rounds; fewer, for links change and are not planned for
_SEARCHED_ROUNDS = 256  # for these
_MAD_OF_NORMAL = 1.4826  # standard deviations in one MAD
_LEAST_MAD = 0.1  # of the median: times that never vary do not make a deadline of no length

# Since the coordinator began: a slice that lives says something within a lease, once it is
# connected again, which it tries every few seconds.
_UNHEARD_LEASES, _UNHEARD_SECONDS = 2, 10.0

LOOKING = ("starting", "syncing")


@dataclass
class Status:
    """What a slice last said of itself."""

    slice: int
    incarnation: str
    """Of its process."""
    phase: str
    """starting; syncing: looks for the newest state; standby: holds it, and has begun no round;
    working; waiting: its inner steps are done; busy: evaluates, or compiles for another
    plan; done; gone: done, and has heard that all are; stopping."""
    epoch: int = 0
    border: int = 0
    """Of the state that it holds, or could restore or make."""
    digest: str = ""
    """Of that state."""
    sent: str = ""
    """waiting: the version of its message."""
    received: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Versions of messages of the next round that it has, by slice, itself among them."""
    refused: tuple[int, ...] = ()
    """Slices whose message of the next round it got and could not take: nothing better comes."""
    arrived: dict[tuple[int, str], float] = field(default_factory=dict)
    """When it first said so, by slice and version."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For everybody, through the journal."""
    address: str = ""
    """Where peers reach it."""
    seen: float = 0.0
    """When it last said anything."""
    since: float = 0.0
    """When this phase began."""
    worked: float = 0.0
    """When its inner steps last began."""
    busied: float = 0.0
    """Seconds that it was busy since the round was opened, if it has ended that."""
    looked: float = 0.0
    """starting, syncing: since when it looks for a state."""
    restarted: bool = False
    """Whether another process was this slice while the coordinator ran."""


def decide(
    now: float,
    began: float,
    opened: float,
    history: History,
    statuses: Mapping[int, Status],
    slices: int,
    rules: GrpcConfig,
) -> Entry | None:
    """The next entry, or None while there is something to wait for.

    `began`: when this coordinator did; `opened`: the round; `slices`: configured.
    """
    if history.stopped is not None:
        return None
    alive = {i: s for i, s in statuses.items() if is_alive(s, now, rules)}
    if history.start is None:
        return _start(alive, slices)
    away = [s for s in alive.values() if s.phase != "done"]
    if not away:
        return None
    back = _rollback(now, history, alive, slices, rules)
    if back is not None:
        return back
    return _close(now, began, opened, history, statuses, alive, slices, rules)


def is_alive(status: Status, now: float, rules: GrpcConfig) -> bool:
    return status.phase not in ("stopping", "gone") and now - status.seen <= rules.lease_seconds


def enough(votes: int, slices: int, rules: GrpcConfig) -> bool:
    """Whether so many of all configured slices are a quorum."""
    return votes > rules.quorum * slices


def limit_seconds(times: Sequence[float], rules: GrpcConfig) -> float:
    """When a slice is late, given what others took; infinite where nothing is known."""
    if not times:
        return float("inf")
    middle = median(times)
    spread = max(median(abs(t - middle) for t in times), _LEAST_MAD * middle)
    return middle + max(rules.deadline_mads * _MAD_OF_NORMAL * spread, rules.deadline_floor_seconds)


def patience_seconds(kind: str, history: History, rules: GrpcConfig) -> float:
    """For what takes some slices longer than others, whatever the plan: one figure a round, of the
    slice that took longest, tells how long; so the slowest is not late by being the slowest.
    `join_seconds` where nothing is known; as much again for each recent round in which somebody was
    late, so that a slice whose link has become slower is not left out for ever."""
    recent = [
        (entry.get("longest", {}).get(kind), kind in entry.get("late", ()))
        for entry in history.rounds[-_SEARCHED_ROUNDS:]
    ]
    known = [seconds for seconds, _ in recent if seconds is not None][-_REMEMBERED_LONGEST:]
    told = [late for seconds, late in recent if late or seconds is not None]
    limit = limit_seconds(known, rules) if known else rules.join_seconds
    return limit * (1 + sum(told[-_REMEMBERED_LONGEST:]))


def _start(alive: Mapping[int, Status], slices: int) -> Entry | None:
    if len(alive) < slices:
        return None
    ahead = [i for i, s in alive.items() if s.border]
    if ahead:
        return {
            "kind": "stop",
            "reason": f"the coordinator's journal is empty, and slices {ahead} have trained "
            "already; put the journal back that they trained with, or start a new run",
        }
    if not all(s.phase == "standby" for s in alive.values()):
        return None
    return {
        "kind": "start",
        "members": sorted(alive),
        "facts": {str(i): s.facts for i, s in sorted(alive.items())},
    }


def _rollback(
    now: float,
    history: History,
    alive: Mapping[int, Status],
    slices: int,
    rules: GrpcConfig,
) -> Entry | None:
    """To the newest border whose state anybody holds, where the newest of all is lost."""
    holders = [s for s in alive.values() if history.holds(s.epoch, s.border)]
    held = [s.border for s in holders]
    if history.round in held or not enough(len(held), slices, rules):
        return None
    if any(s.phase not in LOOKING for s in alive.values()):
        return None  # it may have the messages that lead there
    looking = sorted(s.looked for s in holders)
    quorum = next(t for n, t in enumerate(looking, 1) if enough(n, slices, rules))
    if len(alive) < slices and now - quorum <= rules.join_seconds:
        return None  # one that is not here may hold a newer state
    return {"kind": "rollback", "round": max(held), "members": sorted(alive)}


def _close(
    now: float,
    began: float,
    opened: float,
    history: History,
    statuses: Mapping[int, Status],
    alive: Mapping[int, Status],
    slices: int,
    rules: GrpcConfig,
) -> Entry | None:
    members = history.members
    here = [alive[i] for i in members if i in alive and at_border(alive[i], history)]
    reported = {s.slice: s for s in here if s.phase == "waiting" and s.epoch == history.epoch}
    took = {i: s.since - max(opened, s.worked) for i, s in reported.items()}
    on_time = opened > began  # a round that was open when this coordinator began has no times
    of_many = on_time and enough(len(reported), slices, rules)  # few may be fast ones
    before = history.rounds[-1]["expected_seconds"] if history.rounds else 1.0
    expected = max(
        (s.facts.get("expected_seconds", 1.0) for s in reported.values()), default=before
    )
    past = [
        seconds / entry["expected_seconds"] * expected
        for entry in history.rounds[-_REMEMBERED_ROUNDS:]
        for seconds in entry["seconds"].values()
    ]
    limit = limit_seconds([*past, *(took.values() if of_many else ())], rules)
    if math.isinf(limit) and enough(len(reported), slices, rules):
        limit = rules.join_seconds  # most are here, and when they began is not known
    delivery = patience_seconds("messages", history, rules)
    busied = [alive[i].busied for i in members if i in alive and alive[i].busied]
    business = rules.join_seconds
    if enough(len(busied), slices, rules):
        as_others = limit_seconds([max(busied)], rules)
        business = max(patience_seconds("busy", history, rules), as_others)

    def awaited(i: int) -> bool:
        status = statuses.get(i)
        if status is None:  # not heard of since the coordinator began
            return now - began <= _UNHEARD_LEASES * rules.lease_seconds + _UNHEARD_SECONDS
        if i not in alive or status.phase == "done":
            return False
        if i in reported:
            missing = [s for s in reported.values() if not _has(status, s)]
            under_way = [s for s in missing if s.slice not in status.refused]
            return any(now - s.since <= delivery for s in under_way)
        if status.phase == "busy":
            return now - status.since <= business
        if status.restarted:
            return now - opened <= limit
        if status.phase == "starting":
            return now - max(opened, status.since) <= rules.join_seconds
        return now - max(opened, status.since, status.worked) <= limit

    waiting_for = {i for i in members if awaited(i)}
    if not enough(len(waiting_for | set(reported)), slices, rules):
        return _reopen(history, alive, slices, rules)
    if waiting_for or not enough(len(reported), slices, rules):
        return None
    votes = Counter(s.digest for s in reported.values())
    digest, count = votes.most_common(1)[0]
    if not enough(count, slices, rules):
        return {"kind": "stop", "reason": _differ(history.round, reported)}
    agreeing = {i: s for i, s in reported.items() if s.digest == digest}
    merged = _available(agreeing, slices, rules)
    if not enough(len(merged), slices, rules):
        return None
    refused = {j for s in reported.values() for j in s.refused}
    late = {
        "messages": bool(set(agreeing) - set(merged) - refused),
        "busy": any(i in alive and alive[i].phase == "busy" for i in members),
    }
    longest = {"messages": _delivery_seconds(reported), "busy": max(busied, default=None)}
    joining = [i for i, s in alive.items() if s.phase == "standby" and at_border(s, history)]
    return {
        "kind": "round",
        "round": history.round + 1,
        "merged": merged,
        "versions": {str(i): reported[i].sent for i in merged},
        "members": sorted({*merged, *joining}),
        "digest": digest,
        "expected_seconds": expected,
        "seconds": {str(i): round(took[i], 3) for i in merged if on_time},
        "longest": {
            kind: round(seconds, 3)
            for kind, seconds in longest.items()
            if seconds is not None and on_time and not late[kind]
        },
        "late": [kind for kind, is_late in late.items() if is_late],
        "facts": {str(i): reported[i].facts for i in merged},
    }


def _reopen(
    history: History, alive: Mapping[int, Status], slices: int, rules: GrpcConfig
) -> Entry | None:
    """The round once more, where its members are too few by now, with whoever has come back."""
    standing = [i for i, s in alive.items() if s.phase != "done" and at_border(s, history)]
    if set(standing) <= set(history.members) or not enough(len(standing), slices, rules):
        return None
    return {"kind": "rollback", "round": history.round, "members": sorted(standing)}


def _delivery_seconds(reported: Mapping[int, Status]) -> float | None:
    """From a slice's report until all had its message, the longest; None where some never came."""
    try:
        return max(
            s.arrived[sender.slice, sender.sent] - sender.since
            for s in reported.values()
            for sender in reported.values()
        )
    except KeyError:
        return None


def _has(status: Status, sender: Status) -> bool:
    """Whether it has the message of `sender`'s process."""
    return sender.sent in status.received.get(sender.slice, ())


def at_border(status: Status, history: History) -> bool:
    """Whether it holds the newest state."""
    return status.border == history.round and history.holds(status.epoch, status.border)


def _differ(border: int, reported: Mapping[int, Status]) -> str:
    return (
        f"after round {border} the shared parameters of slices "
        f"{', '.join(map(str, sorted(reported)))} differ, and no majority shows whose are wrong; "
        "look for memory errors or mixed versions. This run cannot go on; start a new one, from "
        "the weights of a slice that is right if you know one (`geojax convert`, and `init`)"
    )


def _available(reported: Mapping[int, Status], slices: int, rules: GrpcConfig) -> list[int]:
    """Slices whose message a quorum holds, as it was last sent; holders count only while they are
    in the set."""
    kept = set(reported)
    while True:
        holders = {j: sum(_has(reported[i], reported[j]) for i in kept) for j in kept}
        lost = {j for j in kept if not enough(holders[j], slices, rules)}
        if not lost:
            return sorted(kept)
        kept -= lost
