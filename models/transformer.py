# SPDX-License-Identifier: Apache-2.0
"""The shared Transformer, and its functional form over plain pytrees.

Invariant: parameters have ONE canonical layout, whatever the mesh: the layers of a stack lie on a
leading dim [L, ...] and run under one `lax.scan`, so that a change of strategy is only a change of
sharding. At every jit border parameters are a nested dict of arrays; modules exist inside only.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from geojax.models.config import TransformerConfig
from geojax.models.layers import Attention, GatedMLP, RMSNorm, normal_init, rotary_tables

Params = dict[str, Any]
"""Nested dict of float32 arrays: embed [V, d], blocks {...} [L, ...], norm, head [V, d] if untied.
"""


class Block(nnx.Module):
    """Pre-norm residual block: attention, then the gated MLP."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = GatedMLP(config, rngs=rngs)

    def __call__(self, x, rotary, mask):
        x = x + self.attention(self.attention_norm(x), rotary, mask)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nnx.Module):
    """A causal decoder. Logits are float32 [b, t, V]."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = normal_init(rngs, config.vocab_size, config.dim, fan_in=config.dim)
        stack = nnx.vmap(lambda r: Block(config, rngs=r), axis_size=config.layers)
        self.blocks = stack(rngs.split(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        if not config.tied:
            self.head = normal_init(rngs, config.vocab_size, config.dim, fan_in=config.dim)

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        segments: Int[Array, "b t"],
        dtype: DTypeLike = jnp.float32,
    ) -> Float[Array, "b t V"]:
        config = self.config
        rotary = rotary_tables(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        mask = causal_mask(segments)
        graph, layers = nnx.split(self.blocks)

        def layer(x, weights):
            return nnx.merge(graph, weights)(x, rotary, mask), None

        x, _ = jax.lax.scan(layer, self.embed[...].astype(dtype)[tokens], layers)
        head = (self.embed if config.tied else self.head)[...].astype(dtype)
        return jnp.einsum("btd,vd->btv", self.norm(x), head, preferred_element_type=jnp.float32)


def causal_mask(segments: Int[Array, "b t"]) -> Array:
    """[b, t, t]: a position sees itself and earlier positions of its own segment."""
    t = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    return same & jnp.tril(jnp.ones((t, t), bool))


def init_params(config: TransformerConfig, seed: int) -> Params:
    """Fresh parameters, the same for the same seed on every machine and mesh."""
    model = Transformer(config, rngs=nnx.Rngs(params=seed))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def abstract_params(config: TransformerConfig) -> Params:
    """The pytree of `init_params` as `jax.ShapeDtypeStruct`s; costs no memory."""
    return jax.eval_shape(lambda: init_params(config, 0))


def make_apply(config: TransformerConfig) -> Callable[..., Float[Array, "b t V"]]:
    """`apply(params, tokens, positions, segments, dtype)`: the model as a pure function."""
    abstract = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(params=0)))
    graph, state = nnx.split(abstract)

    def apply(params: Params, tokens, positions, segments, dtype: DTypeLike = jnp.float32):
        weights = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(params))
        return nnx.merge(graph, weights)(tokens, positions, segments, dtype)

    return apply
