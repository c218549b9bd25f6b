# SPDX-License-Identifier: Apache-2.0
"""How slow links and processors must be for rounds to have the length and shape that is asked for.

A few rounds of DiLoCo over links that are not scaled give the seconds of inner steps (C), which go
by the quota, and what an exchange takes without a slow link (E). Invariant: quotas are only ever
lowered, so what they sum to never exceeds what was given.
"""

import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path

from rich.console import Console

from benchmarks.wan import quota
from benchmarks.wan.preset import method, quotas, round_tokens
from benchmarks.wan.session import Setting, run
from benchmarks.wan.traffic import framing_bytes
from benchmarks.wan.world import read_wan
from geojax.config import ConfigError, RunConfig, require
from geojax.meshes.wan import Wan
from geojax.track.metrics import write_atomically
from geojax.track.summary import Run, load_run

ROUNDS = 5
"""Of the calibration; the first is not counted."""


@dataclass(frozen=True)
class Aim:
    """What is asked for."""

    wan: str
    shares: tuple[float, ...]
    cores: float
    """Of all slices together, at most."""
    slices: tuple[int, ...]
    """Of the demo's."""
    sync_share: float
    """Of a DiLoCo round, in the exchange."""
    round_seconds: float
    """Inner steps of a round, at least."""

    def __post_init__(self):
        require(0 < self.sync_share < 1, f"--sync-share {self.sync_share} must lie in (0, 1)")
        require(
            0 < self.round_seconds < math.inf,
            f"--round-seconds {self.round_seconds} must be above 0 and finite",
        )


@dataclass(frozen=True)
class Calibration:
    """What that takes here."""

    aim: Aim
    cores: dict[str, float]
    """By slice."""
    rate_scale: float
    compute_seconds: float
    """Of a round, the last slice's inner steps, under these quotas."""
    fixed_seconds: float
    """Of an exchange, whatever the links, and of what follows it."""
    outer_seconds: float
    """Of these, decoding and the outer step, which are no wait."""
    start_seconds: float
    """Until the first round begins."""


def calibrated(aim: Aim, folder: Path, console: Console) -> Calibration:
    """From the file in `folder`, or measured there. ConfigError where the file is of another aim,
    or what is asked for cannot be had."""
    path = folder / "calibration.json"
    if path.exists():
        try:
            found = json.loads(path.read_text())
            asked = found.pop("aim")
            lists = {k: tuple(v) for k, v in asked.items() if isinstance(v, list)}
            known = Calibration(Aim(**asked | lists), **found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no calibration ({error}); delete it") from error
        require(
            known.aim == aim,
            f"{path} is of other settings ({known.aim}); choose another --out, or delete it",
        )
        return known
    first = method("diloco", slices=aim.slices)
    config = method("diloco", ROUNDS * round_tokens(first, aim.shares), aim.slices)
    cores = quotas(config, aim.shares, aim.cores)
    console.print(f"calibration: {ROUNDS} rounds of DiLoCo over links that are not scaled")
    began = time.monotonic()
    run(config, folder / "calibration", Setting(aim.wan, cores=cores), console)
    took = time.monotonic() - began
    found = load_run(folder / "calibration")
    calibration = calibrate(aim, config, cores, found, took - found.seconds)
    write_atomically(path, json.dumps(asdict(calibration), indent=2) + "\n")
    return calibration


def calibrate(
    aim: Aim, config: RunConfig, cores: dict[str, float], run: Run, start_seconds: float
) -> Calibration:
    """What follows from a run of DiLoCo over links that are not scaled."""
    times = [parts(run, record["round"]) for record in run.rounds[1:]]
    compute, fixed, outer = (statistics.median(column) for column in zip(*times, strict=True))
    slower = min(1.0, compute / aim.round_seconds)
    slowed = {name: share * slower for name, share in cores.items()}
    quota.check(slowed)
    compute /= slower
    target = compute * aim.sync_share / (1 - aim.sync_share)
    require(
        target > fixed,
        f"an exchange takes {fixed:.2f} s over links that are not scaled, and {target:.2f} s are "
        "asked for; raise --round-seconds, or take a WAN of less latency",
    )
    scale = link_seconds(config, read_wan(aim.wan), run.start["payload_bytes"]) / (target - fixed)
    return Calibration(
        aim,
        slowed,
        scale,
        compute,
        fixed,
        outer,
        start_seconds,
    )


def parts(run: Run, number: int) -> tuple[float, float, float]:
    """Seconds until the last slice had done its inner steps, the rest of the round, and of it the
    longest outer step."""
    here = [r for r in run.slices if r["round"] == number]
    inner = max(r["compute_seconds"] for r in here)
    rest = run.rounds[number - 1]["round_seconds"] - inner
    return inner, rest, max(r["outer_seconds"] for r in here)


def link_seconds(config: RunConfig, wan: Wan, payload_bytes: int) -> float:
    """Of a message and its framing on the slowest link; all links are used at once."""
    return 8 * (payload_bytes + framing_bytes(payload_bytes)) / slowest_rate(config, wan)


def slowest_rate(config: RunConfig, wan: Wan) -> float:
    """Bits a second of the slowest link between slices."""
    places = [wan.regions.index(s.region) for s in config.slices]
    return min(wan.bits_per_second[a][b] for a, b in permutations(places, 2))


def lines(calibration: Calibration, config: RunConfig) -> list[str]:
    """What was found, in words."""
    aim = calibration.aim
    slow = slowest_rate(config, read_wan(aim.wan))
    quota = ", ".join(f"{name} {cores:.3f}" for name, cores in calibration.cores.items())
    exchange = calibration.compute_seconds * aim.sync_share / (1 - aim.sync_share)
    return [
        f"quotas (cores): {quota}",
        f"links: rates of {aim.wan} x {calibration.rate_scale:.3e}, the slowest "
        f"{slow * calibration.rate_scale / 1e6:.2f} Mbit/s",
        f"DiLoCo's round: {calibration.compute_seconds:.2f} s of inner steps, "
        f"{exchange:.2f} s of exchange ({aim.sync_share:.1%}), "
        f"{calibration.fixed_seconds:.2f} s of it whatever the links",
    ]
