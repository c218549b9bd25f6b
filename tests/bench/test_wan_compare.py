# SPDX-License-Identifier: Apache-2.0
"""Figures of benchmarks/wan: bytes, calibration, comparisons in pairs, throttling."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.wan.calibrate import Aim, Calibration, calibrate, link_seconds
from benchmarks.wan.compare import (
    METHODS,
    against,
    planned,
    require_whole,
    table,
    verdicts,
)
from benchmarks.wan.network import FRAME_BYTES, HEADER_BYTES, Counters
from benchmarks.wan.predict import Rounds, furthest, measured, predict, prediction_table
from benchmarks.wan.preset import LAB_METHODS, OVERLAP, method, quotas
from benchmarks.wan.throttle import idle_by_round, lines, verdict
from benchmarks.wan.traffic import framing_bytes, traffic_report
from benchmarks.wan.world import Weather, make_world
from geojax.config import ConfigError
from geojax.meshes.wan import get_wan
from geojax.track.summary import Run, Summary

AIM = Aim("geomesh-azure-no-latency", (2.57, 1.0), 1.6, (0, 3), 0.658, 2.0)


def test_traffic_is_divided_into_exchange_and_coordinator_and_adds_up():
    """Two slices send each other 10,000 bytes in 10 packets, and the coordinator 100 in one, which
    says 50 back to each."""
    slices = [("east", "eastus"), ("korea", "koreacentral")]
    world = make_world(get_wan(AIM.wan), slices, "eastus", Weather())
    zero = {i: Counters(dict.fromkeys(range(3), 0), 0, 0, 0, 0) for i in range(3)}
    after = {
        0: Counters({1: 50 + 66, 2: 50 + 66}, 2 * (100 + 52), 2 * (50 + 52), 2, 2),
        1: Counters({0: 166, 2: 10_660}, 10_520 + 102, 10_520 + 152, 11, 11),
        2: Counters({0: 166, 1: 10_660}, 10_520 + 102, 10_520 + 152, 11, 11),
    }
    records = [
        {"kind": "slice", "round": n, "peer_bytes": size}
        for n, size in ((1, 7), (2, 9_000), (2, 9_500))
    ]
    report = traffic_report(world, zero, after, {}, records, first_round=1)
    assert report.reported_bytes == 18_500
    assert report.exchange_payload_bytes == 20_000
    assert report.control_payload_bytes == 300
    assert report.exchange_interface_bytes == 21_320
    assert report.control_interface_bytes == 2 * 166 + 2 * 116
    assert report.payload_excess == pytest.approx(20_000 / 18_500 - 1)
    with_proxies = traffic_report(
        world,
        zero,
        after,
        {
            "coordinator": {"east": {"forward_bytes": 0, "back_bytes": 0}},
            "east": {
                "coordinator": {"forward_bytes": 100, "back_bytes": 50},
                "korea": {"forward_bytes": 10_000, "back_bytes": 3},
            },
        },
        records,
        first_round=1,
    )
    assert with_proxies.exchange_payload_bytes == 10_003
    assert with_proxies.control_payload_bytes == 150


def test_framing_is_headers_of_full_segments_and_of_acknowledgements():
    header = FRAME_BYTES + HEADER_BYTES
    assert framing_bytes(0) == 0
    assert framing_bytes(1) == 2 * header
    assert framing_bytes(2 * 1448) == 3 * header
    assert framing_bytes(1_448_000) / 1_448_000 == pytest.approx(1.5 * 66 / 1448)


OUTER = 0.3


def made_up_run(rounds, slices=("h100", "rtx-6000-ada"), payload=533_792) -> Run:
    """Rounds of (seconds, compute of each slice)."""
    records, seconds = [], 0.0
    for number, (whole, _) in enumerate(rounds, 1):
        seconds += whole
        records.append({"round": number, "round_seconds": whole, "seconds": seconds})
    parts = [
        {
            "round": number,
            "slice": name,
            "compute_seconds": own,
            "straggler_seconds": max(compute) - own,
            "wan_seconds": whole - max(compute) - OUTER,
            "outer_seconds": OUTER,
            "sent_bytes": payload,
        }
        for number, (whole, compute) in enumerate(rounds, 1)
        for name, own in zip(slices, compute, strict=True)
    ]
    start = {"payload_bytes": payload}
    return Run("x", Path("x"), start, tuple(parts), tuple(records), (), None)


def test_calibration_gives_rounds_of_the_length_and_share_that_are_asked_for():
    config = method("diloco", slices=AIM.slices)
    cores = quotas(config, AIM.shares, AIM.cores)
    run = made_up_run([(9.0, (5.0, 8.0)), (0.8, (0.2, 0.5)), (0.8, (0.2, 0.5))])
    found = calibrate(AIM, config, cores, run, 30.0)
    assert found.compute_seconds == pytest.approx(2.0)
    assert found.cores == pytest.approx({name: c / 4 for name, c in cores.items()})
    wan = get_wan(AIM.wan)
    link = link_seconds(config, wan, 533_792) / found.rate_scale
    exchange = found.fixed_seconds + link
    assert exchange / (exchange + found.compute_seconds) == pytest.approx(0.658)
    said = predict(found, config)
    assert said.seconds == pytest.approx(174 * (exchange + 2.0), rel=0.01)
    # Equal work, at speeds 2.57 and 1: the fast slice waits for what the slow one still does.
    assert said.wan_idle == pytest.approx(0.658 - OUTER / (exchange + 2.0))
    assert said.straggler_idle == pytest.approx((1 - 1 / 2.57) * (1 - 0.658))
    assert said.sent_bytes == 2 * 533_792
    slow = made_up_run([(9.0, (5.0, 8.0)), (6.3, (3.0, 6.0))])
    assert calibrate(AIM, config, cores, slow, 30.0).cores == pytest.approx(cores)
    with pytest.raises(ConfigError, match="raise --round-seconds"):
        calibrate(AIM, config, cores, made_up_run([(9, (1, 1)), (9, (1, 1))]), 30.0)


def test_runs_that_lost_a_slice_for_a_round_are_not_compared():
    run = made_up_run([(30.0, (1, 2)), (4.0, (1, 2)), (9.0, (1, 2))])
    require_whole(run)
    with pytest.raises(ConfigError, match="left out of 1 rounds"):
        require_whole(replace(run, slices=run.slices[:-1]))


def test_differences_are_taken_seed_by_seed():
    def runs(hours):
        base = Summary("m", 0, "measured", 1.0, 20.0, 19.0, 2.0, 100, 0.2, 0.6, 1, 1, 1, 50)
        return [replace(base, hours_to_target=h) for h in hours]

    row = against(runs([0.5, 1.0]), runs([1.0, 2.0]))
    assert row["time_saved"] == {"mean": 0.5, "deviation": 0.0}  # though hours vary twofold
    assert against(runs([0.5, None]), runs([1.0, 2.0]))["time_saved"] is None
    shown = Console(width=120, file=io.StringIO())
    shown.print(table({"m": row, "each step": {}}))
    assert "50.0±0.0%" in shown.file.getvalue()


def test_what_was_asked_is_said_beside_what_came():
    def row(saved, straggler, wan):
        means = {"time_saved": saved, "straggler_idle": straggler, "wan_idle": wan}
        return {k: v if v is None else {"mean": v, "deviation": 0.1} for k, v in means.items()}

    rows = {"diloco": row(0.0, 0.4, 0.6), "geomesh": row(0.7, 0.05, 0.12)}
    assert verdicts(rows) == [
        "geomesh, time to target below diloco's (asked: 70% or more): 70.00%, met",
        "geomesh, straggler idle below diloco's (asked: 8.0x or more): 8.0x, met",
        "geomesh, wan idle below diloco's (asked: 5.6x or more): 5.0x, NOT met",
    ]
    nothing = {"diloco": row(0.0, 0.0, 0.6), "geomesh": row(0.6996, 0.0, 0.1)}
    assert verdicts(nothing)[:2] == [
        "geomesh, time to target below diloco's (asked: 70% or more): 69.96%, NOT met",
        "geomesh, straggler idle below diloco's (asked: 8.0x or more): none in either",
    ]
    rows |= {"geomesh": row(None, 0.0, 0.1), "geomesh-overlap": row(0.8, 0.0, 0.02)}
    found = [line.rpartition(", ")[2] for line in verdicts(rows)]
    assert found == ["NOT met", "met", "met", "NOT met"]
    assert verdicts({"diloco": rows["diloco"]}) == []


def test_idle_after_a_change_is_judged_from_the_second_round_that_shows_it_on():
    slow = [0.01] * 3 + [0.5] * 2
    idle = {"replan": [*slow, 0.04, 0.02, 0.3], "no-replan": [0.01] * 3 + [0.5] * 5}
    assert verdict(idle, 3) == (
        "straggler idle in round 6, and median from it on (asked: under 5%): 4.0%, 4.0%, met; "
        "without new plans 50.0%"
    )
    late = idle | {"replan": [*slow, 0.5, 0.01, 0.01, 0.01]}
    assert "50.0%, 1.0%, NOT met" in verdict(late, 3)
    assert "5.0%, 5.0%, NOT met" in verdict(idle | {"replan": [*slow, 0.05]}, 3)
    assert "use more --rounds" in verdict(idle | {"replan": slow}, 3)


def test_straggler_idle_of_a_round_is_that_of_the_slice_that_waits_longest():
    run = made_up_run([(4.0, (1.0, 1.0)), (4.0, (1.0, 3.0))])
    assert idle_by_round(run) == pytest.approx([0.0, 0.5])
    idle = {"replan": [0.01, 0.5], "no-replan": [0.02]}
    one, two = lines(idle, {"replan": [1], "no-replan": []})
    assert one.split() == ["round", "1:", "replan", "1.0%", "no-replan", "2.0%"]
    assert two.endswith("replan  50.0% (new plan)  no-replan      -")


def test_every_method_is_ready_before_anything_runs():
    configs = planned(AIM, tuple(LAB_METHODS), True, False)
    assert set(configs) == set(LAB_METHODS)
    for config in configs.values():
        assert config.exchange.engine == "grpc"
        assert config.exchange.resolve_schedule(2) == "gather"
    overlapped = configs["geomesh-overlap"]
    assert "geomesh-overlap" in METHODS
    assert overlapped.exchange.overlap == OVERLAP
    assert (
        replace(overlapped, name="geomesh", exchange=configs["geomesh"].exchange)
        == (configs["geomesh"])
    )
    for wrong, says in (
        (replace(AIM, wan="bad"), "no WAN named 'bad'"),
        (replace(AIM, cores=0.2), "slice rtx-6000-ada: a quota of 0.056 cores"),
    ):
        with pytest.raises(ConfigError, match=says):
            planned(wrong, ("diloco",), False, False)
    with pytest.raises(ConfigError, match="no method 'sgd'; use some of geomesh"):
        planned(AIM, ("diloco", "sgd"), False, False)


def test_an_exchange_beside_the_next_steps_takes_less_time():
    found = Calibration(AIM, {}, 1e-3, 2.0, 0.1, 0.0, 30.0)
    waits, goes_on = (predict(found, method(n, slices=AIM.slices)) for n in METHODS[-2:])
    rounds = round(waits.seconds / waits.round_seconds)
    exchange = waits.wan_idle * waits.round_seconds
    # Two of the slow slice's ten steps, 0.4 s, hide it; four of the fast one's 26, 0.31 s, nearly.
    assert 0.31 < exchange < 0.4
    saved = (waits.seconds - goes_on.seconds) / (rounds - 1)
    assert saved == pytest.approx(4 * 0.2 / 2.57, rel=0.03)
    assert goes_on.wan_idle < 0.03 < waits.wan_idle


def test_predictions_stand_beside_what_was_measured():
    run = made_up_run([(10.0, (2.0, 4.0)), (10.0, (4.0, 6.0))])
    found = measured(run)
    assert (found.seconds, found.round_seconds) == (20.0, 10.0)
    assert found.sent_bytes == 2 * 533_792
    said = Rounds(22.0, 11.0, found.straggler_idle, found.wan_idle - 0.02, found.sent_bytes)
    assert furthest(said, found) == pytest.approx(0.1)
    shown = Console(width=120, file=io.StringIO())
    shown.print(prediction_table({"diloco": (said, found)}))
    assert "11.00 / 10.00 s" in shown.file.getvalue()
    assert "10.0%" in shown.file.getvalue()


def test_a_calibration_that_cannot_be_read_is_named(tmp_path):
    from benchmarks.wan.calibrate import calibrated

    (tmp_path / "calibration.json").write_text('{"aim": 3}')
    with pytest.raises(ConfigError, match=r"calibration.json is no calibration"):
        calibrated(AIM, tmp_path, Console(file=io.StringIO()))
