# SPDX-License-Identifier: Apache-2.0
"""The collectives that layers call where their weights are spread over devices.

Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM"): each device has some heads, some of the MLP
width and some rows of the vocabulary; between the parts of a layer the residual stream is spread
over the sequence where its length divides (Korthikanti et al. 2022), else copied.

Invariant: inside the shard_map every array counts as varying over all its axes, and what is
differentiated is the sum of all devices' shares. A device's gradient of its copy of a parameter is
then its own part of the whole, and the sum over the devices that hold a copy is the gradient. The
default, ONE_DEVICE, calls nothing.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Collectives:
    """Axes have more than one device each; an axis of one device is left out."""

    axes: tuple[str, ...] = ()
    """All axes of the surrounding shard_map."""
    tp: str | None = None
    tp_size: int = 1
    vocab: tuple[str, ...] = ()
    """Axes over which rows of the vocabulary are spread, slowest first."""
    sequence: bool = False
    """Whether the residual stream is spread over the sequence between the parts of a layer."""
    sum_dtype: DTypeLike | None = None
    """Type in which sums travel; unset: that of the activations."""

    def vary(self, x: Array) -> Array:
        """`x` counted as varying over all axes."""
        known = jax.typeof(x)
        varying = known.vma if hasattr(known, "vma") else known.mat.varying  # jax 0.11, 0.12
        missing = tuple(a for a in self.axes if a not in varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    def enter(self, x: Float[Array, "b r d"]) -> Float[Array, "b t d"]:
        """From the residual stream's rows of this device to all rows."""
        if not self.sequence:
            return x
        return jax.lax.all_gather(x, self.tp, axis=1, tiled=True)

    def leave(self, x: Float[Array, "b t d"]) -> Float[Array, "b r d"]:
        """Sum of all devices' parts, in the residual stream's rows of this device."""
        if self.tp is None:
            return x
        wide = x.astype(self.sum_dtype or x.dtype)
        if self.sequence:
            total = jax.lax.psum_scatter(wide, self.tp, scatter_dimension=1, tiled=True)
        else:
            total = self.vary(jax.lax.psum(wide, self.tp))
        return total.astype(x.dtype)

    def rows(self, x: Array) -> Array:
        """This device's rows of the residual stream, of an array [b, t, ...] that all have."""
        if not self.sequence:
            return x
        size = x.shape[1] // self.tp_size
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.tp) * size, size, 1)

    def tp_index(self) -> Int[Array, ""] | int:
        return 0 if self.tp is None else jax.lax.axis_index(self.tp)

    def vocab_start(self, rows: int) -> Int[Array, ""] | int:
        """Number of the first vocabulary row of this device, which has `rows` of them."""
        return rows * jax.lax.axis_index(self.vocab) if self.vocab else 0

    def vocab_sum(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Sum over the devices that share the vocabulary; of float32 or wider."""
        return self.vary(jax.lax.psum(x, self.vocab)) if self.vocab else x

    def vocab_max(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Maximum over them; no gradient flows through it."""
        x = jax.lax.stop_gradient(x)
        return self.vary(jax.lax.pmax(x, self.vocab)) if self.vocab else x

    def embed_sum(self, x: Float[Array, "b t d"]) -> Float[Array, "b r d"]:
        """Sum of looked-up rows over the vocabulary's devices, in this device's rows."""
        if not self.sequence or self.tp not in self.vocab:
            return self.rows(self.vocab_sum(x))
        others = tuple(a for a in self.vocab if a != self.tp)
        x = jax.lax.psum_scatter(x, self.tp, scatter_dimension=1, tiled=True)
        return self.vary(jax.lax.psum(x, others)) if others else x


ONE_DEVICE = Collectives()


def vocab_nats(
    logits: Float[Array, "b t v"], targets: Int[Array, "b t"], collectives: Collectives = ONE_DEVICE
) -> Float[Array, "b t"]:
    """Cross-entropy in nats of logits whose vocabulary is spread: v rows on each device.

    Only maxima, sums and the target's logit travel; the logits of all rows are never in one place.
    """
    peak = collectives.vocab_max(jnp.max(logits, axis=-1))
    total = collectives.vocab_sum(jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1))
    local = targets - collectives.vocab_start(logits.shape[-1])
    # A comparison, since the derivative of an index would write zeros of the logits' size.
    here = jnp.arange(logits.shape[-1]) == local[..., None]
    picked = collectives.vocab_sum(jnp.sum(jnp.where(here, logits, 0.0), axis=-1))
    return peak + jnp.log(total) - picked
