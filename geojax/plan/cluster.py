# SPDX-License-Identifier: Apache-2.0
"""A cluster file: slices, what they run on, the links between their regions, and prices.

TOML, links as in a WAN's CSV file:

    wan = "azure-constrained"            # links of known regions: a WAN's name, or a CSV file
    default_link = { gbit_per_second = 0.5, rtt_ms = 100 }      # of all other pairs
    shared = true                        # a region's slices share its lines; unset: as the wan's

    [[links]]                            # before the wan's and the default one
    src = "eastus"
    dst = "lab"
    gbit_per_second = 0.9
    rtt_ms = 20

    [[slices]]
    name = "east"
    region = "eastus"
    gpu = "h100"                         # of meshes/hardware.py, or of [gpus]
    nodes = 1
    gpus_per_node = 8
    network_gbit_per_second = 200        # between nodes, for each GPU
    price_per_gpu_hour = 2.5             # unset: the kind's of [prices]

    [gpus.mine]                          # the fields of meshes.hardware.Gpu
    [prices]                             # by kind of GPU, in any currency
    h100 = 2.5

Invariant: a `ClusterFile` has two slices or more, of different names, and between any two of their
regions a link with a rate and a round trip. A key that is not read is refused.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from typing import Any

from geojax.config import ConfigError, require
from geojax.meshes.hardware import GPUS, Cluster, Gpu
from geojax.meshes.wan import (
    LOCAL_BITS_PER_SECOND,
    LOCAL_RTT_SECONDS,
    Links,
    Wan,
    from_links,
    get_wan,
)
from geojax.simulate.setting import MOST_SLICES

MOST_GPUS = 4096
"""Of one cluster."""


@dataclass(frozen=True)
class Site:
    """One slice."""

    name: str
    region: str
    gpu: str
    """Kind, by name."""
    cluster: Cluster
    price_per_gpu_hour: float | None = None

    def __str__(self) -> str:
        return f"{self.cluster.nodes} x {self.cluster.gpus_per_node} {self.gpu}"


@dataclass(frozen=True)
class ClusterFile:
    """Slices in regions, joined by `wan`, whose regions are theirs."""

    name: str
    sites: tuple[Site, ...]
    wan: Wan
    own: Mapping[str, Gpu]
    """Kinds of GPU that the file describes, beside those of meshes/hardware.py."""
    prices: Mapping[str, float]
    """An hour of one GPU, by kind."""

    @property
    def regions(self) -> tuple[str, ...]:
        """Of each slice."""
        return tuple(site.region for site in self.sites)

    def cost(self, hours: float) -> float | None:
        """Of all GPUs for so long; None where a slice has no price."""
        prices = [site.price_per_gpu_hour for site in self.sites]
        if any(price is None for price in prices):
            return None
        pairs = zip(self.sites, prices, strict=True)
        return hours * sum(site.cluster.gpus * price for site, price in pairs if price)


def read_cluster(path: Path) -> ClusterFile:
    """The cluster in a TOML file. ConfigError names the file, the value, and the fix."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"cluster file {path} cannot be read ({error}); it is TOML, as docs/planning.md shows"
        ) from error
    try:
        return _cluster(content, path)
    except ValueError as error:
        raise ConfigError(f"cluster file {path}: {error}") from error


def _cluster(content: Mapping[str, Any], path: Path) -> ClusterFile:
    _known(content, ("slices", "links", "default_link", "wan", "shared", "gpus", "prices"), "file")
    own = {name: _gpu(name, row) for name, row in _table(content, "gpus").items()}
    gpus = GPUS | own
    prices = {}
    for name in (table := _table(content, "prices")):
        _one_of(name, gpus, "[prices]: no GPU named")
        prices[name] = _number(table, name, "[prices]", at_least=0)
    rows = _tables(content, "slices")
    require(
        2 <= len(rows) <= MOST_SLICES,
        f"{len(rows)} slices; give 2 to {MOST_SLICES}, each a [[slices]] with name, region and gpu",
    )
    sites = tuple(_site(row, number, gpus, prices) for number, row in enumerate(rows, 1))
    names = [site.name for site in sites]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"two slices are named {twice!r}; rename one")
    regions = tuple(dict.fromkeys(site.region for site in sites))
    return ClusterFile(path.stem, sites, _wan(content, regions, path.parent), own, prices)


def _gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    where, names = f"[gpus.{name}]", [field.name for field in fields(Gpu)]
    require(isinstance(row, dict), f"{where} must be a table of {names}")
    require(name not in GPUS, f"{where} is known already; leave it out, or take another name")
    _known(row, names, where)
    flops, memory, bandwidth, link = (_number(row, n, where, above=0) for n in names)
    return Gpu(flops, int(memory), bandwidth, link)


def require_gpus(nodes: int, gpus_per_node: int, where: str) -> None:
    """ConfigError for more than a plan can look through."""
    require(
        nodes * gpus_per_node <= MOST_GPUS,
        f"{where}: {nodes:,} nodes of {gpus_per_node:,} GPUs; a plan is of up to {MOST_GPUS:,}",
    )


