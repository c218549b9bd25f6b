# SPDX-License-Identifier: Apache-2.0
"""Links between 14 Azure regions as many streams, one stream or a constrained line find them.

Rates: 64 TCP streams between D32_v5 machines, and average round trips, measured by the Skyplane
project in January 2022 (`profiles/` of skyplane-project/skyplane, Apache-2.0); both directions
averaged and rounded. It has no round trip to westus2: four are Azure's 95th percentiles (30 days
to 2026-07-30), the others are not known. eastus2, to which none is known, is left out.
"""

import math
from typing import Literal, get_args

from geojax.meshes.tcp import stream_rate

Profile = Literal["many", "single", "constrained"]
"""many: 64 streams, at the measured rate. single: one stream, a window each round trip.
constrained: a line of 940 Mbit/s where the round trip is the shortest, of 580 where it is the
longest, and between them by rank: the published range of GeoMesh's four regions."""
PROFILES: tuple[Profile, ...] = get_args(Profile)
STREAMS: dict[Profile, int] = {"many": 64, "single": 1, "constrained": 64}

_FASTEST, _SLOWEST = 940e6, 580e6

_GBIT_PER_SECOND = """
eastus
westus2            14.2
westeurope         13.5 11.6
koreacentral       10.2 12.0  8.9
canadacentral      15.4 18.8 16.3 10.0
northcentralus     15.4 14.7 13.1 10.5 15.4
westus             18.1 20.8 13.6 15.3 18.1 18.2
westus3            14.4 14.8 11.9 11.1 18.0 14.4 19.6
northeurope        13.8 12.1 15.4  8.9 13.5 13.5 15.7 12.4
uksouth            13.7 11.8 15.6  9.1 13.3 13.2 15.0 12.1 18.8
francecentral      13.5 11.7 15.5  9.3 13.1 13.1 14.5 11.9 15.4 15.6
germanywestcentral 13.3 11.3 15.4  9.1 12.8 12.9 16.0 11.8 15.2 17.2 15.5
japaneast          10.6 12.8  8.6 15.0 11.0 11.5 12.9 10.9  5.4  8.7  9.0  8.8
australiaeast       9.6 10.7  7.9 11.8  9.6 10.0 14.7  8.4  8.0  8.3  8.4  8.2 12.3
"""
_RTT_MS = """
eastus
westus2              76
westeurope           80  153
koreacentral        178  127  234
canadacentral        19    -   98  178
northcentralus       16    -   95  164   15
westus               62    -  140  130   59   48
westus3              49    -  132  133   64   56   16
northeurope          66    -   15  235   84   81  125  118
uksouth              76    -    8  224   93   92  136  123   11
francecentral        81    -   11  219   97   96  140  132   16   12
germanywestcentral   88    -   15  223  105  103  149  136   23   15    9
japaneast           156  103  224   30  153  142  106  107  231  229  217  218
australiaeast       234    -  246  129  197  182  138  153  250  243  236  239  102
"""


def azure_links(profile: Profile) -> dict[tuple[str, str], tuple[float, float]]:
    """(region, region) -> (bits a second, round trip in seconds, NaN where unknown)."""
    rates, rtts = _read(_GBIT_PER_SECOND), _read(_RTT_MS)
    known = sorted(ms for ms in rtts.values() if not math.isnan(ms))
    links = {}
    for pair, gbit in rates.items():
        rtt, rate = rtts[pair] / 1e3, gbit * 1e9
        if profile == "single":
            rate = min(rate, stream_rate(rtt))
        elif profile == "constrained":
            rank = known.index(rtts[pair]) / (len(known) - 1) if rtts[pair] in known else 1.0
            rate = _FASTEST + rank * (_SLOWEST - _FASTEST)
        links[pair] = (rate, rtt)
    return links


def _read(table: str) -> dict[tuple[str, str], float]:
    """The lower triangle of a symmetric table; columns are in the order of rows."""
    rows = [line.split() for line in table.strip().splitlines()]
    names = [row[0] for row in rows]
    return {
        (name, other): math.nan if cell == "-" else float(cell)
        for name, *cells in rows
        for other, cell in zip(names, cells, strict=False)
    }
