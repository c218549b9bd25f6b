# SPDX-License-Identifier: Apache-2.0
"""The step-time model calibrated to GPT models on A100 80GB, and how far a case is from those.

The rows are the 1,440 of `data/ground_truth_single.csv` of VIA-Research/vTrain (MIT): widths 1,024
and 2,048, 12 to 24 layers, sequences of 1,024, micro-batches of 1 to 8, on 2 to 8 GPUs of one node.

They are published as measured. But those without data parallelism are, to five digits, sums of a
time a layer, a micro-batch and a stage, with transfers at exactly the rate that vTrain's simulator
assumes, so all are most likely that simulator's, from kernels profiled on an A100. And they look to
be without recomputation, which their description says was on: one sequence more takes a layer of
width 2,048 1.88 ms, where the matrix products of four forward passes would need 237 TFLOP/s beside
softmax and norms. Their kernels are eager PyTorch's, whose launches cost more than a jitted step's,
and their vocabulary is not padded, which slows the head at tp 1: `recalibrate` for other software.
"""

from geojax.meshes.hardware import GPUS
from geojax.meshes.strategy import Remat
from geojax.meshes.timing import Coefficients, ShapeFactor, ShapeKey, StepCase, TimingModel

CALIBRATED_REMAT: Remat = "none"
"""What the rows are taken to recompute."""

# Both as printed by `python benchmarks/timing.py CSV --print-coefficients`.
COEFFICIENTS = Coefficients(
    matmul=1.382,
    replicated=37.95,
    sharded=7.277,
    launch_seconds=0.001008,
    tp_launch_seconds=5.574e-05,
    tp_link=1.586,
    head_matmul=2.562,
    logits=16.23,
    ends_seconds=0.000616,
    link=0.9714,
    optimizer=45.14,
)
FACTORS = {  # (dim, tp, tokens): (layer, head)
    (1024, 1, 1024): (0.985, 1.342),
    (1024, 1, 2048): (0.967, 1.166),
    (1024, 1, 4096): (1.120, 1.120),
    (1024, 1, 8192): (0.999, 1.221),
    (1024, 2, 1024): (1.046, 1.023),
    (1024, 2, 2048): (1.101, 0.770),
    (1024, 2, 4096): (0.883, 0.751),
    (1024, 2, 8192): (1.089, 0.706),
    (1024, 4, 1024): (0.984, 1.347),
    (1024, 4, 2048): (0.941, 1.196),
    (1024, 4, 4096): (1.078, 1.043),
    (1024, 4, 8192): (1.124, 0.991),
    (1024, 8, 1024): (1.194, 1.019),
    (1024, 8, 2048): (0.975, 1.035),
    (1024, 8, 4096): (0.891, 1.019),
    (1024, 8, 8192): (1.023, 1.024),
    (2048, 1, 1024): (0.941, 1.510),
    (2048, 1, 2048): (0.950, 1.379),
    (2048, 1, 4096): (0.946, 1.358),
    (2048, 1, 8192): (0.882, 1.402),
    (2048, 2, 1024): (1.036, 0.950),
    (2048, 2, 2048): (1.232, 0.778),
    (2048, 2, 4096): (1.072, 0.729),
    (2048, 2, 8192): (0.944, 0.786),
    (2048, 4, 1024): (0.843, 1.364),
    (2048, 4, 2048): (0.744, 1.213),
    (2048, 4, 4096): (1.112, 1.113),
    (2048, 4, 8192): (0.997, 1.017),
    (2048, 8, 1024): (1.146, 1.030),
    (2048, 8, 2048): (0.923, 1.037),
    (2048, 8, 4096): (1.033, 1.080),
    (2048, 8, 8192): (1.069, 1.034),
}

A100 = TimingModel(
    COEFFICIENTS, {ShapeKey(*key): ShapeFactor(*factor) for key, factor in FACTORS.items()}
)
"""Fitted to all rows."""


def extrapolated(case: StepCase) -> str | None:
    """How `case` is unlike the rows that `A100` was fitted to; None where it is like them."""
    model, s, cluster = case.model, case.strategy, case.cluster
    reasons = [
        (cluster.gpu != GPUS["a100-80gb"], "a GPU other than A100 80GB"),
        (s.devices > cluster.gpus_per_node, "several nodes"),
        (s.devices > 8, f"{s.devices} GPUs, not 1 to 8"),
        (model.family != "gpt", f"family {model.family}, not gpt"),
        (not 1024 <= model.dim <= 2048, f"width {model.dim}, not 1024 to 2048"),
        (not 12 <= model.layers <= 24, f"{model.layers} layers, not 12 to 24"),
        (case.seq_len != 1024, f"sequences of {case.seq_len}, not 1024"),
        (s.micro_batch > 8, f"micro-batches of {s.micro_batch}, not 1 to 8"),
        (s.remat != CALIBRATED_REMAT, f"remat {s.remat}, not {CALIBRATED_REMAT}"),
        (s.interleave > 1, f"interleave {s.interleave}, not 1"),
        (s.sharding != "none", f"sharding {s.sharding}, not none"),
    ]
    return "; ".join(text for unlike, text in reasons if unlike) or None
