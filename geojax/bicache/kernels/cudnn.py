# SPDX-License-Identifier: Apache-2.0
"""Attention of a block of rows over [shared prefix | own] keys by cuDNN, merged by log-sum-exp.

Invariant: the two parts are two calls, never one over joined keys. For the prefix all rows of the
batch are one sequence, so that it is read for all of them at once.

JAX's public function rounds log-sum-exps to the queries' type: near 10, bfloat16 is off by up to
0.03, and the weight of a part by 3 %. The function under it gives float32; it is internal to JAX,
and where it has moved there is no cuDNN here.
"""

import math
from importlib import import_module
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from geojax.bicache.kernels.reference import Part, check, merge
from geojax.models.attention import NEVER


def _jax_internals() -> Any:
    try:
        return import_module("jax._src.cudnn.fused_attention_stablehlo")
    except ImportError:
        return None


_FUSED = _jax_internals()
AVAILABLE = hasattr(_FUSED, "dot_product_attention")


def attend_cudnn(
    q: Float[Array, "b t h e"], prefix: Part, own: Part
) -> tuple[Float[Array, "b t h e"], Float[Array, "b h t"]]:
    """`reference.attend_xla` without an index; each part's output is rounded before the merge."""
    check(q, prefix, own, None)
    assert AVAILABLE, "choose() takes this only where JAX has it"
    b, t, h, e = q.shape
    outs, lses = _part(q, own.k, own.v, own.length)
    if not prefix.k.size:
        return outs, lses
    shared, lse = _part(
        q.reshape(1, b * t, h, e), prefix.k[None], prefix.v[None], prefix.length[None]
    )
    lse = lse.reshape(h, b, t).swapaxes(0, 1)
    return merge(jnp.stack([outs, shared.reshape(q.shape)]), jnp.stack([lses, lse]))


def _part(
    q: Float[Array, "b t h e"],
    k: Float[Array, "b s k e"],
    v: Float[Array, "b s k e"],
    length: Int[Array, "b"],
) -> tuple[Float[Array, "b t h e"], Float[Array, "b h t"]]:
    out, lse = _FUSED.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=jnp.full(q.shape[0], q.shape[1], jnp.int32),
        kv_seqlen=jnp.maximum(length, 1).astype(jnp.int32),
        scale=1 / math.sqrt(q.shape[3]),
        mask_type=_FUSED.MaskType.PADDING,
        return_residual=True,
    )
    # A softmax over nothing is cuDNN's to define; it is never asked for one.
    empty = (length == 0)[:, None, None]
    return jnp.where(empty[..., None], 0, out), jnp.where(empty, NEVER, lse)
