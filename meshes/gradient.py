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
from geojax.meshes.remat import LAYER_INPUT, keeps
from geojax.meshes.rules import Rule, make_rules, state_specs, vocab_axes
from geojax.meshes.squares import Squares, block_norms, block_squares
from geojax.meshes.strategy import Strategy
from geojax.models.attention import attend, attend_cudnn
from geojax.models.collectives import Collectives, vocab_nats
from geojax.models.config import TransformerConfig
from geojax.models.dropout import Dropout
from geojax.models.params import block_dims
from geojax.models.transformer import Inputs, Params, Transformer


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


class SequenceSums(NamedTuple):
    """Of each sequence of a batch."""

    nats: Float[Array, "m b"]
    tokens: Float[Array, "m b"]
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

    def measured(
        self, params: Params, batch: Sequences, key: Array
    ) -> tuple[LossSums, Params, Squares]:
        """`gradient`, and squares of the gradients of the batch's parts."""
        param_specs, final_specs = state_specs(self.rules, self.strategy)

        def body(params, batch, key):
            params = jax.tree.map(self._collectives.vary, params)
            sums, grads, squares = self._accumulate_measured(params, batch, key)
            total = self._total(sums), jax.tree.map(self._reduce, grads, self.rules)
            return *total, self._total_squares(squares)

        def lead(path, rule: Rule) -> PartitionSpec:
            return PartitionSpec(*self._spec(rule)[: block_dims(path)])

        blocks = jax.tree_util.tree_map_with_path(lead, self.rules)
        whole = PartitionSpec()
        squares = Squares(blocks, whole, block_norms(blocks["blocks"]), whole)
        specs = (param_specs, jax.tree.map(lambda _: self.batch_spec, batch), whole)
        out_specs = (whole, final_specs, squares)
        return self._shard_map(body, specs, out_specs)(params, batch, key)

    def loss(self, params: Params, batch: Sequences) -> SequenceSums:
        """Sums of each sequence, nothing dropped."""
        param_specs, _ = state_specs(self.rules, self.strategy)

        def body(params, batch):
            params = jax.tree.map(self._collectives.vary, params)
            if self.strategy.pp > 1:
                sums = self._local_loss(params, batch, None)
            else:

                def one(micro):
                    sums = self._local_loss(params, jax.tree.map(lambda x: x[None], micro), None)
                    return jax.tree.map(lambda x: x[0], sums)

                sums = jax.lax.map(one, batch)
            return jax.tree.map(self._of_all_copies, sums)

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
            sums = LossSums(*map(jnp.sum, self._local_loss(params, batch, key)))
            return sums.nats / self._copies, sums

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

    def _accumulate_measured(self, params: Params, batch: Sequences, key: Array):
        """The same with squares of parts, those that this device has of them.

        A norm's scale gets a copy for every sequence, whose gradient is then that sequence's own
        (Gray et al. 2024, "Normalization Layer Per-Example Gradients are Sufficient to Predict
        Gradient Noise Scale in Transformers"), under every strategy and at no cost to speak of.
        """

        def share(params, taps, batch):
            sums = LossSums(*map(jnp.sum, self._local_loss(params, batch, key, taps)))
            return sums.nats / self._copies, sums

        gradient = jax.grad(share, argnums=(0, 1), has_aux=True)

        def part(batch):
            sums_of_sequences = jnp.sum(batch.weights, axis=-1)
            taps = jax.tree.map(
                lambda x: self._collectives.vary(
                    jnp.zeros((len(x), *sums_of_sequences.shape, x.shape[-1]), x.dtype)
                ),
                block_norms(params["blocks"]),
            )
            (grads, taps), sums = gradient(params, taps, batch)
            tokens = sums.tokens
            if self.strategy.sharding == "all" and self.strategy.dp > 1:
                tokens = self._collectives.vary(jax.lax.psum(tokens, DATA))
            squares = Squares(
                self._part_squares(grads),
                jnp.square(tokens),
                self._sequence_squares(taps),
                jnp.sum(jnp.square(sums_of_sequences)).astype(tokens.dtype),
            )
            return sums, grads, squares

        if self.strategy.pp > 1:
            return part(batch)

        def add(total, micro):
            return jax.tree.map(jnp.add, total, part(jax.tree.map(lambda x: x[None], micro))), None

        first = jax.tree.map(lambda x: x[:1], batch)
        zero = jax.tree.map(
            lambda x: self._collectives.vary(jnp.zeros(x.shape, x.dtype)),
            jax.eval_shape(part, first),
        )
        return jax.lax.scan(add, zero, batch)[0]

    def _part_squares(self, grads: Params) -> Params:
        """Block by block, of the whole gradient of this device's part."""

        def whole(grad: Array, rule: Rule) -> Array:
            own = (DATA,) if self.strategy.sharding != "all" else ()
            rest = self._axes_but(*_named(self._spec(rule)), *own)
            return self._collectives.vary(jax.lax.psum(grad, rest)) if rest else grad

        return block_squares(jax.tree.map(whole, grads, self.rules))

    def _sequence_squares(self, taps: Params) -> Params:
        """[L] of gradients [L, m, b, d] a sequence, which tensor parallelism has shares of."""

        def squares(x: Array) -> Array:
            if self.strategy.tp > 1:
                x = self._collectives.vary(jax.lax.psum(x, TENSOR))
            return jnp.sum(jnp.square(x), axis=(1, 2, 3))

        return jax.tree.map(squares, taps)

    def _total_squares(self, squares: Squares) -> Squares:
        """Over parts on other devices, and over the devices that have something of a block."""
        fsdp = self.strategy.sharding == "all"

        def total(x: Array, kept: tuple[str, ...], summed: tuple[str, ...]) -> Array:
            summed = tuple(a for a in self._collectives.axes if a in summed)
            x = jax.lax.psum(x, summed) if summed else x
            same = self._axes_but(*kept, *summed)
            return jax.lax.pmax(x, same) if same else x

        def blocks(path, x: Array, rule: Rule) -> Array:
            spec, dims = self._spec(rule), block_dims(path)
            kept, inner = _named(spec[:dims]), _named(spec[dims:])
            return total(x, kept, inner if fsdp else (*inner, DATA))

        stages = (PIPELINE,) if self.strategy.pp > 1 else ()
        return Squares(
            jax.tree_util.tree_map_with_path(blocks, squares.parts, self.rules),
            total(squares.parts_tokens, (), () if fsdp else (DATA,)),
            jax.tree.map(lambda x: total(x, stages, (DATA,)), squares.norms),
            total(squares.norms_tokens, (), (DATA,)),
        )

    def _spec(self, rule: Rule) -> PartitionSpec:
        """Of a parameter, and of its gradient before copies are summed."""
        return rule.copies if self.strategy.sharding == "all" else rule.model

    def _axes_but(self, *named: str) -> tuple[str, ...]:
        return tuple(a for a in self._collectives.axes if a not in named)

    def _local_loss(
        self, params: Params, batch: Sequences, key: Array | None, taps: Params | None = None
    ) -> SequenceSums:
        """Of this copy's sequences, the same on all its devices; batch [m, b, t].

        `taps` [L, m, b, d]: what is added to each norm's leaves, sequence by sequence.
        """
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
            micro, side = side
            weights, taps = weights
            seen = inputs(*side)
            rotary = self._model.rotary(seen)

            def layer(x, item):
                weights, taps, number = item
                weights = self._gather(weights, self.rules["blocks"], stacked=True)
                if taps:
                    norms = jax.tree.map(
                        lambda w, tap: w + tap[:, None], block_norms(weights), taps
                    )
                    weights = weights | norms
                return self._model.layer(weights, x, number, rotary, seen), None

            taps = jax.tree.map(lambda tap: tap[:, micro], taps)
            return jax.lax.scan(self._remat(layer), x, (weights, taps, numbers))[0]

        def nats(rest, x, targets, weights):
            logits = self._model.logits(rest, x)
            return jnp.sum(vocab_nats(logits, targets, self._collectives) * weights, axis=-1)

        side = (batch.positions, batch.segments, batch.samples)
        weights = (params["blocks"], taps or {})
        if self.strategy.pp == 1:
            one, side = jax.tree.map(lambda x: x[0], (batch, side))
            numbers = jnp.arange(self.config.layers)
            x = layers(weights, embed(one.tokens, side), numbers, (0, side))
            found = nats(rest, x, one.targets, one.weights)
            return SequenceSums(found[None], jnp.sum(batch.weights, axis=-1))

        first = jax.lax.map(lambda item: embed(*item), (batch.tokens, side))
        last = run_pipeline(
            layers,
            weights,
            first,
            (jnp.arange(self.strategy.micro_batches), side),
            self.config.layers,
            self.strategy,
            self._collectives,
            self._keep,
        )

        # Logits of one micro-batch at a time are computed again, not kept for all.
        again = jax.checkpoint(nats, prevent_cse=False)

        found = jax.lax.map(lambda item: again(rest, *item), (last, batch.targets, batch.weights))
        return SequenceSums(found, jnp.sum(batch.weights, axis=-1))

    def _remat(self, layer):
        def named(x, item):
            return layer(checkpoint_name(x, LAYER_INPUT), item)

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
        rest = self._axes_but(*_named(self._spec(rule)))
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

    def _of_all_copies(self, x: Float[Array, "m b"]) -> Float[Array, "m b"]:
        """The sequences of the whole batch, on every device."""
        x = self._collectives.vary(x)
        if self.strategy.dp > 1:
            places = jnp.zeros((self.strategy.dp, *x.shape), x.dtype)
            places = places.at[jax.lax.axis_index(DATA)].set(x)
            x = jnp.moveaxis(jax.lax.psum(places, DATA), 0, 1).reshape(len(x), -1)
        others = tuple(a for a in self._collectives.axes if a != DATA)
        return jax.lax.pmax(x, others) if others else x

    def _zero_sums(self, params: Params) -> LossSums:
        wide = jnp.promote_types(jax.tree.leaves(params)[0].dtype, jnp.float32)
        zero = self._collectives.vary(jnp.zeros((), wide))
        return LossSums(zero, zero)


def _named(spec: Any) -> tuple[str, ...]:
    """Axes that a spec, or a part of one, names."""
    return tuple(a for axis in spec if axis for a in (axis if isinstance(axis, tuple) else (axis,)))


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
