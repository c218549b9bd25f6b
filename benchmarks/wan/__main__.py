# SPDX-License-Identifier: Apache-2.0
"""Slices in network namespaces on this machine: a run, comparisons, trouble, and cleaning up.

    python -m benchmarks.wan run demo-geomesh --shares 2.57 1.5 1.1 1 --cores 1.6

Needs Linux, root, and iproute2 (`ip`, `tc`); docs/wan-benchmark.md says what is made and how.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.wan import compare, failures, throttle
from benchmarks.wan.lab import clean
from benchmarks.wan.network import require_tools
from benchmarks.wan.preset import measured, quotas
from benchmarks.wan.session import Setting, run
from benchmarks.wan.world import Weather
from geojax.config import ConfigError, RunError, require
from geojax.configs import load_config


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, 2 for a mistake in the options, 1 for what fails otherwise."""
    options = _parser().parse_args(arguments)
    console = Console(highlight=False)
    try:
        options.function(options, console)
    except ConfigError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except RunError as error:
        console.print(f"failed: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped, and removed what was made; the same command goes on")
        return 130
    return 0


def _run(options: argparse.Namespace, console: Console) -> None:
    require_tools()
    config = measured(load_config(options.preset))
    if options.tokens is not None:
        config = replace(config, train=replace(config.train, total_tokens=options.tokens))
    cores = {}
    if options.shares is not None:
        cores = quotas(config, options.shares, 1.0 if options.cores is None else options.cores)
    else:
        require(options.cores is None, "--cores is divided by --shares; give these, too")
    weather = Weather(options.rate_scale, options.jitter_ms / 1e3, options.loss)
    setting = Setting(options.wan, weather, cores, options.coordinator_region)
    folder = (options.out or Path("runs") / f"wan-{config.name}").resolve()
    for line in run(config, folder, setting, console).lines():
        console.print(line, soft_wrap=True)


def _clean(options: argparse.Namespace, console: Console) -> None:
    removed = clean(options.all)
    console.print("\n".join(f"removed {name}" for name in removed) or "nothing was left over")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wan", description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="train a preset in namespaces, count what is sent")
    one.add_argument("preset", help="preset, or a file of yours, as `geojax train` takes it")
    one.add_argument("--out", type=Path, help="run folder; unset: runs/wan-NAME")
    one.add_argument("--tokens", type=int, help="to train; unset: the preset's")
    one.add_argument("--wan", default="geomesh-azure", help="WAN by name, or a CSV file")
    one.add_argument("--rate-scale", type=float, default=1.0, help="of all rates")
    one.add_argument("--jitter-ms", type=float, default=0.0, help="up to so much later, each way")
    one.add_argument("--loss", type=float, default=0.0, help="probability of a packet's loss")
    one.add_argument("--coordinator-region", default="", help="unset: the first slice's")
    one.add_argument("--shares", type=float, nargs="+", help="processor of each slice, relative")
    one.add_argument("--cores", type=float, help="that all slices use together; unset: 1")
    one.set_defaults(function=_run)
    compare.add_command(commands)
    throttle.add_command(commands)
    failures.add_command(commands)
    left = commands.add_parser("clean", help="remove what a killed command left behind")
    left.add_argument("--all", action="store_true", help="also what belongs to a living process")
    left.set_defaults(function=_clean)
    return parser


if __name__ == "__main__":
    sys.exit(main())
