# SPDX-License-Identifier: Apache-2.0
"""Seconds of one training step under a strategy: a roofline with calibrated slowdowns.

A pipeline of pp stages and v chunks a stage works m micro-batches off in m v + pp - 1 ticks
(Narayanan et al. 2021); the last stage has the head besides its layers, and sets the pace. A layer
takes what the GPU needs for it, or what launching its kernels takes, whichever is longer, rounded
where they meet:

    layer = (launch^3 + (compute + tp)^3)^(1/3)
    step  = m (layers a stage * layer + head + transfer) + fill and drain + dp + optimizer

Work is counted from the shapes, divided by the figure of the data sheet that bounds it, and
multiplied by a slowdown; launches take the same time on every GPU. Slowdowns are fitted to timed
steps (meshes/timing_fit.py), and so is a factor for every (width, tp, tokens) among them: how fast
a matrix product of given sides runs is no smooth function of them.

Invariant: all coefficients are positive, so all parts of a step are at least 0, a GPU with better
figures is never slower, and shapes that were not timed are predicted by the roofline alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from geojax.meshes.hardware import Cluster
from geojax.meshes.strategy import Strategy
from geojax.models.config import TransformerConfig

SHARPNESS = 3
"""Power by which launches and work are joined: 1 adds them, infinity takes the larger."""
COMPUTE_BYTES = 2
"""An element of activations, and of gradients on their way between copies."""
PARTS = ("compute", "overhead", "tp", "pp", "bubble", "dp", "optimizer")


@dataclass(frozen=True)
class StepCase:
    """One training step: what is trained, how it is laid out, on what."""

    model: TransformerConfig
    seq_len: int
    strategy: Strategy
    cluster: Cluster

    def __post_init__(self):
        if self.seq_len < 1:
            raise ValueError(f"seq_len {self.seq_len} must be at least 1")
        s, cluster = self.strategy, self.cluster
        if s.devices > cluster.gpus:
            nodes = math.ceil(s.devices / cluster.gpus_per_node)
            raise ValueError(
                f"strategy {s} wants {s.devices} GPUs, and the cluster has {cluster.gpus}; use "
                f"{nodes} nodes or more"
            )
        if s.micro_batches < 1:
            raise ValueError(
                f"global_batch {s.global_batch} is less than dp x micro_batch "
                f"{s.dp * s.micro_batch}; use {s.dp * s.micro_batch} or more"
            )


@dataclass(frozen=True)
class Coefficients:
    """How much longer than by the data sheet a kind of work takes, and what launches take."""

    matmul: float
    """Matrix products of the layers, over the peak."""
    replicated: float
    """Passes over [tokens, dim] activations, which tp does not share: norms, residuals, dropout."""
    sharded: float
    """Passes over MLP-wide activations and attention scores, which it does."""
    launch_seconds: float
    """A layer's forward pass; the backward pass launches twice as much."""
    tp_launch_seconds: float
    """What every further device of a tensor-parallel group adds to that."""
    tp_link: float
    """All-reduces inside the layers, over the links' rate."""
    head_matmul: float
    """The head's matrix product, over the peak."""
    logits: float
    """Passes over float32 [tokens, vocabulary]."""
    ends_seconds: float
    """Launches of the embedding, and as many of head and loss, a micro-batch."""
    link: float
    """Large messages, over the links' rate: between stages, and gradients over dp."""
    optimizer: float
    """Bytes read and written a parameter by the update, over the memory's rate."""


class ShapeKey(NamedTuple):
    """What the speed of a layer's kernels hangs on, beside the roofline."""

    dim: int
    tp: int
    tokens: int


class ShapeFactor(NamedTuple):
    """Measured over roofline, for one shape."""

    layer: float
    head: float


@dataclass(frozen=True)
class TimingModel:
    """A calibrated model of step times."""

    coefficients: Coefficients
    factors: Mapping[ShapeKey, ShapeFactor] = field(default_factory=dict)
    """Of the shapes that were timed; 1 for all others."""

    def seconds(self, case: StepCase) -> float:
        return sum(self.breakdown(case).values())

    def seconds_of(self, cases: Sequence[StepCase]) -> Float[np.ndarray, " n"]:
        """Seconds of each case."""
        factors = np.array([self.factors.get(shape_key(case), (1.0, 1.0)) for case in cases])
        parts = step_parts(ideal_seconds(cases), self.coefficients, *factors.reshape(-1, 2).T)
        return sum(parts.values(), np.zeros(len(cases)))

    def breakdown(self, case: StepCase) -> dict[str, float]:
        """Seconds by part; they sum to the step.

        compute: matrix products and memory traffic of one stage's work; overhead: what waiting for
        launches adds; tp, dp: collectives; pp: transfers between stages; bubble: filling and
        draining the pipeline, whatever is done in it; optimizer: the update.
        """
        layer, head = self.factors.get(shape_key(case), (1.0, 1.0))
        work = ideal_seconds([case])
        parts = step_parts(work, self.coefficients, np.array([layer]), np.array([head]))
        return {name: float(value[0]) for name, value in parts.items()}


class Work(NamedTuple):
    """Ideal seconds of the kinds of work, n cases each, and how often they are done."""

    matmul: Float[np.ndarray, " n"]
    replicated: Float[np.ndarray, " n"]
    sharded: Float[np.ndarray, " n"]
    tp_link: Float[np.ndarray, " n"]
    """These four: a layer and micro-batch on one device, forward and backward."""
    head_matmul: Float[np.ndarray, " n"]
    logits: Float[np.ndarray, " n"]
    pp_link: Float[np.ndarray, " n"]
    """These three: a micro-batch, forward and backward."""
    dp_link: Float[np.ndarray, " n"]
    optimizer: Float[np.ndarray, " n"]
    """A step; the optimizer's a byte a parameter."""
    passes: Float[np.ndarray, " n"]
    """Forward passes whose launches a micro-batch takes, a backward pass counting as two."""
    layers: Float[np.ndarray, " n"]
    """A stage."""
    micro_batches: Float[np.ndarray, " n"]
    tp: Float[np.ndarray, " n"]
    pp: Float[np.ndarray, " n"]
    interleave: Float[np.ndarray, " n"]


