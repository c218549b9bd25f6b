# SPDX-License-Identifier: Apache-2.0
"""GPUs by their data sheets, and estimates of a training step's time and memory on them.

Invariant: a figure here is either a vendor's (dense, never with sparsity) or an estimate that says
so. The estimates are for the modelled clock and for plans; a real run measures both.
"""

import math
from dataclasses import dataclass
from difflib import get_close_matches

from geojax.models.config import TransformerConfig

MODEL_FLOPS_UTILIZATION = 0.4
"""Share of the peak that matmuls reach, the same for every GPU: an assumption."""
LAYER_LAUNCH_SECONDS = 150e-6
"""Time a layer costs at any size, about 30 kernels of 5 us: an assumption."""


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


def step_seconds(model: TransformerConfig, gpu: Gpu, gpus: int, batch: int, seq_len: int) -> float:
    """Estimated seconds of one training step of `batch` sequences on `gpus` GPUs, in bfloat16.

    Launches + matmuls at MODEL_FLOPS_UTILIZATION of the peak + memory traffic, which kernels
    between the matmuls wait for: activations are written once and read once; parameters, gradients
    and one slot of optimizer state, all float32, are each read and written once. The GPUs share the
    batch, the fullest sets the pace, and their all-reduce is hidden behind the backward pass.
    """
    per_gpu = math.ceil(batch / gpus)
    flops = per_gpu * seq_len * model.train_flops_per_token(seq_len)
    traffic_bytes = 2 * (3 * 4 * model.num_params + _activation_bytes(model, per_gpu, seq_len, 2))
    return (
        model.layers * LAYER_LAUNCH_SECONDS
        + flops / (gpu.bf16_flops_per_second * MODEL_FLOPS_UTILIZATION)
        + traffic_bytes / gpu.memory_bytes_per_second
    )


def step_bytes(
    model: TransformerConfig,
    batch_per_device: int,
    seq_len: int,
    *,
    compute_bytes: int = 2,
    optimizer_slots: int = 1,
    micro_batch: int | None = None,
) -> int:
    """Estimated peak memory of a training step on one device that holds the whole model.

    Float32 parameters, gradients and optimizer state (`optimizer_slots` values a parameter: 1 for
    Lion, 2 for AdamW), and the activations of the sequences computed at once: `micro_batch`, or the
    whole batch. No recomputation; `compute_bytes` is the size of an activation.
    """
    at_once = min(micro_batch or batch_per_device, batch_per_device)
    state = 4 * (2 + optimizer_slots) * model.num_params
    return state + _activation_bytes(model, at_once, seq_len, compute_bytes)


def _activation_bytes(
    model: TransformerConfig, batch: int, seq_len: int, compute_bytes: int
) -> int:
    """Bytes kept from the forward pass for the backward one.

    Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", for
    this family: no dropout masks, grouped keys and values, a gated MLP, a float32 softmax. Elements
    a token and layer: input and output of two norms, queries and attention output (6 dim), keys and
    values, and gate, its SiLU, up and their product (4 mlp_dim); an attention probability is kept
    as the float32 softmax and as the matmul's input. Then float32 logits and their gradient.
    """
    elements = 6 * model.dim + 2 * model.kv_heads * model.head_dim + 4 * model.mlp_dim
    attention_bytes = model.heads * seq_len * (4 + compute_bytes)
    layers_bytes = model.layers * (elements * compute_bytes + attention_bytes)
    return batch * seq_len * (layers_bytes + 2 * 4 * model.vocab_size)
