# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs utilisation: the share of the GPUs' peak that a training step makes use of.

After Chowdhery et al. 2022, "PaLM": only the FLOPs that the model itself needs count, so that
recomputation lowers the figure.
"""

import re

from geojax.meshes.hardware import GPUS
from geojax.models.config import TransformerConfig

_KINDS: tuple[tuple[str, str], ...] = (
    (r"H100 80GB HBM3", "h100"),
    (r"H200", "h200"),
    (r"B200", "b200"),
    (r"A100-(SXM4?|PCIE)-40GB", "a100-40gb"),
    (r"A100-SXM4?-80GB|A100 80GB PCIe", "a100-80gb"),  # the PCIe cards compute as fast
    (r"L40S", "l40s"),
    (r"RTX 6000 Ada Generation", "rtx-6000-ada"),
)
"""What JAX calls a GPU, after 'NVIDIA'. Others of the same chip have other peaks, and are left out:
H100 PCIe and NVL, H200 NVL, GB200, MIG parts."""


def detect_gpu(device_kind: str) -> str | None:
    """The key in GPUS of a JAX device's `device_kind`; None where it is not one of them."""
    bare = device_kind.removeprefix("NVIDIA ")
    return next((name for kind, name in _KINDS if re.fullmatch(kind, bare)), None)


def mfu(
    tokens_per_second: float,
    model: TransformerConfig,
    seq_len: int,
    gpus: int,
    gpu_name: str | None,
) -> float | None:
    """Share of the bfloat16 peak of `gpus` GPUs together; None for a GPU that GPUS does not have.

    `tokens_per_second` is that of all of them; causal attention counts as half.
    """
    gpu = GPUS.get(gpu_name) if gpu_name else None
    if gpu is None:
        return None
    flops_per_second = tokens_per_second * model.train_flops_per_token(seq_len)
    return flops_per_second / (gpus * gpu.bf16_flops_per_second)
