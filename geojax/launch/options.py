# SPDX-License-Identifier: Apache-2.0
"""Options of the commands that start a run's processes, as the command line shows them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from geojax.config import ClusterConfig, RunConfig


@dataclass(frozen=True)
class NewRun:
    """Any field of the config can be set."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    out: Path | None = None
    """Run folder; unset: runs/NAME."""


@dataclass(frozen=True)
class TrainSlice(NewRun):
    """Any field of the config can be set."""

    slice: str = ""
    """Train this slice only, the others being other processes; goes on where it has a checkpoint.
    Run folder, if unset: runs/NAME/slices/SLICE."""
    coordinator: str = ""
    """HOST:PORT of the run's coordinator."""


@dataclass(frozen=True)
class ResumeSlice:
    """One slice of the run in a folder that this process can read."""

    run: tyro.conf.Positional[Path]
    """Run folder; the slice's own is slices/NAME in it."""
    slice: str
    """Which."""
    coordinator: str
    """HOST:PORT of the run's coordinator."""
    cluster: ClusterConfig = ClusterConfig()
    """The processes of the slice, where they are several."""


@dataclass(frozen=True)
class ResumeCoordinator:
    """Be the coordinator of a run again."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    port: int | None = None
    """To listen on; unset: the config's."""


@dataclass(frozen=True)
class Launch(NewRun):
    """Any field of the config can be set."""

    restarts: int = 5
    """New starts of each process that dies, in a row, before its slice is left away; or the run,
    where the others are no quorum."""


@dataclass(frozen=True)
class Relaunch:
    """Go on with a run, each slice a process."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    restarts: int = 5
    """New starts of each process that dies, in a row, before its slice is left away; or the run,
    where the others are no quorum."""
