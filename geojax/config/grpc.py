# SPDX-License-Identifier: Apache-2.0
"""Slices as processes that talk over gRPC: addresses, TLS, and when to go on without a slice."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from geojax.config.base import STRICT, require

_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class GrpcConfig:
    """One process's side of exchange.engine grpc. Addresses and files may differ between processes;
    the rest may not."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    bind: str = "127.0.0.1"
    """Address of this machine that the process listens on."""
    port: int = 0
    """To listen on; 0: any free one."""
    advertise: str = ""
    """Host name or address by which the others reach it, where that is not `bind`."""
    tls_ca: str = ""
    """File (PEM) of the authority that signed the certificates of all; empty: no TLS."""
    tls_cert: str = ""
    """File of this process's certificate, for the name in `advertise`."""
    tls_key: str = ""
    """File of its key."""
    quorum: float = 0.5
    """A round needs more than this share of all slices."""
    deadline_mads: float = 6.0
    """A slice is late, and the round goes on without it, after the median time that slices took
    plus so many standard deviations (from the median absolute deviation)."""
    deadline_floor_seconds: float = 10.0
    """And this long after the median, at least."""
    lease_seconds: float = 20.0
    """Silence after which a slice counts as dead."""
    join_seconds: float = 300.0
    """For a slice to start, or to evaluate, before the others go on."""
    call_seconds: float = 30.0
    """For a call that moves little; streams get more by their size."""

    def __post_init__(self):
        require(0 <= self.port < 2**16, f"grpc.port {self.port} must lie in 0..{2**16 - 1}")
        require(self.bind, "grpc.bind is empty; give an address of this machine")
        require(
            self.bind not in _WILDCARDS or self.advertise,
            f"grpc.bind {self.bind} is every address of this machine, and none that others could "
            "use; say in grpc.advertise by which name they reach it",
        )
        tls = [bool(x) for x in (self.tls_ca, self.tls_cert, self.tls_key)]
        require(
            all(tls) or not any(tls),
            "grpc.tls_ca, tls_cert and tls_key go together; give all three, or none",
        )
        require(
            0.5 <= self.quorum < 1,
            f"grpc.quorum {self.quorum} must lie in [0.5, 1): under a half, two parts of a cut "
            "network would both go on",
        )
        for name in ("deadline_mads", "deadline_floor_seconds"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"grpc.{name} {value} must be at least 0 and finite")
        for name in ("lease_seconds", "join_seconds", "call_seconds"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"grpc.{name} {value} must be above 0 and finite")
