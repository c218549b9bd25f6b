# SPDX-License-Identifier: Apache-2.0
"""Records of slices become one run's: whole rounds, once, whoever dies meanwhile."""

import pytest

from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.ledger import Ledger
from geojax.track.metrics import MetricsWriter, read_records
from geojax.track.summary import PARTS

NAMES = ("a", "b", "c")


def history_of(rounds: int, merged=(0, 1, 2)) -> History:
    history = History()
    history.add({"kind": "start", "members": [0, 1, 2], "facts": {}})
    for number in range(1, rounds + 1):
        entry = {
            "kind": "round",
            "round": number,
            "merged": list(merged),
            "members": [0, 1, 2],
            "versions": {},
        }
        history.add(entry)
    return history


def part(number: int, compute: float, outer: float = 0.5, whole: float = 9.0, ahead=0.0) -> dict:
    return {
        "kind": "slice",
        "epoch": 0,
        "round": number,
        "slice": {"slice": "x", "merged": True, "tokens": 10, "loss": 1.0, "steps": 2},
        "line": {"tokens": 30 * number, "hash": f"h{number}"},
        "seconds": {"rest": compute, "ahead": ahead, "outer": outer, "sending": 1.0},
        "waited_seconds": whole - compute - outer,
    }


@pytest.fixture
def place(tmp_path):
    return tmp_path / "metrics.jsonl"


def kinds(path):
    return [(r["kind"], r.get("round")) for r in read_records(path)]


def test_parts_sum_to_the_round_whatever_order_they_come_in(place):
    with MetricsWriter(place) as writer:
        ledger, history = Ledger(writer, place, NAMES), history_of(2)
        for number, index in ((2, 1), (1, 2), (1, 0), (2, 0), (1, 1), (1, 1), (2, 2)):
            ledger.take(index, part(number, 1.0 + index, whole=5.0 + index), history)
            ledger.write(history)
    assert kinds(place) == [
        ("slice", n) if i < 3 else ("round", n) for n in (1, 2) for i in range(4)
    ]
    records = read_records(place)
    for record in (r for r in records if r["kind"] == "slice"):
        assert sum(record[f"{p}_seconds"] for p in PARTS) == pytest.approx(7.0)
    assert [r["seconds"] for r in records if r["kind"] == "round"] == [7.0, 14.0]


def test_a_slice_that_died_is_not_waited_for_for_ever(place):
    with MetricsWriter(place) as writer:
        ledger, history = Ledger(writer, place, NAMES), history_of(1)
        for index in (0, 1):
            ledger.take(index, part(1, 1.0), history)
        ledger.write(history)
        assert ledger.round == 0
        history = history_of(3)
        ledger.write(history)
        assert ledger.round == 1
        ledger.write(history, patience_rounds=0)  # all were killed before they could tell
        assert ledger.round == 3
        ledger.take(0, part(4, 1.0), history_of(4))
        ledger.write(history_of(4), patience_rounds=0)
    rounds = [r for r in read_records(place) if r["kind"] == "round"]
    assert [r.get("lost", False) for r in rounds] == [False, True, True, False]
    assert [r["seconds"] for r in rounds] == [9.0, 9.0, 9.0, 18.0]


def test_a_coordinator_that_dies_while_it_writes_loses_and_repeats_nothing(place):
    history = history_of(2)
    with MetricsWriter(place) as writer:
        ledger = Ledger(writer, place, NAMES)
        ledger.take(0, {"kind": "start", "epoch": 0, "round": 0, "seed": 1}, history)
        for number in (1, 2):
            for index in range(3):
                ledger.take(index, part(number, 1.0, ahead=10.0), history)
        ledger.write(history)
    whole = place.read_bytes()
    # What the first round left of its steps ahead is in the second, whoever goes on with it.
    assert [r["round_seconds"] for r in read_records(place) if r["kind"] == "round"] == [9.0, 11.5]
    lines = whole.splitlines(keepends=True)
    for cut in range(len(lines) + 1):
        place.write_bytes(b"".join(lines[:cut]))
        with MetricsWriter(place) as writer:
            ledger = Ledger(writer, place, NAMES)
            ledger.take(0, {"kind": "start", "epoch": 0, "round": 0, "seed": 1}, history)
            for number in (1, 2):
                for index in range(3):
                    ledger.take(index, part(number, 1.0, ahead=10.0), history)
            ledger.write(history)
        assert place.read_bytes() == whole, cut


def test_a_slice_that_begins_later_than_others_makes_nobody_wait_for_the_wan(place):
    """Slices 0 and 1 evaluate for less long than slice 2 does, and wait for it."""
    with MetricsWriter(place) as writer:
        ledger, history = Ledger(writer, place, NAMES), history_of(1)
        for index, (compute, waited) in enumerate(((2.0, 30.2), (1.0, 31.2), (2.0, 1.2))):
            mine = part(1, compute) | {"waited_seconds": waited}
            ledger.take(index, mine, history)
        ledger.write(history)
    *slices, line = read_records(place)
    assert [r["wan_seconds"] for r in slices] == pytest.approx([1.2] * 3)
    assert [r["straggler_seconds"] for r in slices] == pytest.approx([0, 1, 0])
    assert line["round_seconds"] == pytest.approx(2.0 + 0.5 + 1.2)


def test_what_a_rollback_undid_is_forgotten_and_counted_anew(place):
    with MetricsWriter(place) as writer:
        ledger, history = Ledger(writer, place, NAMES), history_of(3)
        for number in (1, 2, 3):
            for index in range(3):
                ledger.take(index, part(number, 1.0), history)
        switch = {"kind": "switch", "epoch": 0, "round": 2, "switch_seconds": 2.0}
        ledger.take(1, switch, history)
        ledger.write(history)
        history.add({"kind": "rollback", "round": 1, "members": [0, 1, 2], "versions": {}})
        ledger.follow(history)
        assert kinds(place)[-1] == ("round", 1)
        ledger.take(0, part(2, 1.0), history)  # of the round that was undone
        history.add(
            {"kind": "round", "round": 2, "merged": [0], "members": [0, 1, 2], "versions": {}}
        )
        ledger.write(history)
        assert ledger.round == 1
        ledger.take(0, part(2, 1.0) | {"epoch": 1}, history)
        ledger.write(history)
        ledger.end("all tokens seen")
    records = read_records(place)
    assert records[-1] == {
        "kind": "end",
        "round": 2,
        "tokens": 60,
        "seconds": 18.0,
        "reason": "all tokens seen",
    }
