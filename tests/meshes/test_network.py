# SPDX-License-Identifier: Apache-2.0
"""Slices on a WAN: the patterns agree with closed forms, and links with what TCP makes of them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from geojax.meshes.azure import azure_links
from geojax.meshes.network import PATTERNS, Network
from geojax.meshes.tcp import SEGMENT_BYTES
from geojax.meshes.wan import (
    LOCAL_BITS_PER_SECOND,
    LOCAL_RTT_SECONDS,
    WANS,
    Wan,
    get_wan,
    wire_bytes,
)

MESSAGE = 1_000_000
REGIONS = get_wan("geomesh-azure").regions


def network(wan: str, slices: int, **settings) -> Network:
    return Network(get_wan(wan), tuple(REGIONS[i % 4] for i in range(slices)), **settings)


@pytest.mark.parametrize("wan", [name for name in WANS if name.startswith("geomesh")])
@pytest.mark.parametrize("slices", [2, 3, 4])
def test_one_slice_a_region_takes_what_the_wan_says(wan, slices):
    placed = network(wan, slices)
    gather, two_phase = (placed.exchange(p, MESSAGE) for p in ("gather", "two_phase"))
    assert gather.seconds == pytest.approx(
        get_wan(wan).gather_seconds(placed.regions, MESSAGE), rel=1e-12
    )
    assert two_phase.seconds == pytest.approx(
        get_wan(wan).two_phase_seconds(placed.regions, MESSAGE), rel=1e-12
    )
    for pattern, took in (("gather", gather), ("two_phase", two_phase)):
        assert set(took.sent_bytes) == {wire_bytes(pattern, slices, MESSAGE)}
        assert list(took.wan_bytes) == list(took.sent_bytes)
    # A hub of one slice has nobody to collect from.
    hub = placed.exchange("hub", MESSAGE)
    assert hub.seconds == pytest.approx(min(gather.seconds, two_phase.seconds), rel=1e-12)


def test_a_hub_collects_exchanges_and_spreads():
    wan = Wan(
        ("a", "b"),
        ((LOCAL_BITS_PER_SECOND, 1e8), (1e8, LOCAL_BITS_PER_SECOND)),
        ((LOCAL_RTT_SECONDS, 0.1), (0.1, LOCAL_RTT_SECONDS)),
        shared=True,
    )
    took = Network(wan, ("a", "b", "a", "a")).exchange("hub", MESSAGE)
    local = 8 * MESSAGE / LOCAL_BITS_PER_SECOND
    collect = LOCAL_RTT_SECONDS / 2 + 2 * local
    between = 0.05 + 8 * MESSAGE / 1e8  # a gather of two: one phase is faster than two
    spread = LOCAL_RTT_SECONDS / 2 + 2 * 2 * local  # two messages to each of two slices
    assert took.seconds == pytest.approx(collect + between + spread, rel=1e-12)
    assert list(took.sent_bytes) == [5 * MESSAGE, MESSAGE, MESSAGE, MESSAGE]
    assert list(took.wan_bytes) == [MESSAGE, MESSAGE, 0, 0]


def test_slices_of_a_region_share_its_line_where_the_wan_says_so():
    shared = network("geomesh-azure-no-latency", 8)
    own = replace(shared, wan=replace(shared.wan, shared=False))
    # Each region has twice the bytes of one slice, which go over one line or over two.
    ratio = (
        shared.exchange("two_phase", MESSAGE).seconds / own.exchange("two_phase", MESSAGE).seconds
    )
    assert ratio == pytest.approx(2, rel=0.02)  # one message of seven stays in the region
    assert shared.fastest(MESSAGE) == "hub"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_jitter_is_seeded_by_round_and_only_adds(pattern):
    quiet = network("azure-many", 8)
    noisy = [network("azure-many", 8, jitter_seconds=0.02, seed=s) for s in (0, 0, 1)]
    times = [n.exchange(pattern, MESSAGE, 3).seconds for n in noisy]
    assert times[0] == times[1] != times[2]
    assert noisy[0].exchange(pattern, MESSAGE, 4).seconds != times[0]
    assert min(times) > quiet.exchange(pattern, MESSAGE, 3).seconds
    mean = np.mean([noisy[0].link_seconds(0, 1, 0, (i,)) for i in range(2000)])
    assert mean - quiet.link_seconds(0, 1, 0) == pytest.approx(0.02, rel=0.1)


def test_loss_slows_one_stream_by_the_root_of_its_share_and_many_streams_less():
    pair = (REGIONS[0], REGIONS[3])
    single, many = get_wan("azure-single"), get_wan("azure-many")
    rate = [
        8e9 / (w.link_seconds(*pair, 10**9) - w.link_seconds(*pair, 0))
        for w in (single.under_loss(1e-4), single.under_loss(4e-4), many.under_loss(1e-4))
    ]
    rtt = 2 * single.link_seconds(*pair, 0)
    assert rate[0] == pytest.approx(8 * SEGMENT_BYTES / rtt * math.sqrt(1.5 / 1e-4), rel=1e-6)
    assert rate[0] / rate[1] == pytest.approx(2, rel=1e-6)
    assert rate[2] / rate[0] == pytest.approx(64, rel=1e-6)
    assert many.under_loss(0.0) == many
    local = (pair[0], pair[0])
    assert many.under_loss(0.1).link_seconds(*local, MESSAGE) == many.link_seconds(*local, MESSAGE)
    with pytest.raises(ValueError, match="a share, not a percentage"):
        many.under_loss(2.0)


def test_profiles_of_azure_are_of_the_same_links():
    many, single, constrained = (azure_links(p) for p in ("many", "single", "constrained"))
    assert many.keys() == single.keys() == constrained.keys()
    assert len(many) == 14 * 13 / 2
    for pair, (rate, rtt) in many.items():
        assert 4.7e9 < rate < 27e9
        assert single[pair][0] <= rate
        if not math.isnan(rtt):
            assert single[pair][0] == pytest.approx(min(rate, 190e9 * 1e-3 / rtt))
    rates = [rate for rate, _ in constrained.values()]
    assert (min(rates), max(rates)) == (580e6, 940e6)
    by_rtt = sorted((rtt, -rate) for rate, rtt in constrained.values() if not math.isnan(rtt))
    assert [rate for _, rate in by_rtt] == sorted(rate for _, rate in by_rtt)


def test_a_region_whose_round_trip_is_not_known_is_refused_on_use():
    with pytest.raises(ValueError, match="westus2 -> uksouth has no rtt_ms"):
        get_wan("azure-many").link_seconds("westus2", "uksouth", 1)
