# SPDX-License-Identifier: Apache-2.0
"""The shared Transformer in three pieces - embed, layer, head - as functions of plain pytrees.

Invariant: parameters have ONE canonical layout, whatever the mesh: the layers of a stack lie on a
leading dim [L, ...], so that a change of strategy is only a change of sharding. At every jit border
parameters are a nested dict of arrays; modules exist inside only. A piece given a device's share of
the weights, and the collectives that go with it, computes that device's share of the whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from geojax.config.base import require
from geojax.config.own import load_own
from geojax.models.attention import NEVER, Attend, attend
from geojax.models.collectives import ONE_DEVICE, Collectives
from geojax.models.config import TOKEN_TYPES, TransformerConfig
from geojax.models.dropout import ATTENTION, EMBEDDING, Dropout, drop_rows
from geojax.models.dropout import MLP as MLP_SITE
from geojax.models.layers import (
    MLP,
    Attention,
    GatedMLP,
    LayerNorm,
    Rotary,
    gelu,
    make_norm,
    normal_init,
    rotary_tables,
    table_init,
    zeros_init,
)

Params = dict[str, Any]
"""Nested dict of float32 arrays: embed [V, d]; blocks {...} [L, ...]; norm; head [V, d] if untied;
positions [context, d] of gpt and bert; types, embed_norm, transform and head_bias of bert. V is the
padded vocabulary.
"""


class Inputs(NamedTuple):
    """What every layer sees of a batch beside the residual stream."""

    positions: Int[Array, "b t"]
    segments: Int[Array, "b t"] | None
    """Positions see those of their own segment; None: all of one."""
    dropout: Dropout | None
    """None: nothing is dropped."""


class Embedder(nnx.Module):
    """Tokens to the residual stream."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = table_init(rngs, config, config.embed_init)
        if config.learned_positions:
            self.positions = normal_init(rngs, config.context, config.dim, fan_in=config.dim)
        if config.family == "bert":
            self.types = normal_init(rngs, TOKEN_TYPES, config.dim, fan_in=config.dim)
            self.embed_norm = LayerNorm(config.dim, config.norm_eps)

    def __call__(self, tokens, inputs: Inputs, dtype: DTypeLike, c: Collectives):
        table = self.embed[...]
        local = tokens - c.vocab_start(table.shape[0])
        outside = (local < 0) | (local >= table.shape[0])
        rows = jnp.where(outside, table.shape[0], local)
        found = jnp.asarray(table).at[rows].get(mode="fill", fill_value=0)
        x = c.embed_sum(found.astype(jnp.promote_types(table.dtype, jnp.float32)))
        if self.config.learned_positions:
            x = x + self.positions[...][c.rows(inputs.positions)]
        if self.config.family == "bert":
            x = self.embed_norm(x + self.types[...][0])
        return _drop_rows(x.astype(dtype), self.config, inputs.dropout, EMBEDDING, c)


class Block(nnx.Module):
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = make_norm(config)
        self.mlp = (GatedMLP if config.family == "llama" else MLP)(config, rngs=rngs)

    def __call__(self, x, rotary: Rotary | None, inputs: Inputs, c: Collectives, attend: Attend):
        config, dropout = self.config, inputs.dropout

        def attention(x):
            out = self.attention(x, rotary, inputs.segments, dropout, c, attend)
            return _drop_rows(out, config, dropout, ATTENTION, c)

        def mlp(x):
            return _drop_rows(self.mlp(x, c), config, dropout, MLP_SITE, c)

        if config.family == "bert":
            x = self.attention_norm(x + attention(x))
            return self.mlp_norm(x + mlp(x))
        x = x + attention(self.attention_norm(x))
        return x + mlp(self.mlp_norm(x))


