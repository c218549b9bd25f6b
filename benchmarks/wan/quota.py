# SPDX-License-Identifier: Apache-2.0
"""Processor quotas by cgroup, version 2 or 1, whichever has the cpu controller here.

Invariant: a group's name begins with that of its owner's namespaces, so that `remove` finds it.
"""

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from geojax.config import ConfigError, RunError, require

PERIOD_MICROSECONDS = 10_000
_LEAST_MICROSECONDS = 1000  # of a quota, by the kernel
_ROOT = Path("/sys/fs/cgroup")


def find_root() -> Path:
    """Where groups with a cpu quota are made. ConfigError where there is none."""
    controllers = _ROOT / "cgroup.controllers"
    if controllers.exists() and "cpu" in controllers.read_text().split():
        with suppress(OSError):  # it may be on already
            (_ROOT / "cgroup.subtree_control").write_text("+cpu")
        if "cpu" in (_ROOT / "cgroup.subtree_control").read_text().split():
            return _ROOT
    for name in ("cpu", "cpu,cpuacct"):
        if (_ROOT / name / "cpu.cfs_quota_us").exists() or (_ROOT / name / "cpu.shares").exists():
            return _ROOT / name
    raise ConfigError(
        f"no cgroup with a cpu controller under {_ROOT}; mount cgroup2 there, or run without quotas"
    )


def check(cores: Mapping[str, float]) -> None:
    """ConfigError where a quota, by the name of its slice, is less than the kernel takes."""
    least = _LEAST_MICROSECONDS / PERIOD_MICROSECONDS
    for name, own in cores.items():
        require(
            own >= least,
            f"slice {name}: a quota of {own:.3f} cores is under the kernel's least, {least}; use "
            "fewer slices, less unequal shares, or more cores",
        )


def make(name: str) -> Path:
    """A group without a quota."""
    group = find_root() / name
    group.mkdir(exist_ok=True)
    return group


def limit(group: Path, cores: float | None) -> None:
    """What all processes of the group use together, at most, and also at least where they want
    more, for the group goes before everything else on the machine; None: all there is, by turns
    with the rest."""
    quota = -1 if cores is None else round(cores * PERIOD_MICROSECONDS)
    assert quota == -1 or quota >= _LEAST_MICROSECONDS, "`check` has seen it"
    if (group / "cpu.max").exists():
        text = "max" if quota == -1 else str(quota)
        (group / "cpu.max").write_text(f"{text} {PERIOD_MICROSECONDS}")
        (group / "cpu.weight").write_text("100" if quota == -1 else "10000")
        return
    (group / "cpu.cfs_quota_us").write_text("-1")  # periods are checked against the quota
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
    (group / "cpu.cfs_quota_us").write_text(str(quota))
    (group / "cpu.shares").write_text("1024" if quota == -1 else "102400")


def groups(prefix: str) -> list[Path]:
    """All whose names begin so."""
    try:
        root = find_root()
    except ConfigError:  # then there are none
        return []
    return sorted(path for path in root.glob(f"{prefix}*") if path.is_dir())


def remove(group: Path, patience_seconds: float = 5.0) -> None:
    """End what is in the group, and delete it. RunError where it stays."""
    deadline = time.monotonic() + patience_seconds
    while group.exists():
        with suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        with suppress(OSError):
            group.rmdir()
            return
        if time.monotonic() > deadline:
            raise RunError(f"cannot delete the cgroup {group}: something in it does not end")
        time.sleep(0.05)
