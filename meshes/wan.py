# SPDX-License-Identifier: Apache-2.0
"""Regions, the links between them, and the modelled time of collectives over those links.

Model: a transfer takes half a round trip plus its bits over the link's rate. In a phase of a
collective every slice sends something to every other, one peer after another and without waiting
for arrivals, and receives likewise. The phase ends when the slice with most to send or receive is
through, half of the longest round trip later. Loss slows the streams that a rate is made of
(`Wan.under_loss`); jitter is not modelled here (geojax.meshes.network).

Invariant: every ordered pair of a `Wan`'s regions has a rate; a round-trip time that was not
measured is NaN, and refused on use, never guessed.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import permutations
from typing import Literal

from geojax.meshes.azure import PROFILES, STREAMS, azure_links
from geojax.meshes.tcp import lossy_rate

LOCAL_BITS_PER_SECOND = 100e9
"""Rate between two slices of one region: a 100 Gbit/s network card."""
LOCAL_RTT_SECONDS = 0.5e-3
"""Round trip between two slices of one region: other racks of one site."""


@dataclass(frozen=True)
class Wan:
    """R regions and the directed links between them, row = source, column = destination."""

    regions: tuple[str, ...]
    bits_per_second: tuple[tuple[float, ...], ...]
    """[R, R]; the diagonal joins two slices of one region."""
    rtt_seconds: tuple[tuple[float, ...], ...]
    """[R, R]; NaN where unknown."""
    streams: int = 1
    """TCP streams that a rate between regions is made of."""
    shared: bool = False
    """Whether a rate between regions is of one line that all slices of a region share, and not
    each slice's own. Times below are of one slice a region; geojax.meshes.network counts the
    rest."""

    def under_loss(self, loss: float) -> "Wan":
        """The same links where a share `loss` of the packets between regions is lost.

        ValueError unless it lies in [0, 1).
        """
        if not 0 <= loss < 1:
            raise ValueError(f"loss {loss} must lie in [0, 1); it is a share, not a percentage")
        rates = [
            [
                rate if i == j else lossy_rate(rate, self.rtt_seconds[i][j], loss, self.streams)
                for j, rate in enumerate(row)
            ]
            for i, row in enumerate(self.bits_per_second)
        ]
        return replace(self, bits_per_second=tuple(map(tuple, rates)))

    def link_seconds(self, src: str, dst: str, payload_bytes: int) -> float:
        """Seconds until the last of `payload_bytes`, sent from `src`, is at `dst`.

        ValueError for a region that the WAN lacks or a link without a round-trip time.
        """
        row, column = self._index(src), self._index(dst)
        rtt = self.rtt_seconds[row][column]
        if math.isnan(rtt):
            raise ValueError(
                f"link {src} -> {dst} has no rtt_ms in either direction; fill it in, or use "
                "regions whose round trip was measured"
            )
        return rtt / 2 + 8 * payload_bytes / self._rate(src, dst)

    def gather_seconds(self, regions: Sequence[str], message_bytes: int) -> float:
        """Seconds until each slice, one per entry of `regions`, has the whole message of all."""
        pairs = list(permutations(range(len(regions)), 2))
        latency = max((self.link_seconds(regions[i], regions[j], 0) for i, j in pairs), default=0.0)
        busy = [0.0] * 2 * len(regions)
        for i, j in pairs:
            seconds = 8 * message_bytes / self._rate(regions[i], regions[j])
            busy[2 * i] += seconds
            busy[2 * j + 1] += seconds
        return latency + max(busy)

    def two_phase_seconds(self, regions: Sequence[str], message_bytes: int) -> float:
        """Seconds of a reduce-scatter and an all-gather of `message_bytes`, a K-th at a time.

        Each slice sends as many bytes as in a ring all-reduce: 2 (K-1)/K of the message.
        """
        return 2 * self.gather_seconds(regions, _shard_bytes(len(regions), message_bytes))

    def _rate(self, src: str, dst: str) -> float:
        return self.bits_per_second[self._index(src)][self._index(dst)]

    def _index(self, region: str) -> int:
        if region not in self.regions:
            raise ValueError(f"no region {region!r} in this WAN; {_hint(region, self.regions)}")
        return self.regions.index(region)


def wire_bytes(schedule: Literal["gather", "two_phase"], slices: int, message_bytes: int) -> int:
    """Bytes that one of `slices` slices sends when each contributes `message_bytes`."""
    if schedule == "gather":
        return (slices - 1) * message_bytes
    if schedule == "two_phase":
        return 2 * (slices - 1) * _shard_bytes(slices, message_bytes)
    raise ValueError(f"schedule {schedule!r} is not known; use gather or two_phase")


def ring_all_reduce_bytes(slices: int, message_bytes: int) -> int:
    """Bytes that one slice sends in a ring all-reduce: 2 (K-1) shards of a K-th, rounded up.

    The yardstick for compressed exchanges (Patarasuk and Yuan 2009: no all-reduce sends fewer).
    """
    return wire_bytes("two_phase", slices, message_bytes)


def get_wan(name_or_csv: str) -> Wan:
    """A WAN of `WANS` by name, or the links of a CSV file.

    Columns: src, dst, gbit_per_second (or gbps_64_streams), rtt_ms. A direction that is missing, or
    whose rtt_ms is blank, takes the reverse one's; a row from a region to itself replaces the local
    link. ValueError for an unknown name, or a file that is malformed or lacks a pair.
    """
    if name_or_csv in WANS:
        return WANS[name_or_csv]
    if not name_or_csv.endswith(".csv"):
        raise ValueError(
            f"no WAN named {name_or_csv!r}; {_hint(name_or_csv, WANS)} (files end in .csv)"
        )
    try:
        with open(name_or_csv, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            links = _read_links(reader)
            return from_links(links, 64 if "gbps_64_streams" in (reader.fieldnames or ()) else 1)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"WAN file {name_or_csv!r} cannot be read: {error}; name a CSV file of "
            f"links, or one of {list(WANS)}"
        ) from error
    except ValueError as error:
        raise ValueError(f"WAN file {name_or_csv!r}: {error}") from error


Links = Mapping[tuple[str, str], tuple[float, float]]
"""(src, dst) -> (bits a second, round trip in seconds or NaN)."""


def _read_links(reader: csv.DictReader) -> Links:
    columns = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = columns
    rate = next((c for c in ("gbit_per_second", "gbps_64_streams") if c in columns), None)
    if rate is None or not {"src", "dst", "rtt_ms"} <= set(columns):
        raise ValueError(
            f"columns {columns} must include src, dst, gbit_per_second (or gbps_64_streams), rtt_ms"
        )
    links: dict[tuple[str, str], tuple[float, float]] = {}
    for row in reader:
        where = f"line {reader.line_num}"
        src, dst = ((row[c] or "").strip() for c in ("src", "dst"))
        if not src or not dst:
            raise ValueError(f"{where}: src {src!r} and dst {dst!r} must both name a region")
        if (src, dst) in links:
            raise ValueError(f"{where}: {src} -> {dst} stands twice; remove one")
        gbit, rtt_ms = (_number(row[c], f"{where}: {c}") for c in (rate, "rtt_ms"))
        if not gbit > 0:
            raise ValueError(f"{where}: {rate} {row[rate]!r} must be given, above 0")
        if rtt_ms < 0:
            raise ValueError(f"{where}: rtt_ms {row['rtt_ms']!r} must be at least 0, or blank")
        links[src, dst] = (gbit * 1e9, rtt_ms / 1e3)
    if not links:
        raise ValueError("no links; give one line for each pair of regions")
    return links


def _number(cell: str | None, where: str) -> float:
    """The finite number in `cell`; NaN where it is blank."""
    text = (cell or "").strip()
    try:
        value = float(text or "nan")
    except ValueError:
        value = math.inf
    if text and not math.isfinite(value):
        raise ValueError(f"{where} {text!r} must be a number")
    return value


def from_links(links: Links, streams: int, shared: bool = False) -> Wan:
    """A full matrix from links that may be given in one direction only.

    A region's own link is the local one where none is given; ValueError where a pair has none.
    """
    regions = tuple(dict.fromkeys(region for pair in links for region in pair))

    def link(src: str, dst: str) -> tuple[float, float]:
        if src == dst:
            return links.get((src, dst), (LOCAL_BITS_PER_SECOND, LOCAL_RTT_SECONDS))
        given = [links[pair] for pair in ((src, dst), (dst, src)) if pair in links]
        if not given:
            raise ValueError(f"no link between {src} and {dst}; add a line for either direction")
        return given[0][0], next((rtt for _, rtt in given if not math.isnan(rtt)), math.nan)

    rows = [[link(src, dst) for dst in regions] for src in regions]
    return Wan(
        regions=regions,
        bits_per_second=tuple(tuple(rate for rate, _ in row) for row in rows),
        rtt_seconds=tuple(tuple(rtt for _, rtt in row) for row in rows),
        streams=streams,
        shared=shared,
    )


def _shard_bytes(slices: int, message_bytes: int) -> int:
    return -(-message_bytes // slices)


def _hint(name: str, known: Sequence[str] | Mapping[str, Wan]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


# Four Azure regions of the published GeoMesh runs: 580-940 Mbit/s. Which pair has which was not
# published; here the longer the round trip, the slower. Round trips are Azure's 95th percentiles
# (30 days to 2026-07-30), but westeurope - koreacentral is the average that Skyplane measured in
# January 2022.
_GEOMESH_LINKS = {
    ("eastus", "westus2"): (940e6, 76e-3),
    ("eastus", "westeurope"): (860e6, 91e-3),
    ("koreacentral", "westus2"): (790e6, 127e-3),
    ("westus2", "westeurope"): (720e6, 153e-3),
    ("eastus", "koreacentral"): (650e6, 192e-3),
    ("westeurope", "koreacentral"): (580e6, 234e-3),
}

WANS: dict[str, Wan] = {
    # The published setting says nothing of latency; this one adds it.
    "geomesh-azure": from_links(_GEOMESH_LINKS, STREAMS["constrained"], shared=True),
    "geomesh-azure-no-latency": from_links(
        {pair: (rate, 0.0) for pair, (rate, _) in _GEOMESH_LINKS.items()},
        STREAMS["constrained"],
        shared=True,
    ),
} | {
    f"azure-{name}": from_links(azure_links(name), STREAMS[name], shared=name == "constrained")
    for name in PROFILES
}
