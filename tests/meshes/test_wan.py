# SPDX-License-Identifier: Apache-2.0
"""Collective times agree with closed forms, and link files load or say what is wrong."""

import math
import re

import pytest

from geojax.meshes.wan import (
    LOCAL_BITS_PER_SECOND,
    LOCAL_RTT_SECONDS,
    WANS,
    Wan,
    get_wan,
    ring_all_reduce_bytes,
    wire_bytes,
)

RATE, RTT = 100e6, 0.08


def uniform_wan(regions: int) -> Wan:
    names = tuple(f"r{i}" for i in range(regions))
    return Wan(names, ((RATE,) * regions,) * regions, ((RTT,) * regions,) * regions)


def write(tmp_path, text: str) -> str:
    path = tmp_path / "links.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_link_is_half_a_round_trip_plus_bits_over_rate():
    # 12.5 MB are 1e8 bits, one second at 100 Mbit/s.
    assert uniform_wan(2).link_seconds("r0", "r1", 12_500_000) == pytest.approx(1.04)


@pytest.mark.parametrize("slices", [1, 2, 3, 8])
def test_equal_links_give_the_closed_forms(slices):
    wan, message = uniform_wan(slices), 8 * 3 * 1000  # divides by every K here
    latency = RTT / 2 if slices > 1 else 0.0
    gather = latency + (slices - 1) * 8 * message / RATE
    two_phase = 2 * (latency + (slices - 1) * 8 * message / slices / RATE)
    assert wan.gather_seconds(wan.regions, message) == pytest.approx(gather)
    assert wan.two_phase_seconds(wan.regions, message) == pytest.approx(two_phase)


def test_the_slice_with_most_to_send_or_receive_ends_a_phase():
    bits = 8 * 1000
    rates = ((1e9, 1e9, 1e9), (1e9, 1e9, 1e6), (1e9, 2e9, 1e9))  # only b -> c is slow
    rtts = ((0.0,) * 3, (0.0,) * 3, (0.1, 0.0, 0.0))  # only c -> a is far
    wan = Wan(("a", "b", "c"), rates, rtts)
    # b sends, and c receives, over the slow link and one fast one.
    expected = bits / 1e6 + bits / 1e9 + 0.05
    assert wan.gather_seconds(wan.regions, 1000) == pytest.approx(expected)


def test_slices_of_one_region_share_a_local_link():
    wan = get_wan("geomesh-azure")
    local = LOCAL_RTT_SECONDS / 2 + 8e9 / LOCAL_BITS_PER_SECOND
    assert wan.gather_seconds(["eastus", "eastus"], 10**9) == pytest.approx(local)


@pytest.mark.parametrize("slices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("message", [0, 1, 1000, 1001])
def test_wire_bytes_of_each_schedule(slices, message):
    assert wire_bytes("gather", slices, message) == (slices - 1) * message
    ring = ring_all_reduce_bytes(slices, message)
    assert wire_bytes("two_phase", slices, message) == ring
    exact = 2 * (slices - 1) * message / slices
    assert exact <= ring < exact + 2 * slices  # a shard is rounded up by less than a byte


def test_packed_signs_beat_a_float32_all_reduce_by_64_over_k_gathered_and_32_in_two_phases():
    params = 32 * 1024
    for slices in (2, 4, 8):
        dense = ring_all_reduce_bytes(slices, 4 * params)
        assert dense / wire_bytes("gather", slices, params // 8) == 64 / slices
        assert dense / wire_bytes("two_phase", slices, params // 8) == 32


def test_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="'ring' is not known; use gather or two_phase"):
        wire_bytes("ring", 2, 8)


def test_geomesh_azure_spreads_the_published_rates_and_slows_with_distance():
    wan = WANS["geomesh-azure"]
    pairs = [(i, j) for i in range(4) for j in range(4) if i < j]
    assert len(wan.regions) == 4
    assert all(wan.bits_per_second[i][j] == wan.bits_per_second[j][i] for i, j in pairs)
    assert all(wan.rtt_seconds[i][j] == wan.rtt_seconds[j][i] for i, j in pairs)
    by_distance = sorted(pairs, key=lambda pair: wan.rtt_seconds[pair[0]][pair[1]])
    rates = [wan.bits_per_second[i][j] for i, j in by_distance]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1]) == (940e6, 580e6)


