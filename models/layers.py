# SPDX-License-Identifier: Apache-2.0
"""Layers that the model families share: normalisation, rotary positions, attention, gated MLP.

Shape suffixes: b sequence, t and s position, d model width, h query head, k key/value head, f MLP
width. Invariant: parameters are float32; a layer computes in the dtype of its input, except where
precision decides (norms, rotary angles, softmax), which is float32.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from geojax.models.config import RopeScaling, TransformerConfig


def normal_init(rngs: nnx.Rngs, *shape: int, fan_in: int, scale: float = 1.0) -> nnx.Param:
    """A float32 parameter from a normal distribution of deviation scale / sqrt(fan_in).

    So outputs keep the size of their inputs at any width (LeCun et al. 1998, "Efficient BackProp").
    """
    std = scale / math.sqrt(fan_in)
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


def residual_scale(config: TransformerConfig) -> float:
    """Initial scale of what is added to the residual stream: 2 additions a layer keep it at 1."""
    return 1 / math.sqrt(2 * config.layers)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int, eps: float):
        self.scale = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        normed = (x32 * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        return normed * self.scale[...].astype(x.dtype)


class Attention(nnx.Module):
    """Multi-head attention with grouped key/value heads and rotary positions."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        dim, kv_width = config.dim, config.kv_heads * config.head_dim
        self.query = normal_init(rngs, dim, dim, fan_in=dim)
        self.key = normal_init(rngs, dim, kv_width, fan_in=dim)
        self.value = normal_init(rngs, dim, kv_width, fan_in=dim)
        self.out = normal_init(rngs, dim, dim, fan_in=dim, scale=residual_scale(config))
        self.head_dim = config.head_dim

    def __call__(
        self,
        x: Float[Array, "b t d"],
        rotary: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
        mask: Bool[Array, "b t t"],
    ) -> Float[Array, "b t d"]:
        b, t, d = x.shape
        split = (b, t, -1, self.head_dim)
        q = rotate((x @ self.query[...].astype(x.dtype)).reshape(split), rotary)
        k = rotate((x @ self.key[...].astype(x.dtype)).reshape(split), rotary)
        v = (x @ self.value[...].astype(x.dtype)).reshape(split)
        return dot_product_attention(q, k, v, mask).reshape(b, t, d) @ self.out[...].astype(x.dtype)


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        dim, width = config.dim, config.mlp_dim
        self.gate = normal_init(rngs, dim, width, fan_in=dim)
        self.up = normal_init(rngs, dim, width, fan_in=dim)
        self.down = normal_init(rngs, width, dim, fan_in=width, scale=residual_scale(config))

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        gate = jax.nn.silu(x @ self.gate[...].astype(x.dtype))
        return (gate * (x @ self.up[...].astype(x.dtype))) @ self.down[...].astype(x.dtype)


def dot_product_attention(
    q: Float[Array, "b t h e"],
    k: Float[Array, "b s k e"],
    v: Float[Array, "b s k e"],
    mask: Bool[Array, "b t s"],
) -> Float[Array, "b t h e"]:
    """softmax(q kᵀ / sqrt(e)) v with float32 scores; query head i reads key head i * k // h."""
    b, t, h, e = q.shape
    groups = q.reshape(b, t, k.shape[2], -1, e)
    scores = jnp.einsum("btkge,bske->bkgts", groups, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores / math.sqrt(e), -1e30)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bske->btkge", probs, v).reshape(b, t, h, e)


def rotary_tables(
    positions: Int[Array, "b t"], head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[Float[Array, "b t r"], Float[Array, "b t r"]]:
    """Cosines and sines of the rotary angles (Su et al. 2021), r = head_dim / 2, in float32."""
    inverse = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling:
        inverse = _scale_frequencies(inverse, scaling)
    angles = positions[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "b t h e"], rotary: tuple[Float[Array, "b t r"], Float[Array, "b t r"]]
) -> Float[Array, "b t h e"]:
    """Rotate element pairs (i, i + e/2) of every head by the angle of their position."""
    cos, sin = (table[:, :, None] for table in rotary)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _scale_frequencies(inverse: Float[Array, " r"], scaling: RopeScaling) -> Float[Array, " r"]:
    rotations = scaling.original_context * inverse / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = jnp.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
    return inverse * (keep + (1.0 - keep) / scaling.factor)
