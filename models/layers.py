# SPDX-License-Identifier: Apache-2.0
"""Layers that the model families share: normalisation, rotary positions, attention, MLPs.

Shape suffixes: b sequence, t position, r row of the residual stream that this device has (all t on
one device), d model width, h query head, k key/value head, f MLP width; h, k and f are a device's
share under tensor parallelism. Invariant: parameters are float32; a layer computes in the dtype of
its input, except where precision decides (norms, rotary angles, softmax), which is at least
float32.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from geojax.models.attention import Attend
from geojax.models.collectives import Collectives
from geojax.models.config import RopeScaling, TransformerConfig
from geojax.models.dropout import Dropout, drop_probs

Rotary = tuple[Float[Array, "b t r"], Float[Array, "b t r"]]


def normal_init(rngs: nnx.Rngs, *shape: int, fan_in: int, scale: float = 1.0) -> nnx.Param:
    """A float32 parameter from a normal distribution of deviation scale / sqrt(fan_in).

    So outputs keep the size of their inputs at any width (LeCun et al. 1998, "Efficient BackProp").
    """
    std = scale / math.sqrt(fan_in)
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


def table_init(rngs: nnx.Rngs, config: TransformerConfig, std: float = 0.0) -> nnx.Param:
    """A vocabulary table [padded_vocab, d] of deviation `std`, 1 / sqrt(d) where that is 0; rows
    beyond the vocabulary are zeros, and stay so."""
    scale = std * math.sqrt(config.dim) or 1.0
    table = normal_init(rngs, config.vocab_size, config.dim, fan_in=config.dim, scale=scale)[...]
    return nnx.Param(jnp.pad(table, ((0, config.padded_vocab - config.vocab_size), (0, 0))))


def zeros_init(*shape: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, jnp.float32))


def residual_scale(config: TransformerConfig) -> float:
    """Initial scale of what is added to the residual stream: 2 additions a layer keep it at 1."""
    return 1 / math.sqrt(2 * config.layers)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int, eps: float):
        self.scale = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        wide = _widen(x)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        return normed * self.scale[...].astype(x.dtype)


class LayerNorm(nnx.Module):
    """Normalisation to mean 0 and variance 1 (Ba et al. 2016)."""

    def __init__(self, dim: int, eps: float):
        self.scale = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.bias = zeros_init(dim)
        self.eps = eps

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        wide = _widen(x)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normed = (centred * jax.lax.rsqrt(variance + self.eps)).astype(x.dtype)
        return normed * self.scale[...].astype(x.dtype) + self.bias[...].astype(x.dtype)


def make_norm(config: TransformerConfig) -> RMSNorm | LayerNorm:
    """The family's normalisation of the residual stream."""
    norm = RMSNorm if config.family == "llama" else LayerNorm
    return norm(config.dim, config.norm_eps)


