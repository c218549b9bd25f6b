# SPDX-License-Identifier: Apache-2.0
"""Network namespaces, the links between them, and what their counters say (Linux, root).

A link is a veth pair with a token bucket (`tc qdisc tbf`) on either end. Invariant: everything is
inside namespaces whose names begin with `PREFIX` and the process that owns them, so that removing
these removes all.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from benchmarks.wan.world import LARGEST_BITS_PER_SECOND, Link, Node, World
from geojax.config import ConfigError, RunError, require

PREFIX = "gjwan"
PACKET_BYTES = 1514
FRAME_BYTES = 14
"""Ethernet header, as interfaces count it."""
HEADER_BYTES = 52
"""IPv4 (20), and TCP with timestamps (32)."""
_QUEUE_SECONDS = 0.2  # in front of a link


class Counters(NamedTuple):
    """Of one namespace, since it was made."""

    sent: dict[int, int]
    """Bytes that left by interface, by the index of the node at its other end."""
    tcp_octets_in: int
    """IP bytes that came in, headers included."""
    tcp_octets_out: int
    segments_in: int
    segments_out: int


def require_tools() -> None:
    """ConfigError where a lab cannot be made here."""
    require(
        hasattr(os, "geteuid") and os.geteuid() == 0,
        "network namespaces and processor quotas need root; run this with sudo",
    )
    for tool in ("ip", "tc", "sysctl"):
        require(shutil.which(tool), f"no {tool!r} here; install iproute2 and procps")


def namespace(owner: int, node: Node) -> str:
    return f"{PREFIX}{owner}-{node.name}"


def make(owner: int, world: World) -> None:
    """Namespaces and links of a world. RunError where the system refuses one."""
    names = {node.index: namespace(owner, node) for node in world.nodes}
    for node in world.nodes:
        name = names[node.index]
        _ip("netns", "add", name)
        if os.path.exists("/proc/sys/net/ipv6"):  # what it says of itself would be counted
            _run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "addr", "add", f"{node.wire}/32", "dev", "lo")
    for a, b in combinations(world.nodes, 2):
        one, other = names[a.index], names[b.index]
        ends = (("netns", one, "type", "veth"), ("netns", other))
        _ip("link", "add", _end(b), *ends[0], "peer", "name", _end(a), *ends[1])
        for here, there in ((a, b), (b, a)):
            _connect(names[here.index], world, world.links[here.index, there.index])


def _connect(name: str, world: World, link: Link) -> None:
    here, there = link.source, link.target
    device = _end(there)
    # Packets as they would be on a wire, so that interfaces count every header.
    _ip("-n", name, "link", "set", device, "up", "gso_max_segs", "1")
    _ip("-n", name, "route", "add", f"{there.wire}/32", "dev", device, "src", here.wire)
    if world.proxied:
        _ip("-n", name, "addr", "add", f"{there.delayed}/32", "dev", "lo")
    rate = link.bits_per_second
    if rate <= LARGEST_BITS_PER_SECOND:
        burst = int(max(2 * PACKET_BYTES, rate / 8 * 2e-3))
        queue = int(max(10 * PACKET_BYTES, rate / 8 * _QUEUE_SECONDS))
        bucket = ("tbf", "rate", f"{int(rate)}bit", "burst", str(burst), "limit", str(queue))
        _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", *bucket)


def counters(owner: int, world: World) -> dict[int, Counters]:
    """By the index of the node."""
    found = {}
    for node in world.nodes:
        name = namespace(owner, node)
        links = json.loads(_ip("-n", name, "-j", "-s", "link", "show"))
        by_name = {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in links}
        sent = {o.index: by_name[_end(o)] for o in world.nodes if o != node}
        text = _run("ip", "netns", "exec", name, "cat", "/proc/net/snmp", "/proc/net/netstat")
        tcp, ip = _table(text, "Tcp"), _table(text, "IpExt")
        ends = (ip["InOctets"], ip["OutOctets"], tcp["InSegs"], tcp["OutSegs"])
        found[node.index] = Counters(sent, *ends)
    return found


def sent_bytes(pid: int, others: Iterable[int]) -> int:
    """Bytes that left the namespace of a process towards these nodes, so far; 0 where it has
    ended."""
    wanted, total = {f"to{index}" for index in others}, 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
            name, colon, figures = line.partition(":")
            if colon and name.strip() in wanted:
                total += int(figures.split()[8])
    return total


def pids(owner: int, node: Node) -> list[int]:
    """Processes in a node's namespace."""
    return [int(pid) for pid in _ip("netns", "pids", namespace(owner, node)).split()]


def remove(names: Iterable[str]) -> list[str]:
    """End what runs in these namespaces and delete them; what could not be done, in words."""
    failed = []
    for name in names:
        try:
            for pid in _ip("netns", "pids", name).split():
                _kill(int(pid))
            _ip("netns", "del", name)
        except RunError as error:
            failed.append(str(error))
    return failed


def existing() -> dict[str, int]:
    """Namespaces of all labs, with the process that made each."""
    found = {}
    for entry in json.loads(_ip("-j", "netns", "list") or "[]"):
        if (owner := owner_of(entry["name"])) is not None:
            found[entry["name"]] = owner
    return found


def owner_of(name: str) -> int | None:
    """The process that made what has this name; None where it is not a lab's."""
    digits, dash, _ = name.removeprefix(PREFIX).partition("-")
    return int(digits) if name.startswith(PREFIX) and dash and digits.isdecimal() else None


def _end(other: Node) -> str:
    """Of the interface towards another node."""
    return f"to{other.index}"


def _table(text: str, kind: str) -> dict[str, int]:
    """Two lines of /proc/net/snmp or netstat: names, then values."""
    names, values = (x.split()[1:] for x in text.splitlines() if x.startswith(f"{kind}:"))
    return dict(zip(names, map(int, values), strict=True))


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode:
        raise RunError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
