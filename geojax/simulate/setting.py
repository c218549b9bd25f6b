# SPDX-License-Identifier: Apache-2.0
"""What is simulated: a config's slices, multiplied and placed on a WAN, and the plan of their work.

Rule of multiplication: slice i is a copy of the config's slice i mod n, and lies in region i mod r
of r regions: the config's own, slice by slice, unless others are given. Copies do the same work, so
the plan is made of the config's own slices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from geojax.config import ClockConfig, ConfigError, RunConfig, require
from geojax.geomesh.balance import Plan, SliceProfile, make_plan
from geojax.geomesh.clock import Traffic, modelled_profiles, traffic
from geojax.meshes.network import Exchanged, Network, Pattern
from geojax.meshes.wan import get_wan

MOST_SLICES = 256
How = Literal["config", "auto", "gather", "two_phase", "hub"]
"""config: as the run would; auto: the pattern of the least modelled time, of nearly equal ones the
simplest."""


@dataclass(frozen=True)
class Setting:
    """K slices of `config`, ready to be timed."""

    config: RunConfig
    network: Network
    pattern: Pattern
    plan: Plan
    profiles: tuple[SliceProfile, ...]
    """Of the K slices."""
    traffic: Traffic
    """Of an exchange among the config's own slices."""

    @property
    def slices(self) -> int:
        return len(self.plan.work)

    def exchange(self, round_: int = 0) -> Exchanged:
        """Of all parameters, in the pattern in force."""
        return self.network.exchange(self.pattern, self.traffic.payload_bytes, round_)


def with_modelled_clock(
    config: RunConfig, wan: str | None, gpus: Sequence[str], regions: Sequence[str]
) -> RunConfig:
    """`config` on the modelled clock, over `wan` and with step times of `gpus` where given.

    ConfigError where the config has no slices, or is measured and no GPUs are given.
    """
    require(config.slices, "there is nothing between slices to simulate: this run has none")
    require(
        config.cona is None,
        "under cona the plan follows the gradient's noise, and nothing is trained here to measure "
        "it; simulate the preset without cona, or train it",
    )
    clock, train = config.clock, config.train
    measured = clock.kind == "measured"
    require(
        gpus or not measured,
        "the measured clock does not say how fast slices are without running them; name their "
        "GPUs, such as --gpus h100 a100-80gb l40s rtx-6000-ada",
    )
    name = wan or clock.wan or "azure-constrained"
    try:
        known = get_wan(name).regions
    except ValueError as error:
        raise ConfigError(f"--wan {name}: {error}") from error
    slices = []
    for i, s in enumerate(config.slices):
        region = regions[i % len(regions)] if regions else s.region or known[i % len(known)]
        s = replace(s, region=region)
        if gpus:
            s = replace(s, gpu=gpus[i % len(gpus)], speed=None)
        slices.append(s)
    clock = ClockConfig(kind="modelled", wan=name) if measured else replace(clock, wan=name)
    if gpus:  # they are timed for bfloat16
        clock = replace(clock, base_step_seconds=None, base_batch=None)
        train = replace(train, compute_dtype="bfloat16")
    return replace(config, slices=tuple(slices), clock=clock, train=train)


def make_setting(
    config: RunConfig,
    how: How = "config",
    slices: int | None = None,
    regions: Sequence[str] = (),
    loss: float = 0.0,
    jitter_seconds: float = 0.0,
    seed: int = 0,
) -> Setting:
    """`slices` of a config on the modelled clock; unset: as many as it has.

    ConfigError where regions, loss or jitter make no sense, or where no plan fits.
    """
    own = len(config.slices)
    count = own if slices is None else slices
    require(2 <= count <= MOST_SLICES, f"slices {count} must lie in 2..{MOST_SLICES}")
    require(
        0 <= jitter_seconds < 3600, f"jitter {jitter_seconds} seconds must lie between 0 and 3600"
    )
    places = list(regions) or [s.region for s in config.slices]
    where = tuple(places[i % len(places)] for i in range(count))
    try:
        wan = get_wan(config.clock.wan).under_loss(loss)
        wan.gather_seconds(list(dict.fromkeys(where)), 1)  # all regions and round trips are known
    except ValueError as error:
        raise ConfigError(f"WAN {config.clock.wan}: {error}") from error
    network = Network(wan, where, jitter_seconds, seed)
    moved = traffic(config)
    pattern = choose_pattern(how, config, network, moved.payload_bytes)
    quiet = replace(network, jitter_seconds=0.0).exchange(pattern, moved.payload_bytes)
    profiles = modelled_profiles(config)
    work = make_plan(profiles, config.balance, quiet.seconds).work
    names = [_name(config.slices[i % own].name, i, own, count) for i in range(count)]
    return Setting(
        config,
        network,
        pattern,
        Plan(tuple(replace(work[i % own], name=name) for i, name in enumerate(names))),
        tuple(replace(profiles[i % own], name=name) for i, name in enumerate(names)),
        moved,
    )


def choose_pattern(how: How, config: RunConfig, network: Network, message_bytes: int) -> Pattern:
    """The pattern by which the slices of `network` exchange messages of so many bytes."""
    if how == "auto":
        return network.fastest(message_bytes)
    return config.exchange.resolve_schedule(len(network.regions)) if how == "config" else how


def _name(name: str, index: int, own: int, count: int) -> str:
    """The config's, numbered where there are more slices than it has."""
    return name if count <= own else f"{name}-{index // own}"