def _site(
    row: Mapping[str, Any], number: int, gpus: Mapping[str, Gpu], prices: Mapping[str, float]
) -> Site:
    where = f"slice {row.get('name') or number}"
    counts = ("nodes", "gpus_per_node")
    rest = ("network_gbit_per_second", "price_per_gpu_hour")
    _known(row, ("name", "region", "gpu", *counts, *rest), where)
    name, region, gpu = (_text(row, key, where) for key in ("name", "region", "gpu"))
    _one_of(gpu, gpus, f"{where}: no GPU named")
    nodes, of_each = (_count(row, key, where) for key in counts)
    require_gpus(nodes, of_each, where)
    cluster = Cluster(gpus[gpu], nodes, of_each)
    network, price = rest
    if network in row:
        bits = _number(row, network, where, above=0) * 1e9
        cluster = replace(cluster, network_bytes_per_second=bits / 8)
    own = _number(row, price, where, at_least=0) if price in row else prices.get(gpu)
    return Site(name, region, gpu, cluster, own)


def _wan(content: Mapping[str, Any], regions: tuple[str, ...], folder: Path) -> Wan:
    """Of the regions in use: each pair's own link, or else the WAN's, or else the default."""
    own: dict[tuple[str, str], tuple[float, float]] = {}
    for number, row in enumerate(_tables(content, "links"), 1):
        where = f"link {number}"
        _known(row, ("src", "dst", "gbit_per_second", "rtt_ms"), where)
        pair = _text(row, "src", where), _text(row, "dst", where)
        for region in pair:
            _one_of(region, regions, f"{where}: no slice is in region")
        require(pair not in own, f"{where}: {pair[0]} -> {pair[1]} stands twice; remove one")
        own[pair] = _link(row, where)
    base, default = None, None
    if "wan" in content:
        name = _text(content, "wan", "file")
        base = get_wan(str(folder / name) if name.endswith(".csv") else name)
    if default_row := _table(content, "default_link"):
        _known(default_row, ("gbit_per_second", "rtt_ms"), "default_link")
        default = _link(default_row, "default_link")
    links: dict[tuple[str, str], tuple[float, float]] = {}
    local = (LOCAL_BITS_PER_SECOND, LOCAL_RTT_SECONDS)
    for region in regions:  # first, so that the WAN has the regions in this order
        links |= _pair(region, region, own, base, local)
    for src, dst in combinations(regions, 2):
        links |= _pair(src, dst, own, base, default)
    shared = content.get("shared", bool(base and base.shared))
    require(isinstance(shared, bool), f"shared {shared!r} must be true or false")
    return from_links(links, base.streams if base else 1, shared)


def _pair(
    src: str, dst: str, own: Links, base: Wan | None, default: tuple[float, float] | None
) -> Links:
    """The links of two regions, in one direction or in both."""
    both = [(src, dst), (dst, src)]
    if given := {pair: own[pair] for pair in both if pair in own}:
        return given
    if base and {src, dst} <= set(base.regions):
        found = {pair: _of(base, *pair) for pair in both}
        if not any(math.isnan(rtt) for _, rtt in found.values()):
            return found
    require(
        default,
        f"no link between {src} and {dst}, or none with a known round trip; add [[links]] with "
        "src, dst, gbit_per_second and rtt_ms, a default_link, or the wan that has both",
    )
    assert default
    return {(src, dst): default}


def _of(wan: Wan, src: str, dst: str) -> tuple[float, float]:
    row, column = wan.regions.index(src), wan.regions.index(dst)
    return wan.bits_per_second[row][column], wan.rtt_seconds[row][column]


def _link(row: Mapping[str, Any], where: str) -> tuple[float, float]:
    rate = _number(row, "gbit_per_second", where, above=0)
    return rate * 1e9, _number(row, "rtt_ms", where, at_least=0) / 1e3


def _known(row: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in row:
        _one_of(key, known, f"{where}: no key")


def _one_of(name: str, known: Sequence[str] | Mapping[str, Any], what: str) -> None:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    require(name in known, f"{what} {name!r}; {hint}")


def _table(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = content.get(key, {})
    require(isinstance(found, dict), f"{key} {found!r} must be a table, [{key}]")
    return found


def _tables(content: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = content.get(key, [])
    good = isinstance(found, list) and all(isinstance(row, dict) for row in found)
    require(good, f"{key} must be tables, each [[{key}]]")
    return found


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    require(isinstance(value, str) and value, f"{where}: {key} {value!r} must be a text, not empty")
    return str(value)


def _count(row: Mapping[str, Any], key: str, where: str) -> int:
    value = row.get(key, 1)
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(good, f"{where}: {key} {value!r} must be a whole number, at least 1")
    return value


def _number(
    row: Mapping[str, Any],
    key: str,
    where: str,
    above: float = -math.inf,
    at_least: float = -math.inf,
) -> float:
    value = row.get(key)
    bound = f"at least {at_least:g}" if at_least > -math.inf else f"above {above:g}"
    good = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        good = good and math.isfinite(value) and value > above and value >= at_least
    except OverflowError:  # a whole number beyond all floats
        good = False
    require(good, f"{where}: {key} {value!r} must be a finite number, {bound}")
    return float(value)  # type: ignore[arg-type]
