# SPDX-License-Identifier: Apache-2.0
"""The processes of one slice, when they come together.

Invariant: a slice trains in as many processes as its config says, or not at all.
"""

import threading
from contextlib import AbstractContextManager

from geojax import platform
from geojax.config import PlatformConfig, SliceConfig, require
from geojax.geomesh.relay import Relay, connect


def join(config: PlatformConfig, slice_: SliceConfig) -> None:
    """Set the platform up and join the slice's JAX cluster, if it is one. ConfigError unless that
    has the slice's processes."""
    cluster = config.cluster
    if cluster.coordinator != "auto":
        _require_count(slice_, cluster.processes)
    platform.apply(config)
    if cluster.coordinator:
        platform.initialize(config)
        import jax

        _require_count(slice_, jax.process_count())


def connected(slice_: SliceConfig, stop: threading.Event) -> AbstractContextManager[Relay]:
    """The relay between the processes of a slice that `join` has brought together."""
    if slice_.processes == 1:
        return Relay(0, {}, stop, f"slice {slice_.name}")
    return connect(f"slice {slice_.name}", platform.first_host(), stop)


def _require_count(slice_: SliceConfig, found: int) -> None:
    wanted = slice_.processes
    fix = f"set processes of slice {slice_.name} to {found}, or start {wanted}"
    if found == 1 and wanted > 1:
        fix = (
            "start each with --platform.cluster.coordinator HOST:PORT, with "
            f"--platform.cluster.processes {wanted} and a --platform.cluster.process-id of its "
            "own, or under Slurm or Open MPI with --platform.cluster.coordinator auto"
        )
    require(
        found == wanted,
        f"slice {slice_.name}: its config says processes {wanted}, and there are {found}; {fix}",
    )
