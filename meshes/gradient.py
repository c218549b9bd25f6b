# SPDX-License-Identifier: Apache-2.0
"""Loss and gradient of a batch under a strategy, as one shard_map over all its axes.

Invariant: sums, never means: the loss is summed over loss-bearing tokens, so its gradient is a sum
over micro-batches and copies whatever their tokens, and the caller divides once by the tokens of
the whole batch. Each device differentiates its own share of that sum (see models/collectives.py);
gradients are added up over devices once a step, after the last micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from geojax.meshes.axes import DATA, PIPELINE, TENSOR
from geojax.meshes.pipeline import run_pipeline
from geojax.meshes.rules import Rule, make_rules, state_specs, vocab_axes
from geojax.meshes.strategy import Remat, Strategy
from geojax.models.attention import attend, attend_cudnn
from geojax.models.collectives import Collectives, vocab_nats
from geojax.models.config import TransformerConfig
from geojax.models.dropout import KEPT_MASK, Dropout
from geojax.models.transformer import Inputs, Params, Transformer

_LAYER_INPUT = "layer input"
_SUMS = ("reduce_scatter", "psum", "psum_invariant")
_ATTENTION = "dot_product_attention_fwd"  # start of the name of cuDNN's kernel


class Sequences(NamedTuple):
    """Arrays [m, b, t] of a batch, `samples` [m, b]: the same fields as geojax.data.Batch."""

    tokens: Any
    targets: Any
    weights: Any
    segments: Any
    positions: Any
    samples: Any


class LossSums(NamedTuple):
    """Over the whole batch."""

    nats: Float[Array, ""]
    tokens: Float[Array, ""]
    """Loss-bearing ones."""


@dataclass(frozen=True)
class ShardedModel:
    """A model laid over a mesh by a legal strategy."""

    config: TransformerConfig
    strategy: Strategy
    mesh: Mesh
    dtype: str
    """Of activations."""
    documents: bool
    """Whether positions see their own segment only."""
    seq_len: int

    @cached_property
    def rules(self) -> Params:
        return make_rules(self.config, self.strategy)

    @property
    def batch_spec(self) -> PartitionSpec:
        """Of batch arrays [m, b, ...]."""
        return PartitionSpec(None, DATA) if self.strategy.dp > 1 else PartitionSpec()

    def gradient(self, params: Params, batch: Sequences, key: Array) -> tuple[LossSums, Params]:
        """Sums, and the gradient of `nats` laid out as `state_specs` says of optimizer state.

        `key`: of this step's dropout. Traced under jit.
        """
        param_specs, final_specs = state_specs(self.rules, self.strategy)

        def body(params, batch, key):
            params = jax.tree.map(self._collectives.vary, params)
            sums, grads = self._accumulate(params, batch, key)
            return self._total(sums), jax.tree.map(self._reduce, grads, self.rules)

        specs = (param_specs, jax.tree.map(lambda _: self.batch_spec, batch), PartitionSpec())
        return self._shard_map(body, specs, (PartitionSpec(), final_specs))(params, batch, key)

    def loss(self, params: Params, batch: Sequences) -> LossSums:
        """Sums over a batch, nothing dropped."""
        param_specs, _ = state_specs(self.rules, self.strategy)

        def body(params, batch):
            params = jax.tree.map(self._collectives.vary, params)
            if self.strategy.pp > 1:
                nats, tokens = self._local_loss(params, batch, None)
                return self._total(LossSums(nats, tokens))

            def add(total, micro):
                nats, tokens = self._local_loss(
                    params, jax.tree.map(lambda x: x[None], micro), None
                )
                return LossSums(total.nats + nats, total.tokens + tokens), None

            return self._total(jax.lax.scan(add, self._zero_sums(params), batch)[0])

        specs = (param_specs, jax.tree.map(lambda _: self.batch_spec, batch))
        return self._shard_map(body, specs, PartitionSpec())(params, batch)

    def _shard_map(self, body: Callable[..., Any], in_specs: Any, out_specs: Any):
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    @cached_property
    def _collectives(self) -> Collectives:
        s = self.strategy
        sizes = {PIPELINE: s.pp, DATA: s.dp, TENSOR: s.tp}
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return Collectives(
            axes=tuple(axis for axis, size in sizes.items() if size > 1),
            tp=TENSOR if s.tp > 1 else None,
            tp_size=s.tp,
            vocab=vocab_axes(self.config, s),
            sequence=s.tp > 1 and self.seq_len % s.tp == 0,
            # XLA's CPU backend aborts on sums of 16-bit floats between devices.
            sum_dtype=jnp.promote_types(self.dtype, jnp.float32) if on_cpu else None,
        )

    @cached_property
    def _model(self) -> Transformer:
        gpu = self.mesh.devices.flat[0].platform in ("gpu", "cuda")
        fused = gpu and self.dtype == "bfloat16" and not self.config.attention_dropout
        return Transformer(self.config, self._collectives, attend_cudnn if fused else attend)

    @property
    def _segmented(self) -> bool:
        """Whether some positions of a sequence must not see others of it: of other documents, or,
        where all see all, padding."""
        return self.documents or not self.config.causal

    @property
    def _copies(self) -> int:
        """Devices that compute the same loss of the same tokens."""
        return self.strategy.tp * self.strategy.pp

    def _accumulate(self, params: Params, batch: Sequences, key: Array):
        """This device's share of the sums, and their gradient for its copy of the parameters."""

        def share(params, batch):
            nats, tokens = self._local_loss(params, batch, key)
            return nats / self._copies, LossSums(nats, tokens)

        gradient = jax.grad(share, has_aux=True)
        if self.strategy.pp > 1:
            grads, sums = gradient(params, batch)
            return sums, grads

        def add(total, micro):
            micro = jax.tree.map(lambda x: x[None], micro)
            grads, sums = gradient(params, micro)
            return jax.tree.map(jnp.add, total, (sums, grads)), None

        zero = (self._zero_sums(params), jax.tree.map(jnp.zeros_like, params))
        return jax.lax.scan(add, zero, batch)[0]

    def _local_loss(self, params: Params, batch: Sequences, key: Array | None):
        """Sums over this copy's sequences, the same on all its devices; batch [m, b, t]."""
        rest = {name: x for name, x in params.items() if name != "blocks"}
        rest = self._gather(rest, {k: r for k, r in self.rules.items() if k != "blocks"})

        def inputs(positions, segments, samples) -> Inputs:
            dropout = None
            if key is not None and (self.config.dropout or self.config.attention_dropout):
                dropout = Dropout(key, samples, 0)
            return Inputs(positions, segments if self._segmented else None, dropout)

        def embed(tokens, side):
            return self._model.embed(rest, tokens, inputs(*side), self.dtype)

        def layers(weights, x, numbers, side):
            seen = inputs(*side)
            rotary = self._model.rotary(seen)

            def layer(x, item):
                weights, number = item
                weights = self._gather(weights, self.rules["blocks"], stacked=True)
                return self._model.layer(weights, x, number, rotary, seen), None

            return jax.lax.scan(self._remat(layer), x, (weights, numbers))[0]

        def nats(rest, x, targets, weights):
            logits = self._model.logits(rest, x)
            return jnp.sum(vocab_nats(logits, targets, self._collectives) * weights)

        side = (batch.positions, batch.segments, batch.samples)
        if self.strategy.pp == 1:
            one = jax.tree.map(lambda x: x[0], (batch, side))
            batch, side = one
            numbers = jnp.arange(self.config.layers)
            x = layers(params["blocks"], embed(batch.tokens, side), numbers, side)
            return nats(rest, x, batch.targets, batch.weights), jnp.sum(batch.weights)

        first = jax.lax.map(lambda item: embed(*item), (batch.tokens, side))
        last = run_pipeline(
            layers,
            params["blocks"],
            first,
            side,
            self.config.layers,
            self.strategy,
            self._collectives,
            self._keep,
        )

        # Logits of one micro-batch at a time are computed again, not kept for all.
        again = jax.checkpoint(nats, prevent_cse=False)

        def add(total, item):
            return total + again(rest, *item), None

        zero = self._zero_sums(params).nats
        total, _ = jax.lax.scan(add, zero, (last, batch.targets, batch.weights))
        return total, jnp.sum(batch.weights)

    def _remat(self, layer):
        def named(x, item):
            return layer(checkpoint_name(x, _LAYER_INPUT), item)

        return jax.checkpoint(named, policy=self._keep, prevent_cse=False)

    @property
    def _keep(self) -> Callable[..., bool]:
        return partial(keeps, self.strategy.remat)

    def _gather(self, weights: Any, rules: Any, stacked: bool = False) -> Any:
        """FSDP: weights of all copies, in the activations' dtype; `stacked`: one layer's."""
        if self.strategy.sharding != "all":
            return weights

        def gather(x: Array, rule: Rule) -> Array:
            if rule.copies_dim is None:
                return x
            return _all_gather(x, rule.copies_dim - stacked, self.dtype)

        return jax.tree.map(gather, weights, rules)

    def _reduce(self, grad: Array, rule: Rule) -> Array:
        """The sum over the devices that hold a copy of the parameter, where it is kept."""
        sharding, dim = self.strategy.sharding, rule.copies_dim
        spec = rule.copies if sharding == "all" else rule.model
        named = {a for axis in spec for a in (axis if isinstance(axis, tuple) else (axis,))}
        rest = tuple(a for a in self._collectives.axes if a not in named)
        if sharding == "optimizer" and dim is not None and DATA in rest:
            grad = jax.lax.psum_scatter(grad, DATA, scatter_dimension=dim, tiled=True)
            rest = tuple(a for a in rest if a != DATA)
        return jax.lax.psum(grad, rest) if rest else grad

    def _total(self, sums: LossSums) -> LossSums:
        """Over copies. The devices of one copy have the same sums, and their maximum is exact."""

        def total(x: Array) -> Array:
            x = self._collectives.vary(x)
            x = jax.lax.psum(x, DATA) if self.strategy.dp > 1 else x
            others = tuple(a for a in self._collectives.axes if a != DATA)
            return jax.lax.pmax(x, others) if others else x

        return LossSums(*map(total, sums))

    def _zero_sums(self, params: Params) -> LossSums:
        wide = jnp.promote_types(jax.tree.leaves(params)[0].dtype, jnp.float32)
        zero = self._collectives.vary(jnp.zeros((), wide))
        return LossSums(zero, zero)


