# SPDX-License-Identifier: Apache-2.0
"""What a number was made with: the machine and the versions of the packages that decide results.

Invariant: nothing is imported to find out, so asking costs milliseconds and touches no accelerator.
"""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "geojax")


def machine() -> str:
    """CPU model, its number of cores, those of them that this process may use, and the system."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    count, used = os.cpu_count() or 1, len(usable_cores())
    cores = f"{count} cores" if used == count else f"{used} of {count} cores"
    return f"{_cpu_model()}, {cores}, {system}"


def versions() -> dict[str, str]:
    """Installed version of each package that results depend on."""
    return {package: version(package) for package in _PACKAGES}


def made_by(clock: str, machines: Sequence[str] | str | None = None) -> dict[str, Any]:
    """What a file of figures says of its making: this command, this day, and this machine unless
    the figures come from runs on other `machines`."""
    return {
        "command": shlex.join(["geojax", *sys.argv[1:]]),
        "generated": datetime.now(UTC).date().isoformat(),
        "clock": clock,
        "machine": machines or machine(),
        "versions": versions(),
    }


def usable_cores() -> list[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # Linux; elsewhere, and on some Arm, the platform must do
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown CPU")
