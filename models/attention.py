# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention: the reference, and cuDNN's kernel of the same signature.

Shape suffixes: b sequence, t and s position, h query head, k key/value head, e head size.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

NEVER = -1e30  # a score that softmax turns into 0, finite so that an empty row gives no NaN

Attend = Callable[..., Float[Array, "b t h e"]]
"""(q, k, v, segments, causal, drop) -> output: see `attend`."""


def attend(
    q: Float[Array, "b t h e"],
    k: Float[Array, "b s k e"],
    v: Float[Array, "b s k e"],
    segments: Int[Array, "b t"] | None = None,
    causal: bool = True,
    drop: Callable[[Array], Array] | None = None,
) -> Float[Array, "b t h e"]:
    """softmax(q kᵀ / sqrt(e)) v, scores in float32 or wider; query head i reads head i * k // h.

    A position sees those of its own segment, all of them where `segments` is None, and under
    `causal` none after itself. `drop` acts on the probabilities [b, h, t, s].
    """
    b, t, h, e = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    groups = q.reshape(b, t, k.shape[2], -1, e)
    scores = jnp.einsum("btkge,bske->bkgts", groups, k, preferred_element_type=wide)
    scores = scores / math.sqrt(e)
    mask = visible(t, segments, causal)
    if mask is not None:
        scores = jnp.where(mask[:, None, None], scores, NEVER)
    probs = jax.nn.softmax(scores, axis=-1)
    if drop:
        probs = drop(probs.reshape(b, h, t, -1)).reshape(probs.shape)
    return jnp.einsum("bkgts,bske->btkge", probs.astype(v.dtype), v).reshape(b, t, h, e)


def attend_cudnn(
    q: Float[Array, "b t h e"],
    k: Float[Array, "b s k e"],
    v: Float[Array, "b s k e"],
    segments: Int[Array, "b t"] | None = None,
    causal: bool = True,
    drop: Callable[[Array], Array] | None = None,
) -> Float[Array, "b t h e"]:
    """`attend` by cuDNN's fused kernel, which never writes the scores; no dropout inside it."""
    assert drop is None, "the program chooses the reference where probabilities are dropped"
    mask = None if segments is None else visible(q.shape[1], segments, False)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=None if mask is None else mask[:, None],
        is_causal=causal,
        implementation="cudnn",
    )


def visible(
    t: int, segments: Int[Array, "b t"] | None, causal: bool
) -> Bool[Array, "b t t"] | None:
    """Who sees whom: [b or 1, t, t]; None where all see all."""
    order = jnp.tril(jnp.ones((1, t, t), bool)) if causal else None
    if segments is None:
        return order
    same = segments[:, :, None] == segments[:, None, :]
    return same if order is None else same & order
