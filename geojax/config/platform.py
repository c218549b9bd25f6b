# SPDX-License-Identifier: Apache-2.0
"""The process and its platform: compiler and network settings, the cluster, and the hang watch.

None of it changes what a run computes, apart from the order of sums; it decides how fast, in how
much memory, and on which machines.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from geojax.config.base import STRICT, require


@dataclass(frozen=True)
class WatchdogConfig:
    """When silence counts as a hang, which ends the process with the stacks of its threads.

    The limit follows the run: `factor` times the slowest recent interval between signs of life.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    enabled: bool = False
    """For runs that something starts again when they end; a debugger's pause looks like a hang."""
    factor: float = 10.0
    """Multiple of the slowest recent interval."""
    minimum_seconds: float = 300.0
    """The limit is never below it."""
    first_seconds: float = 3600.0
    """The limit until two signs of life have come: start-up and compilation."""

    def __post_init__(self):
        require(
            1 < self.factor < math.inf,
            f"platform.watchdog.factor {self.factor} must be above 1 and finite; use 10",
        )
        require(
            0 < self.minimum_seconds < math.inf,
            f"platform.watchdog.minimum_seconds {self.minimum_seconds} must be above 0 and finite",
        )
        require(
            self.minimum_seconds <= self.first_seconds < math.inf,
            f"platform.watchdog.first_seconds {self.first_seconds} must be finite and at least "
            f"minimum_seconds {self.minimum_seconds}",
        )


@dataclass(frozen=True)
class ClusterConfig:
    """The processes that form one JAX cluster; by default this one alone."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    coordinator: str = ""
    """HOST:PORT of process 0, as all of them reach it; 'auto': what the launcher (Slurm, Open MPI)
    says; empty: a single process."""
    processes: int = 1
    process_id: int | None = None
    """This process's number from 0; the one field that differs between them."""
    connect_seconds: float = 300.0
    """Time for all processes to appear."""

    def __post_init__(self):
        if self.coordinator in ("", "auto"):
            require(
                self.processes == 1 and self.process_id is None,
                f"platform.cluster.processes {self.processes} and process_id {self.process_id} go "
                f"with a coordinator's HOST:PORT, not with {self.coordinator!r}; leave them unset",
            )
        else:
            self.address()
            require(
                self.process_id is not None and 0 <= self.process_id < self.processes,
                f"platform.cluster.process_id {self.process_id} must lie in "
                f"0..{self.processes - 1}, each process another; processes is {self.processes}",
            )
        require(
            1 <= self.connect_seconds < math.inf,
            f"platform.cluster.connect_seconds {self.connect_seconds} must lie in [1, inf)",
        )

    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        require(
            host and port.isdecimal() and 0 < int(port) < 2**16,
            f"platform.cluster.coordinator {self.coordinator!r} must be HOST:PORT, such as "
            "node0:9876, or 'auto'",
        )
        return host.strip("[]"), int(port)


@dataclass(frozen=True)
class PlatformConfig:
    """What must be settled before JAX starts. Settings of GPUs have no effect without one."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    xla_preset: Literal["none", "throughput", "low-memory"] = "none"
    """Compiler flags for GPUs. throughput: larger collectives, moved across the iterations of a
    loop; low-memory: nothing in flight and no graphs. Flags in XLA_FLAGS win."""
    nccl_preset: Literal["none", "ethernet", "infiniband"] = "none"
    """Network between machines. ethernet: TCP over several sockets; infiniband: that or an error,
    never TCP instead. Variables that are set already win."""
    interface: str = ""
    """Network interface of collectives, such as eth0; empty: chosen by NCCL and gloo."""
    memory_fraction: float | None = None
    """Share of a GPU's memory that JAX takes at its start; unset: JAX's default, three quarters."""
    deterministic: bool = False
    """Equal bits from run to run on GPUs, with slower kernels and no tuning of them."""
    compilation_cache: str = "auto"
    """Folder of compiled programs, kept between runs; auto: `xla` in geojax's cache where there is
    a GPU, none on a CPU; empty: none."""
    cluster: ClusterConfig = ClusterConfig()
    watchdog: WatchdogConfig = WatchdogConfig()

    def __post_init__(self):
        require(
            self.memory_fraction is None or 0 < self.memory_fraction <= 1,
            f"platform.memory_fraction {self.memory_fraction} must lie in (0, 1]; use 0.9",
        )
        require(
            not set(self.interface) & set("=^, "),
            f"platform.interface {self.interface!r} must be the name of one interface, such as "
            "eth0",
        )
