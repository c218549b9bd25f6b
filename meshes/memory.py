# SPDX-License-Identifier: Apache-2.0
"""Estimated memory of one device during a training step, by the same rules as the program.

State is counted from the sharding rules, exactly. What a step adds follows from what the program
does (meshes/gradient.py): sums of gradients, what layers keep for the backward pass by the policy
of recomputation, and the larger of two moments: the loss, with its logits, before the backward pass
has begun, or one layer's backward pass at its end, when all gradients are there.
`benchmarks/memory.py` compares it with XLA's own account of compiled steps.

Invariant: parts are at least 0 and sum to the total.
"""

import math
from dataclasses import dataclass, fields
from functools import cache
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from geojax.meshes.axes import DATA, PIPELINE, TENSOR
from geojax.meshes.rules import make_rules, state_specs, vocab_axes
from geojax.meshes.strategy import Sharding, Strategy
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Params, abstract_params

STATED_ERROR = 0.15
"""Of 9 in 10 sampled strategies; `benchmarks/memory.py` measures it."""
COMPUTE_BYTES, STATE_BYTES = 2, 4
PROBABILITY_BYTES = 13
"""What a layer's pass holds of a probability that dropout writes out: scores and probabilities in
float32, twice in 16 bits, and the mask."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one device at the peak of a step."""

    state_bytes: int
    """Parameters and optimizer state, float32."""
    gradients_bytes: int
    """Sums, and those of one micro-batch, float32."""
    kept_bytes: int
    """What layers keep for the backward pass."""
    layer_bytes: int
    """One layer's pass, with the weights that it gathers."""
    loss_bytes: int
    """Logits, their gradient and the table."""
    pipeline_bytes: int
    """Inputs and outputs of the stages for all micro-batches."""

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


class Local(NamedTuple):
    """Parameters of one device: blocks, and the rest."""

    blocks: float
    rest: float

    @property
    def all(self) -> float:
        return self.blocks + self.rest