class Attention(nnx.Module):
    """Multi-head attention with grouped key/value heads; rotary positions where given."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        dim, kv_width = config.dim, config.kv_heads * config.head_dim
        self.query = normal_init(rngs, dim, dim, fan_in=dim)
        self.key = normal_init(rngs, dim, kv_width, fan_in=dim)
        self.value = normal_init(rngs, dim, kv_width, fan_in=dim)
        self.out = normal_init(rngs, dim, dim, fan_in=dim, scale=residual_scale(config))
        self.out_biased = config.family != "llama"
        self.biased = self.out_biased or config.qkv_bias
        if self.biased:
            self.query_bias = zeros_init(dim)
            self.key_bias, self.value_bias = zeros_init(kv_width), zeros_init(kv_width)
        if self.out_biased:
            self.out_bias = zeros_init(dim)
        self.head_dim, self.causal = config.head_dim, config.causal
        self.drop_rate = config.attention_dropout

    def __call__(
        self,
        x: Float[Array, "b r d"],
        rotary: Rotary | None,
        segments: Int[Array, "b t"] | None,
        dropout: Dropout | None,
        collectives: Collectives,
        attend: Attend,
    ) -> Float[Array, "b r d"]:
        x = collectives.enter(x)
        q, k, v = (self._project(x, name) for name in ("query", "key", "value"))
        if rotary:
            q, k = rotate(q, rotary), rotate(k, rotary)
        drop = None
        if dropout is not None and self.drop_rate:
            first_head = collectives.tp_index() * q.shape[2]
            drop = lambda p: drop_probs(p, self.drop_rate, dropout, first_head)  # noqa: E731
        mixed = attend(q, k, v, segments, self.causal, drop)
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        out = collectives.leave(mixed @ self.out[...].astype(x.dtype))
        return out + self.out_bias[...].astype(x.dtype) if self.out_biased else out

    def _project(self, x: Float[Array, "b t d"], name: str) -> Float[Array, "b t h e"]:
        y = x @ getattr(self, name)[...].astype(x.dtype)
        if self.biased:
            y = y + getattr(self, f"{name}_bias")[...].astype(x.dtype)
        return y.reshape(*y.shape[:2], -1, self.head_dim)


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        dim, width = config.dim, config.mlp_dim
        self.gate = normal_init(rngs, dim, width, fan_in=dim)
        self.up = normal_init(rngs, dim, width, fan_in=dim)
        self.down = normal_init(rngs, width, dim, fan_in=width, scale=residual_scale(config))

    def __call__(self, x: Float[Array, "b r d"], collectives: Collectives) -> Float[Array, "b r d"]:
        x = collectives.enter(x)
        gate = jax.nn.silu(x @ self.gate[...].astype(x.dtype))
        hidden = gate * (x @ self.up[...].astype(x.dtype))
        return collectives.leave(hidden @ self.down[...].astype(x.dtype))


class MLP(nnx.Module):
    """down(gelu(up(x) + bias)) + bias; gpt's GELU is the tanh form (Hendrycks and Gimpel 2016)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        dim, width = config.dim, config.mlp_dim
        self.up = normal_init(rngs, dim, width, fan_in=dim)
        self.up_bias = zeros_init(width)
        self.down = normal_init(rngs, width, dim, fan_in=width, scale=residual_scale(config))
        self.down_bias = zeros_init(dim)
        self.tanh = config.family == "gpt"

    def __call__(self, x: Float[Array, "b r d"], collectives: Collectives) -> Float[Array, "b r d"]:
        x = collectives.enter(x)
        hidden = x @ self.up[...].astype(x.dtype) + self.up_bias[...].astype(x.dtype)
        hidden = jax.nn.gelu(hidden, approximate=True) if self.tanh else gelu(hidden)
        down = collectives.leave(hidden @ self.down[...].astype(x.dtype))
        return down + self.down_bias[...].astype(x.dtype)


@jax.custom_jvp
def gelu(x: Float[Array, "*n f"]) -> Float[Array, "*n f"]:
    """x times the normal distribution's share below x (Hendrycks and Gimpel 2016).

    With its own derivative: JAX 0.12's of erf is refused inside a shard_map.
    """
    return (_widen(x) * _normal_share(_widen(x))).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    wide = _widen(x)
    density = jnp.exp(-jnp.square(wide) / 2) / math.sqrt(2 * math.pi)
    slope = _normal_share(wide) + wide * density
    return gelu(x), (slope * _widen(dx)).astype(x.dtype)


def rotary_tables(
    positions: Int[Array, "b t"], head_dim: int, theta: float, scaling: RopeScaling | None
) -> Rotary:
    """Cosines and sines of the rotary angles (Su et al. 2021), r = head_dim / 2, in float32."""
    inverse = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling:
        inverse = _scale_frequencies(inverse, scaling)
    angles = positions[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "b t h e"], rotary: Rotary) -> Float[Array, "b t h e"]:
    """Rotate element pairs (i, i + e/2) of every head by the angle of their position."""
    cos, sin = (table[:, :, None] for table in rotary)
    first, second = jnp.split(_widen(x), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _normal_share(x: Array) -> Array:
    return 0.5 * (1 + jax.lax.erf(x / math.sqrt(2)))


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _scale_frequencies(inverse: Float[Array, " r"], scaling: RopeScaling) -> Float[Array, " r"]:
    rotations = scaling.original_context * inverse / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = jnp.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
    return inverse * (keep + (1.0 - keep) / scaling.factor)
