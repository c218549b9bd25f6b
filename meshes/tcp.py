# SPDX-License-Identifier: Apache-2.0
"""What TCP makes of a link: the rate of streams under a window and under loss.

Rates are in bits a second, round trips in seconds. Invariant: no rate exceeds the link's own.
"""

import math

SEGMENT_BYTES = 1460
"""Payload of a segment where packets are of 1,500 bytes."""
WINDOW_BITS = 190e6
"""Bits that one stream has under way at most, so that its rate is this over the round trip: what
single streams between cloud regions come to (190 Gbit/s x ms)."""


def stream_rate(rtt_seconds: float, window_bits: float = WINDOW_BITS) -> float:
    """Of one stream without loss: a window each round trip. Infinite where there is no latency."""
    return window_bits / rtt_seconds if rtt_seconds else math.inf


def lossy_rate(rate: float, rtt_seconds: float, loss: float, streams: int) -> float:
    """What `streams` streams get of a link of `rate` where a share `loss` of packets is lost.

    Mathis, Semke, Mahdavi and Ott 1997, "The Macroscopic Behavior of the TCP Congestion Avoidance
    Algorithm": one stream comes to (segment / round trip) * sqrt(3 / (2 loss)), whatever the link's
    rate. It is for loss-based congestion control (Reno); BBR loses less.
    """
    if not loss or not rtt_seconds:
        return rate
    one = 8 * SEGMENT_BYTES / rtt_seconds * math.sqrt(1.5 / loss)
    return min(rate, streams * one)