def test_csv_takes_the_reverse_direction_where_one_is_missing_or_blank(tmp_path):
    text = "src,dst,gbit_per_second,rtt_ms\na,b,1,10\na,c,2,\nc,a,4,30\nb,c,5,40\n"
    wan = get_wan(write(tmp_path, text))
    assert wan.regions == ("a", "b", "c")
    assert wan.link_seconds("b", "a", 0) == pytest.approx(0.005)
    assert wan.link_seconds("a", "c", 250_000_000) == pytest.approx(1 + 0.015)
    assert wan.link_seconds("c", "a", 500_000_000) == pytest.approx(1 + 0.015)


def test_csv_of_64_stream_rates_loads_and_an_unmeasured_round_trip_is_refused_on_use(tmp_path):
    text = "src,dst,gbps_64_streams,rtt_ms\na,b,8,\na,c,8,20\nb,c,8,20\n"
    wan = get_wan(write(tmp_path, text))
    assert math.isnan(wan.rtt_seconds[0][1])
    assert wan.link_seconds("a", "c", 10**9) == pytest.approx(1.01)
    with pytest.raises(ValueError, match=r"a -> b has no rtt_ms .* fill it in"):
        wan.gather_seconds(["a", "b"], 1)


def test_csv_row_from_a_region_to_itself_replaces_the_local_link(tmp_path):
    wan = get_wan(write(tmp_path, "src,dst,gbit_per_second,rtt_ms\na,a,8,2\n"))
    assert wan.gather_seconds(["a", "a"], 10**9) == pytest.approx(1.001)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns [] must include"),
        ("src,dst,gbit,rtt_ms\na,b,1,1\n", "must include src, dst, gbit_per_second"),
        ("src,dst,gbit_per_second,rtt_ms\n", "no links"),
        ("src,dst,gbit_per_second,rtt_ms\na,b,fast,1\n", "line 2: gbit_per_second 'fast' must be"),
        ("src,dst,gbit_per_second,rtt_ms\na,b,nan,1\n", "line 2: gbit_per_second 'nan' must be"),
        ("src,dst,gbit_per_second,rtt_ms\na,b,,1\n", "line 2: gbit_per_second '' must be given"),
        ("src,dst,gbit_per_second,rtt_ms\na,b,0,1\n", "line 2: gbit_per_second '0' must be given"),
        ("src,dst,gbit_per_second,rtt_ms\na,b,1,-1\n", "line 2: rtt_ms '-1' must be at least 0"),
        ("src,dst,gbit_per_second,rtt_ms\na\n", "line 2: src 'a' and dst '' must both"),
        ("src,dst,gbit_per_second,rtt_ms\na,b,1,1\na,b,1,1\n", "line 3: a -> b stands twice"),
        ("src,dst,gbit_per_second,rtt_ms\na,b,1,1\na,c,1,1\n", "no link between b and c; add"),
    ],
)
def test_malformed_csv_names_the_place_and_the_fix(tmp_path, text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        get_wan(write(tmp_path, text))
    assert "links.csv" in str(caught.value)


def test_unknown_names_give_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'geomesh-azure'"):
        get_wan("geomesh-azur")
    with pytest.raises(ValueError, match="did you mean 'westeurope'"):
        get_wan("geomesh-azure").link_seconds("eastus", "westeurop", 1)
    with pytest.raises(ValueError, match="cannot be read"):
        get_wan("nowhere/links.csv")
