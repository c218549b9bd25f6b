# SPDX-License-Identifier: Apache-2.0
"""What commands that trouble a run share: the demo's slices by GeoMesh, and where they run."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.wan.preset import LAB_WAN, SHARES, method, quotas, round_tokens
from benchmarks.wan.session import Setting
from benchmarks.wan.world import Weather, make_world, read_wan
from geojax.config import RunConfig, require
from geojax.track.environment import usable_cores
from geojax.track.metrics import to_json, write_atomically

LEAST_ROUNDS = 9
"""Of a run in which something happens in the first third."""


def add_options(parser: argparse.ArgumentParser, rounds: int, rate_scale: float) -> None:
    name = parser.prog.split()[-1]
    parser.add_argument("--out", type=Path, default=Path(f"runs/wan-{name}"), help="folder")
    parser.add_argument("--rounds", type=int, default=rounds, help="about as many")
    parser.add_argument("--slices", type=int, default=4, help="the demo's first ones")
    parser.add_argument("--wan", default=LAB_WAN, help="WAN by name, or a CSV file")
    parser.add_argument("--rate-scale", type=float, default=rate_scale, help="of all rates")
    parser.add_argument("--cores", type=float, help="of all; unset: 0.8 of what there is")


def prepared(options: argparse.Namespace) -> tuple[RunConfig, Setting]:
    """ConfigError where the run cannot be; nothing has run yet."""
    require(2 <= options.slices <= len(SHARES), f"--slices must lie in 2..{len(SHARES)}")
    require(
        options.rounds >= LEAST_ROUNDS,
        f"--rounds {options.rounds} must be at least {LEAST_ROUNDS}, so that there are rounds "
        "before and after the trouble",
    )
    slices, shares = tuple(range(options.slices)), SHARES[: options.slices]
    tokens = options.rounds * round_tokens(method("geomesh", slices=slices), shares)
    config = method("geomesh", tokens, slices)
    config = replace(
        config,
        eval=replace(config.eval, every_tokens=0, sequences=64),
        checkpoint=replace(config.checkpoint, every_rounds=3),
    )
    cores = 0.8 * len(usable_cores()) if options.cores is None else options.cores
    setting = Setting(options.wan, Weather(options.rate_scale), quotas(config, shares, cores))
    places = [(s.name, s.region) for s in config.slices]
    make_world(read_wan(setting.wan), places, places[0][1], setting.weather)
    return config, setting


def write_report(folder: Path, content: Mapping[str, object], console: Console) -> None:
    path = folder / "report.json"
    write_atomically(path, json.dumps(to_json(content), indent=2) + "\n")
    console.print(f"wrote {path}", soft_wrap=True)