def step_memory(
    model: TransformerConfig, seq_len: int, strategy: Strategy, optimizer_slots: int = 2
) -> StepMemory:
    """Memory of a step in bfloat16 with cuDNN's attention, or the reference where probabilities are
    dropped.

    `optimizer_slots`: values a parameter that the optimizer keeps, 2 for AdamW.
    """
    s = strategy
    whole, stored, final = _local_params(model, s.dp, s.tp, s.pp, s.sharding)
    summed = 1 if s.pp == 1 and s.micro_batches > 1 else 0
    chunk_layers = model.layers // (s.pp * s.interleave)
    ticks = s.micro_batches * s.interleave + s.pp - 1 if s.pp > 1 else 1
    kept = _kept_bytes(model, seq_len, s) * chunk_layers * ticks
    layer_params = whole.blocks / (model.layers // s.pp)
    layer = _layer_bytes(model, seq_len, s) + COMPUTE_BYTES * layer_params
    shards = math.prod({TENSOR: s.tp, PIPELINE: s.pp}[a] for a in vocab_axes(model, s))
    table = model.padded_vocab * model.dim / shards
    logits = STATE_BYTES * s.micro_batch * seq_len * model.padded_vocab / shards
    # The gradient of the table is there with the logits; of a whole one they take turns.
    loss = COMPUTE_BYTES * table + logits + STATE_BYTES * table
    if shards == 1:
        loss += max(0.0, logits - STATE_BYTES * table)
    if s.sharding == "all":
        layer += (COMPUTE_BYTES + STATE_BYTES) * layer_params + COMPUTE_BYTES * table
    state = STATE_BYTES * (stored.all + optimizer_slots * final.all)
    blocks, rest = STATE_BYTES * stored.blocks, STATE_BYTES * stored.rest
    if s.pp == 1:
        sums = summed * (blocks + rest)
        at_loss = (sums + summed * blocks / 2, kept, 0.0, loss, 0.0)
        at_end = (sums + blocks + (0 if summed else rest), kept, layer, 0.0, 0.0)
    else:
        # A tick's gradients beside the sums, of one chunk where a stage has several.
        ticked = blocks if s.interleave == 1 else 2 * blocks / s.interleave
        stream = COMPUTE_BYTES * s.micro_batches * _rows(seq_len, s) * model.dim
        at_loss = (rest, kept, 0.0, loss, 3 * stream)
        again = kept / ticks  # what one tick computes once more
        at_end = (blocks + ticked + 2 * rest, kept + again, layer, 0.0, 3 * stream)
    return StepMemory(round(state), *(round(x) for x in max(at_loss, at_end, key=sum)))


def _rows(seq_len: int, s: Strategy) -> float:
    """Rows of the residual stream that a device has of one micro-batch."""
    tokens = s.micro_batch * seq_len
    return tokens / s.tp if seq_len % s.tp == 0 else tokens


def _kept_bytes(model: TransformerConfig, seq_len: int, s: Strategy) -> float:
    """What one layer keeps of one micro-batch: see meshes.gradient.keeps."""
    tokens = s.micro_batch * seq_len
    stream = COMPUTE_BYTES * _rows(seq_len, s) * model.dim
    kept = stream
    if s.remat == "full":
        return kept
    kv_width = model.kv_heads * model.head_dim
    mlp_width = model.mlp_dim * (2 if model.family == "llama" else 1)
    kept += COMPUTE_BYTES * tokens * (model.dim + 2 * kv_width + mlp_width) / s.tp
    kept += stream * (2 if model.family == "bert" else 1)
    if s.remat == "matmuls":
        return kept
    if model.attention_dropout:
        kept += tokens * seq_len * model.heads / s.tp  # masks of probabilities
    else:
        kept += (COMPUTE_BYTES * model.dim + 4 * model.heads) * tokens / s.tp
    if s.tp > 1 and seq_len % s.tp == 0:
        kept += 2 * COMPUTE_BYTES * tokens * model.dim  # gathered before either part
    if model.dropout:
        kept += 2 * _rows(seq_len, s) * model.dim  # masks
    return kept


def _layer_bytes(model: TransformerConfig, seq_len: int, s: Strategy) -> float:
    """Activations of one layer's backward pass."""
    tokens = s.micro_batch * seq_len
    kv_width = model.kv_heads * model.head_dim
    size = COMPUTE_BYTES * tokens * (3 * model.mlp_dim + model.dim + 2 * kv_width) / s.tp
    size += 2 * COMPUTE_BYTES * tokens * model.dim
    if model.attention_dropout:
        size += PROBABILITY_BYTES * tokens * seq_len * model.heads / s.tp
    return size


@cache
def _local_params(
    model: TransformerConfig, dp: int, tp: int, pp: int, sharding: Sharding
) -> tuple[Local, Local, Local]:
    """Under tp and pp alone; as parameters are kept; as optimizer state is."""
    strategy = Strategy(dp, tp, pp, 1, dp * pp, sharding=sharding)
    rules = make_rules(model, strategy)
    sizes = {DATA: dp, TENSOR: tp, PIPELINE: pp}

    def count(specs: Params) -> float:
        leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        return sum(n / _parts(spec, sizes) for n, spec in zip(shapes, leaves, strict=True))

    found = []
    for specs in (jax.tree.map(lambda rule: rule.model, rules), *state_specs(rules, strategy)):
        parts = []
        for blocks in (True, False):
            shapes = jax.tree.leaves(_only(_sizes(model), blocks))
            parts.append(count(_only(specs, blocks)))
        found.append(Local(*parts))
    return found[0], found[1], found[2]


def _only(tree: Params, blocks: bool) -> Params:
    return {name: x for name, x in tree.items() if (name == "blocks") == blocks}


def _parts(spec: PartitionSpec, sizes: dict[str, int]) -> int:
    names = [a for axis in spec for a in (axis if isinstance(axis, tuple) else (axis,)) if a]
    return math.prod(sizes[name] for name in names)


@cache
def _sizes(model: TransformerConfig) -> Params:
    return jax.tree.map(lambda x: math.prod(x.shape), abstract_params(model))
