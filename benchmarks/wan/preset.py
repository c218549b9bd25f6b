# SPDX-License-Identifier: Apache-2.0
"""Runs as they are in a lab: measured clock, real slices, quotas from shares.

Invariant: but for the clock, and for the schedule of the exchange, which is a gather where slices
are processes, a method here is the method of `geojax bench geomesh`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.wan import quota
from geojax.config import ClockConfig, RunConfig, require
from geojax.configs import METHODS, demo
from geojax.configs.geomesh import PUBLISHED_SPEEDS, geomesh
from geojax.launch.processes import with_grpc

SHARES = tuple(speed for _, speed in PUBLISHED_SPEEDS.values())
"""Of the processor, by slice of the demo."""
LAB_WAN = "geomesh-azure-no-latency"
"""As in the frozen setting; what latency costs is another question (`run --wan geomesh-azure`)."""


OVERLAP = 0.125
"""`exchange.overlap` of the method geomesh-overlap: the least that hides an exchange of signs."""


def geomesh_overlap(base: RunConfig) -> RunConfig:
    """GeoMesh whose slices go on while messages are under way; its plan stays (no re-planning)."""
    config = geomesh(base)
    return replace(
        config, name="geomesh-overlap", exchange=replace(config.exchange, overlap=OVERLAP)
    )


LAB_METHODS = METHODS | {"geomesh-overlap": geomesh_overlap}


def measured(config: RunConfig) -> RunConfig:
    """The same run by the measured clock, a process a slice."""
    slices = tuple(replace(s, speed=None, gpu="", gpus=1) for s in config.slices)
    return replace(with_grpc(config), clock=ClockConfig(), slices=slices)


def method(name: str, tokens: int | None = None, slices: Sequence[int] | None = None) -> RunConfig:
    """A method over the demo's base, to `tokens`, with these of its slices; unset: all of both.

    ConfigError for an unknown one.
    """
    require(name in LAB_METHODS, f"no method {name!r}; use some of {', '.join(LAB_METHODS)}")
    base = demo()
    if slices is not None:
        base = replace(base, slices=tuple(base.slices[i] for i in slices))
    if tokens is not None:
        base = replace(base, train=replace(base.train, total_tokens=tokens))
    return measured(LAB_METHODS[name](base))


def round_tokens(config: RunConfig, shares: Sequence[float]) -> int:
    """Of a round of slices with these shares of the processor."""
    assert config.balance.inner_steps, "the demo says so"
    work = config.balance.inner_steps * max(config.balance.batch_sizes) * config.data.seq_len
    if config.balance.mode == "adaptive":  # the slowest does as much as under equal work
        return int(work * sum(shares) / min(shares))
    return work * len(shares)


def quotas(config: RunConfig, shares: Sequence[float], cores: float) -> dict[str, float]:
    """Cores of each slice: `cores` divided by shares. ConfigError, also where one is too small."""
    require(
        len(shares) == len(config.slices) and all(0 < share < math.inf for share in shares),
        f"--shares {list(shares)}: give one above 0 for each of the {len(config.slices)} slices",
    )
    require(0 < cores < math.inf, f"--cores {cores} must be above 0 and finite")
    found = {
        s.name: cores * share / sum(shares) for s, share in zip(config.slices, shares, strict=True)
    }
    quota.check(found)
    return found
