# SPDX-License-Identifier: Apache-2.0
"""What a run says it sent beside what TCP and the interfaces counted.

Framing is stated beforehand, not fitted: 66 bytes a packet (Ethernet 14, IPv4 20, TCP with
timestamps 32), for full segments and an acknowledgement of every second one. Without proxies TCP
payload is what the IP layer received less its headers; with them it is what they let out. Either is
counted apart from the interfaces. Invariant: what slices exchange and what goes to and from the
coordinator add up to all that nodes sent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.wan.network import FRAME_BYTES, HEADER_BYTES, Counters
from benchmarks.wan.world import SEGMENT_BYTES, World
from geojax.launch.local import COORDINATOR
from geojax.track.console import format_bytes
from geojax.track.metrics import Record

ACKNOWLEDGED_SEGMENTS = 2
"""By one packet without payload, the other way."""


@dataclass(frozen=True)
class Report:
    """Bytes over a session, all slices together."""

    reported_bytes: int
    """To peers, by the run's records: messages, and what was sent again or for others."""
    exchange_payload_bytes: int
    """TCP payload between slices."""
    control_payload_bytes: int
    """TCP payload to and from the coordinator."""
    exchange_interface_bytes: int
    """Of interfaces between slices, sent."""
    control_interface_bytes: int

    @property
    def payload_excess(self) -> float:
        """TCP payload between slices over what the run reports, relative."""
        return self.exchange_payload_bytes / max(self.reported_bytes, 1) - 1

    @property
    def interface_excess(self) -> float:
        """Interface bytes over reported payload and its stated framing, relative."""
        stated = self.reported_bytes + framing_bytes(self.reported_bytes)
        return self.exchange_interface_bytes / max(stated, 1) - 1

    def lines(self) -> list[str]:
        framed = framing_bytes(self.reported_bytes)
        return [
            f"reported by the run:      {self.reported_bytes:>12,} bytes to peers",
            f"TCP payload, exchange:    {self.exchange_payload_bytes:>12,} bytes, "
            f"{self.payload_excess:+.2%} over what is reported",
            f"interfaces, exchange:     {self.exchange_interface_bytes:>12,} bytes, "
            f"{self.interface_excess:+.2%} over reported + framing ({format_bytes(framed)}: "
            f"{FRAME_BYTES + HEADER_BYTES} bytes for each {SEGMENT_BYTES} of payload, and for an "
            f"acknowledgement of every {ACKNOWLEDGED_SEGMENTS} segments)",
            f"coordinator, TCP payload: {self.control_payload_bytes:>12,} bytes "
            f"({self.control_interface_bytes:,} on interfaces)",
        ]


def framing_bytes(payload_bytes: int) -> int:
    """Headers of a stream of full segments and of their acknowledgements."""
    segments = -(-payload_bytes // SEGMENT_BYTES)
    packets = segments + -(-segments // ACKNOWLEDGED_SEGMENTS)
    return packets * (FRAME_BYTES + HEADER_BYTES)


def traffic_report(
    world: World,
    before: Mapping[int, Counters],
    after: Mapping[int, Counters],
    proxies: Mapping[str, Mapping[str, Mapping[str, int]]],
    records: Iterable[Record],
    first_round: int,
) -> Report:
    """Of the rounds after `first_round`."""
    reported = sum(
        r["peer_bytes"] for r in records if r["kind"] == "slice" and r["round"] > first_round
    )
    sent = {(a, b): after[a].sent[b] - before[a].sent[b] for a, b in world.links}
    exchange, control = (
        sum(size for pair, size in sent.items() if (0 in pair) == with_coordinator)
        for with_coordinator in (False, True)
    )
    if proxies:
        counted = [
            (COORDINATOR in (here, there), sum(ways.values()))
            for here, lines in proxies.items()
            for there, ways in lines.items()
        ]
        payload = sum(size for to_it, size in counted if not to_it)
        told = sum(size for to_it, size in counted if to_it)
    else:
        ins = {i: _payload(after[i], before[i], "in") for i in after}
        told = ins[0] + _payload(after[0], before[0], "out")
        payload = sum(ins.values()) - told
    return Report(reported, payload, told, exchange, control)


def _payload(after: Counters, before: Counters, way: str) -> int:
    """Bytes of TCP streams: those of IP packets without headers."""
    octets, segments = (
        getattr(after, f"{name}_{way}") - getattr(before, f"{name}_{way}")
        for name in ("tcp_octets", "segments")
    )
    return octets - HEADER_BYTES * segments