def keeps(remat: Remat, primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether the backward pass finds the result of an operation of the forward pass.

    Always a layer's input. Under "matmuls" also products with weights, summed over devices; under
    "none" also what attention and all other collectives gave, and dropout's masks. All else is
    elementwise, and cheaper to compute again than to write and read. Weights that were cast,
    gathered from other copies or picked out of a stage's chunks are never kept.
    """
    name = params["name"] if primitive.name == "name" else primitive.name
    if name == _LAYER_INPUT:
        return True
    if remat == "full":
        return False
    if name == "dot_general":
        return not params["dimension_numbers"][1][0]  # with batch dims it is attention's
    axes = params.get("axis_name", params.get("axes"))
    between_parts = axes in (TENSOR, (TENSOR,))
    if name in _SUMS:
        return between_parts
    if remat == "matmuls":
        return False
    if name == "all_gather":
        return between_parts
    return name == KEPT_MASK or name.startswith(_ATTENTION)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather(x: Array, dim: int, dtype: str) -> Array:
    """All copies' parts of a weight side by side; travels in `dtype`, its gradient in float32."""
    return jax.lax.all_gather(x.astype(dtype), DATA, axis=dim, tiled=True)


def _all_gather_fwd(x: Array, dim: int, dtype: str):
    return _all_gather(x, dim, dtype), jnp.zeros((), x.dtype)


def _all_gather_bwd(dim: int, dtype: str, like: Array, grad: Array):
    grad = grad.astype(like.dtype)
    return (jax.lax.psum_scatter(grad, DATA, scatter_dimension=dim, tiled=True),)


_all_gather.defvjp(_all_gather_fwd, _all_gather_bwd)