class Head(nnx.Module):
    """The residual stream to what the vocabulary's rows are multiplied by."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.norm = make_norm(config)
        if config.family == "bert":
            self.transform = normal_init(rngs, config.dim, config.dim, fan_in=config.dim)
            self.transform_bias = zeros_init(config.dim)
            self.head_bias = zeros_init(config.padded_vocab)
        if not config.tied:
            self.head = table_init(rngs, config)

    def __call__(self, x, embed: Array, c: Collectives) -> Float[Array, "b t v"]:
        if self.config.family == "bert":
            x = x @ self.transform[...].astype(x.dtype) + self.transform_bias[...].astype(x.dtype)
            x = gelu(x)
        x = c.enter(self.norm(x))
        table = embed if self.config.tied else self.head[...]
        wide = jnp.promote_types(x.dtype, jnp.float32)
        logits = jnp.einsum("btd,vd->btv", x, table.astype(x.dtype), preferred_element_type=wide)
        if self.config.family == "bert":
            logits = logits + self.head_bias[...]
        if self.config.padded_vocab == self.config.vocab_size:
            return logits
        rows = c.vocab_start(table.shape[0]) + jnp.arange(table.shape[0])
        return jnp.where(rows < self.config.vocab_size, logits, NEVER)


@dataclass(frozen=True)
class Transformer:
    """The pieces, as pure functions of parts of `Params`.

    `rest` is all of them but the blocks; `weights` one layer's.
    """

    config: TransformerConfig
    collectives: Collectives = ONE_DEVICE
    attend: Attend = attend

    def embed(self, rest: Params, tokens: Int[Array, "b t"], inputs: Inputs, dtype: DTypeLike):
        """[b, r, d]: the residual stream before the first layer."""
        return self._module(Embedder, rest)(tokens, inputs, dtype, self.collectives)

    def rotary(self, inputs: Inputs) -> Rotary | None:
        """What all layers share of the positions."""
        config = self.config
        if config.learned_positions:
            return None
        return rotary_tables(
            inputs.positions, config.head_dim, config.rope_theta, config.rope_scaling
        )

    def layer(self, weights: Params, x: Float[Array, "b r d"], number, rotary, inputs: Inputs):
        """[b, r, d] after layer `number` of the model, from 0 on."""
        if inputs.dropout is not None:
            inputs = inputs._replace(dropout=inputs.dropout._replace(layer=number + 1))
        block = self._module(block_class(self.config), weights)
        return block(x, rotary, inputs, self.collectives, self.attend)

    def logits(self, rest: Params, x: Float[Array, "b r d"]) -> Float[Array, "b t v"]:
        """Logits of this device's rows of the vocabulary, in float32 or wider."""
        return self._module(Head, rest)(x, rest["embed"], self.collectives)

    def _module(self, kind: type[nnx.Module], params: Params) -> Any:
        graph, names = self._graphs[kind]
        return nnx.merge(graph, nnx.State({name: params[name] for name in names}))

    @cached_property
    def _graphs(self) -> dict[type[nnx.Module], tuple[Any, list[str]]]:
        """Structure and parameter names of each module, without any memory."""
        graphs = {}
        for kind in (Embedder, block_class(self.config), Head):
            graph, state = nnx.split(_abstract(kind, self.config))
            graphs[kind] = (graph, list(nnx.to_pure_dict(state)))
        return graphs


def block_class(config: TransformerConfig) -> Any:
    """What a layer is; ConfigError where `config.block` names none."""
    if not config.block:
        return Block
    block = load_own(config.block, "model.block")
    require(
        isinstance(block, type) and issubclass(block, nnx.Module),
        f"model.block {config.block!r} is {block!r}; name a class made of flax.nnx.Module",
    )
    return block


def init_params(config: TransformerConfig, seed: int) -> Params:
    """Fresh parameters, the same for the same seed on every machine and mesh."""
    rngs = nnx.Rngs(params=seed)
    embedder = Embedder(config, rngs=rngs)
    block = block_class(config)
    stack = nnx.vmap(lambda r: block(config, rngs=r), axis_size=config.layers)
    blocks = stack(rngs.split(config.layers))
    head = Head(config, rngs=rngs)
    embedder, blocks, head = (
        nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (embedder, blocks, head)
    )
    return {**embedder, "blocks": blocks, **head}


def abstract_params(config: TransformerConfig) -> Params:
    """The pytree of `init_params` as `jax.ShapeDtypeStruct`s; costs no memory."""
    return jax.eval_shape(lambda: init_params(config, 0))


def count_params(config: TransformerConfig) -> int:
    """Parameters of the model, whatever its layers are, without padding of the vocabulary."""
    if not config.block:
        return config.num_params
    plain = replace(config, block="")
    ours, theirs = (abstract_params(c)["blocks"] for c in (config, plain))
    sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (ours, theirs)]
    return config.num_params + sizes[0] - sizes[1]


def make_apply(config: TransformerConfig) -> Callable[..., Float[Array, "b t V"]]:
    """`apply(params, tokens, positions, segments, dtype)`: logits of the model on one device."""
    model = Transformer(config)

    def apply(params: Params, tokens, positions, segments=None, dtype: DTypeLike = jnp.float32):
        inputs = Inputs(positions, segments, None)
        rotary = model.rotary(inputs)

        def layer(x, weights):
            return model.layer(weights, x, 0, rotary, inputs), None

        x, _ = jax.lax.scan(layer, model.embed(params, tokens, inputs, dtype), params["blocks"])
        return model.logits(params, x)[..., : config.vocab_size]

    return apply


def _abstract(kind: Any, config: TransformerConfig) -> Any:
    return nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(params=0)))


def _drop_rows(x, config: TransformerConfig, dropout: Dropout | None, site: int, c: Collectives):
    first_row = c.tp_index() * x.shape[1] if c.sequence else 0
    return drop_rows(x, config.dropout, dropout, site, first_row)
