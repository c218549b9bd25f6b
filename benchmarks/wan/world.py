# SPDX-License-Identifier: Apache-2.0
"""What the lab is made of, before anything is made: nodes, links between them, addresses.

Node 0 is the coordinator; the slices follow in the order of the config. Invariant: every ordered
pair of nodes has a link of its own, so that traffic between two nodes slows no other down.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from geojax.config import ConfigError, require
from geojax.launch.local import COORDINATOR
from geojax.meshes.wan import Wan, get_wan

PORT = 7000
"""On which every node listens."""
SEGMENT_BYTES = 1448
"""Payload of a TCP segment in a packet of 1,500 bytes, with timestamps."""
LARGEST_BITS_PER_SECOND = 10e9
"""Links faster than this are not limited; one machine is slower."""
LEAST_DELAY_SECONDS = 1e-3
"""One way; less is left out, for a proxy itself takes about as long."""


@dataclass(frozen=True)
class Node:
    """A slice, or the coordinator."""

    index: int
    name: str
    region: str

    @property
    def wire(self) -> str:
        """Its address."""
        return f"10.77.0.{self.index + 1}"

    @property
    def delayed(self) -> str:
        """The address by which others reach it through their proxies."""
        return f"10.78.0.{self.index + 1}"


@dataclass(frozen=True)
class Weather:
    """What a WAN's file does not say; the same for all links."""

    rate_scale: float = 1.0
    """Of all rates."""
    jitter_seconds: float = 0.0
    """A piece of a stream comes up to so much later, evenly spread."""
    loss: float = 0.0
    """Probability that a packet is lost."""

    def __post_init__(self):
        require(
            0 < self.rate_scale < math.inf,
            f"--rate-scale {self.rate_scale} must be above 0 and finite",
        )
        require(
            0 <= self.jitter_seconds < math.inf,
            f"--jitter-ms {1e3 * self.jitter_seconds} must be at least 0 and finite",
        )
        require(0 <= self.loss < 0.5, f"--loss {self.loss} must lie in [0, 0.5)")


@dataclass(frozen=True)
class Link:
    """From a node to another, one way."""

    source: Node
    target: Node
    bits_per_second: float
    delay_seconds: float
    """One way."""
    jitter_seconds: float
    loss_bits_per_second: float
    """What one TCP stream gets because of loss; infinite without."""

    @property
    def proxied(self) -> bool:
        return bool(
            self.delay_seconds or self.jitter_seconds or self.loss_bits_per_second < math.inf
        )

    @property
    def window_bytes(self) -> int:
        """In flight at most: twice the bandwidth-delay product, as a well-set socket allows."""
        delay = self.delay_seconds + self.jitter_seconds
        return int(max(256 << 10, 2 * self.bits_per_second * 2 * delay / 8))


@dataclass(frozen=True)
class World:
    """All nodes and the links between them."""

    nodes: tuple[Node, ...]
    links: dict[tuple[int, int], Link]
    """By (source, target)."""

    @property
    def proxied(self) -> bool:
        """Whether nodes reach each other through proxies; all do, or none."""
        return any(link.proxied for link in self.links.values())

    def address(self, node: Node) -> str:
        """By which others reach it."""
        return f"{node.delayed if self.proxied else node.wire}:{PORT}"


def read_wan(name: str) -> Wan:
    """By name, or from a CSV file. ConfigError."""
    try:
        return get_wan(name)
    except ValueError as error:
        raise ConfigError(f"--wan: {error}") from error


def make_world(
    wan: Wan, slices: Sequence[tuple[str, str]], coordinator: str, weather: Weather
) -> World:
    """The coordinator in a region, and slices by (name, region).

    ConfigError for a region or a round trip that the WAN lacks.
    """
    require(len(slices) < 250, f"{len(slices)} slices; addresses suffice for 249")
    places = [(COORDINATOR, coordinator), *slices]
    nodes = tuple(Node(i, name, region) for i, (name, region) in enumerate(places))
    for node in nodes:
        require(
            node.region in wan.regions,
            f"{node.name}: region {node.region!r} is not in the WAN; use one of "
            f"{', '.join(wan.regions)}",
        )
    links = {(a.index, b.index): _link(wan, a, b, weather) for a, b in permutations(nodes, 2)}
    return World(nodes, links)


def _link(wan: Wan, source: Node, target: Node, weather: Weather) -> Link:
    row, column = (wan.regions.index(node.region) for node in (source, target))
    rtt = wan.rtt_seconds[row][column]
    require(
        not math.isnan(rtt),
        f"{source.region} -> {target.region} has no rtt_ms; fill it in, or use regions whose round "
        "trip was measured",
    )
    require(
        not weather.loss or rtt,
        f"--loss {weather.loss}: {source.region} -> {target.region} has no latency, and without "
        "one a lost packet costs nothing; use a WAN with rtt_ms above 0",
    )
    rate = wan.bits_per_second[row][column] * weather.rate_scale
    delay = rtt / 2 if rtt / 2 >= LEAST_DELAY_SECONDS else 0.0
    loss_rate = loss_limit(rtt, weather.loss)
    return Link(source, target, rate, delay, weather.jitter_seconds, loss_rate)


def loss_limit(rtt_seconds: float, loss: float) -> float:
    """Bits a second of one TCP stream at a probability of loss.

    Mathis et al. 1997, "The macroscopic behavior of the TCP congestion avoidance algorithm":
    segment / round trip * sqrt(3 / (2 loss)).
    """
    if not loss:
        return math.inf
    return 8 * SEGMENT_BYTES / rtt_seconds * math.sqrt(1.5 / loss)
