# SPDX-License-Identifier: Apache-2.0
"""GPUs by their data sheets, and equal nodes of them.

Invariant: a GPU's figures are its vendor's, dense, never with sparsity. What a step takes on it is
estimated in meshes/timing.py and meshes/memory.py.
"""

from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Gpu:
    """One GPU's published figures."""

    bf16_flops_per_second: float
    """Dense, accumulating in float32."""
    memory_bytes: int
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """Each way, to the other GPUs of its node: NVLink, or PCI Express where there is none."""


GPUS: dict[str, Gpu] = {
    "h100": Gpu(989e12, 80 * 10**9, 3.35e12, 450e9),  # SXM5
    "h200": Gpu(989e12, 141 * 10**9, 4.8e12, 450e9),  # SXM5
    "b200": Gpu(2250e12, 180 * 10**9, 8.0e12, 900e9),  # HGX: 180 of the chip's 192 GB can be used
    "a100-40gb": Gpu(312e12, 40 * 10**9, 1.555e12, 300e9),  # SXM4
    "a100-80gb": Gpu(312e12, 80 * 10**9, 2.039e12, 300e9),  # SXM4
    "l40s": Gpu(362.05e12, 48 * 10**9, 0.864e12, 32e9),
    # A quarter of 1,457 TFLOPS, sparse FP8.
    "rtx-6000-ada": Gpu(364.25e12, 48 * 10**9, 0.96e12, 32e9),
}


NOMINAL = Gpu(
    bf16_flops_per_second=1e11,
    memory_bytes=8 * 10**9,
    memory_bytes_per_second=1e10,
    link_bytes_per_second=5e9,
)
"""Stands for a device without a data sheet here, such as a core of a CPU: units to calibrate in."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs; a node's GPUs are numbered in a row."""

    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = 8
    network_bytes_per_second: float = 25e9
    """Each way between nodes, for one GPU: 200 Gbit/s, a DGX A100's adapter a GPU."""

    def __post_init__(self):
        for name in ("nodes", "gpus_per_node", "network_bytes_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"cluster {name} {getattr(self, name)} must be above 0")

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def ring_bytes_per_second(self, size: int, stride: int) -> float:
        """Rate each way of a ring over `size` GPUs, every `stride`-th one.

        A ring that leaves the node enters and leaves it once, over the adapters of all its members
        there; rings beside it have adapters of their own.
        """
        if size * stride <= self.gpus_per_node or size == 1:
            return self.gpu.link_bytes_per_second
        members = min(max(self.gpus_per_node // stride, 1), size)
        return min(self.gpu.link_bytes_per_second, members * self.network_bytes_per_second)


def get_gpu(name: str) -> Gpu:
    """The named GPU; ValueError with the nearest name where there is none."""
    if name in GPUS:
        return GPUS[name]
    near = get_close_matches(name.lower(), GPUS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(GPUS)}"
    raise ValueError(f"no GPU named {name!r}; {hint}")