def shape_key(case: StepCase) -> ShapeKey:
    tokens = case.strategy.micro_batch * case.seq_len
    return ShapeKey(case.model.dim, case.strategy.tp, tokens)


def ideal_seconds(cases: Sequence[StepCase]) -> Work:
    """The work of each case at the rates of its data sheet."""
    rows = [_ideal(case) for case in cases]
    return Work(**{name: np.array([row[name] for row in rows], float) for name in Work._fields})


def step_parts(
    work: Work,
    coefficients: Coefficients,
    layer_factor: Float[np.ndarray, " n"],
    head_factor: Float[np.ndarray, " n"],
) -> dict[str, Float[np.ndarray, " n"]]:
    """Seconds of n cases, by part; the factors are those of their shapes."""
    c = coefficients
    tp = layer_factor * c.tp_link * work.tp_link
    compute = layer_factor * (
        c.matmul * work.matmul + c.replicated * work.replicated + c.sharded * work.sharded
    )
    launch = work.passes * (c.launch_seconds + (work.tp - 1) * c.tp_launch_seconds)
    launch = layer_factor * launch
    layer = ((compute + tp) ** SHARPNESS + launch**SHARPNESS) ** (1 / SHARPNESS)
    head = head_factor * (c.head_matmul * work.head_matmul + c.logits * work.logits)

    # Embedding and head are on one stage, or on the first and the last, which then is the slower.
    staged = work.pp > 1
    ends = np.where(staged, c.ends_seconds, 2 * c.ends_seconds)
    chunk = work.layers * layer / work.interleave + c.link * work.pp_link
    return {
        "compute": work.micro_batches * (work.layers * compute + head),
        "overhead": work.micro_batches * (work.layers * (layer - compute - tp) + ends),
        "tp": work.micro_batches * work.layers * tp,
        "pp": work.micro_batches * work.interleave * c.link * work.pp_link,
        "bubble": (work.pp - 1) * chunk + np.where(staged, c.ends_seconds, 0.0),
        "dp": c.link * work.dp_link,
        "optimizer": c.optimizer * work.optimizer,
    }


def _ideal(case: StepCase) -> dict[str, float]:
    model, s, gpu = case.model, case.strategy, case.cluster.gpu
    tokens = s.micro_batch * case.seq_len
    table = model.padded_vocab * model.dim
    bert_head = model.dim**2 if model.family == "bert" else 0
    layer_params = (model.matmul_params - model.vocab_size * model.dim - bert_head) / model.layers
    mlp_width = model.mlp_dim * (2 if model.family == "llama" else 1)

    # Forward is one pass, backward two; recomputation repeats the forward pass, or all of it but
    # the matrix products.
    matmul_passes = 4 if s.remat == "full" else 3
    other_passes = 3 if s.remat == "none" else 4
    # Scores that a causal mask hides are computed too.
    layer_flops = matmul_passes * tokens * (2 * layer_params + 4 * case.seq_len * model.dim) / s.tp
    replicated_bytes = other_passes * COMPUTE_BYTES * tokens * model.dim
    sharded_elements = tokens * (mlp_width + model.heads * case.seq_len) / s.tp
    sharded_bytes = other_passes * COMPUTE_BYTES * sharded_elements
    # Two all-reduces a pass in either direction (Shoeybi et al. 2019).
    all_reduces = 6 if s.remat == "full" else 4
    activation_bytes = COMPUTE_BYTES * tokens * model.dim
    tp_bytes = all_reduces * activation_bytes * 2 * (s.tp - 1) / s.tp

    stage_params = layer_params * model.layers / s.pp / s.tp + table / s.tp
    if s.pp == 1 and not model.tied:
        stage_params += table / s.tp
    # ZeRO-1 scatters the sum of the gradients and gathers parameters, as many bytes as the
    # all-reduce; FSDP gathers them once more.
    dp_bytes = COMPUTE_BYTES * stage_params * 2 * (s.dp - 1) / s.dp
    dp_bytes *= 1.5 if s.sharding == "all" else 1.0
    updated = stage_params / (1 if s.sharding == "none" else s.dp)

    ring, memory = case.cluster.ring_bytes_per_second, gpu.memory_bytes_per_second
    between_stages = gpu.link_bytes_per_second
    if s.devices > case.cluster.gpus_per_node:
        between_stages = min(between_stages, case.cluster.network_bytes_per_second)
    return {
        "matmul": layer_flops / gpu.bf16_flops_per_second,
        "replicated": replicated_bytes / memory,
        "sharded": sharded_bytes / memory,
        "tp_link": tp_bytes / ring(s.tp, 1),
        "head_matmul": 6 * tokens * table / s.tp / gpu.bf16_flops_per_second,
        "logits": 4 * tokens * model.padded_vocab / s.tp / memory,
        "pp_link": 2 * activation_bytes * (s.pp > 1) / between_stages,
        "dp_link": dp_bytes / ring(s.dp, s.tp),
        "optimizer": updated / memory,
        "passes": other_passes,
        "layers": model.layers / s.pp,
        "micro_batches": s.micro_batches,
        "tp": s.tp,
        "pp": s.pp,
        "interleave": s.interleave,
    }
