# SPDX-License-Identifier: Apache-2.0
"""Utilisation is of the model's FLOPs and of a GPU that is known for sure."""

import pytest

from geojax.meshes.hardware import GPUS, get_gpu
from geojax.models.config import get_model
from geojax.platform import detect_gpu, mfu

MODEL = get_model("llama-150m")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("A100-SXM-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A6000", None),
        ("NVIDIA GB200", None),
        ("cpu", None),
    ],
)
def test_device_kinds(kind, name):
    assert detect_gpu(kind) == name
    assert name is None or name in GPUS


def test_at_the_peak_it_is_one_and_it_falls_with_the_number_of_gpus():
    peak = get_gpu("h100").bf16_flops_per_second
    tokens_per_second = 4 * peak / MODEL.train_flops_per_token(1024)
    assert mfu(tokens_per_second, MODEL, 1024, 4, "h100") == pytest.approx(1)
    assert mfu(tokens_per_second, MODEL, 1024, 8, "h100") == pytest.approx(0.5)


def test_an_unknown_gpu_has_none():
    assert mfu(1e5, MODEL, 1024, 1, detect_gpu("cpu")) is None
    assert mfu(1e5, MODEL, 1024, 1, "h100-pcie") is None
