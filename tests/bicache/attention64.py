# SPDX-License-Identifier: Apache-2.0
"""Attention over a prefix and own keys in float64, row by row, and inputs to try it on."""

import jax.numpy as jnp
import numpy as np

from geojax.bicache.kernels.reference import Part
from geojax.models.attention import NEVER

HUGE = 3e4
"""Stands beyond every length: finite also in float16, and seen at once where it counts."""


def inputs(b, t, h, k, e, p, s, entries=None, dtype=jnp.float32, seed=0):
    """Queries [b t h e], a prefix of `p` (one for all, or `entries`), own keys `s`; no lengths."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    lead = () if entries is None else (entries,)
    q, own = normal(b, t, h, e), [normal(b, s, k, e) for _ in "kv"]
    prefix = [normal(*lead, p, k, e) for _ in "kv"]
    return q, prefix, own


def part(k, v, length):
    """A Part whose keys beyond their lengths are HUGE."""
    length = jnp.asarray(length, jnp.int32)
    beyond = jnp.arange(k.shape[-3]) >= length[..., None]
    k, v = (jnp.where(beyond[..., None, None], HUGE, x).astype(x.dtype) for x in (k, v))
    return Part(k, v, length)


def named(k, v, length, index):
    """A Part of entries and its index, for `length` of each entry."""
    prefix, index = part(k, v, length), jnp.asarray(index, jnp.int32)
    return prefix._replace(length=prefix.length[index]), index


def attend_float64(q, prefix, own, index=None):
    """(output [b t h e], log-sum-exp [b h t], what rounding scales with: weights x |values|)."""
    q, pk, pv, ok, ov = (np.asarray(x, np.float64) for x in (q, *prefix[:2], *own[:2]))
    b, t, h, e = q.shape
    out, scale, lse = np.zeros(q.shape), np.zeros(q.shape), np.full((b, h, t), NEVER)
    group = h // ok.shape[2]
    for i in range(b):
        if index is None:
            k, v = (x[: int(prefix.length)] for x in (pk, pv))
        else:
            links = zip(np.ravel(index[i]), np.ravel(prefix.length[i]), strict=True)
            links = [(int(entry), int(size)) for entry, size in links if entry >= 0]
            k, v = (
                np.concatenate([x[entry][:size] for entry, size in links] or [ok[i, :0]])
                for x in (pk, pv)
            )
        size = int(own.length[i])
        for j in range(h):
            head = j // group
            keys = np.concatenate([k[:, head], ok[i, :size, head]])
            values = np.concatenate([v[:, head], ov[i, :size, head]])
            if not len(keys):
                continue
            scores = q[i, :, j] @ keys.T / np.sqrt(e)
            top = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(axis=1, keepdims=True)
            lse[i, j] = (top + np.log(total))[:, 0]
            out[i, :, j] = weights / total @ values
            scale[i, :, j] = weights / total @ np.abs(values)
    return out, lse, scale


def assert_close(found, q, prefix, own, index=None, *, roundings=2):
    """`found` (output, log-sum-exp) is that in float64, but for `roundings` to the queries' type.

    Weights are rounded before they multiply and the output is: each by half a unit in the last
    place, so relative to weights x |values|. Scores, sums and exponentials are float32.
    """
    out, lse, scale = attend_float64(q, prefix, own, index)
    assert found[0].dtype == q.dtype
    assert found[1].dtype == jnp.float32
    allowed = (roundings * float(jnp.finfo(q.dtype).eps) / 2 + 2e-5) * scale
    error = np.abs(np.asarray(found[0], np.float64) - out)
    assert (error <= allowed).all(), f"off by {(error - allowed).max():.2e} more than {roundings}"
    np.testing.assert_allclose(found[1], lse, rtol=1e-5, atol=5e-5)
