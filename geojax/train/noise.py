# SPDX-License-Identifier: Apache-2.0
"""What a step says of the gradient's noise, from squared norms of parts of its gradient.

Invariant: norms are of gradients as they were summed, before clipping, in float32 or wider, and of
the whole gradient whatever the strategy; geojax.cona.noise says how the noise scale follows.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from geojax.cona.noise import Moments, single_step
from geojax.config import OptimizerConfig
from geojax.meshes.gradient import LossSums, Sequences
from geojax.meshes.squares import Squares, block_norms, block_squares
from geojax.models.transformer import Params

Metric = Literal["plain", "preconditioned"]
"""In which norm: the Euclidean one; or with each block's squares divided by the root mean square of
its gradient, as the optimizer knows it."""
Measure = Callable[[Params, Squares, jax.Array, optax.OptState], dict[str, Moments]]
Measured = tuple[LossSums, Params, Squares]


def make_measure(
    metric: Metric, optimizer: OptimizerConfig, sequences: int, source: str | None
) -> Measure:
    """`measure(gradient, squares, tokens, opt_state)`: moments of one step, by source.

    `gradient` is summed over the `tokens` of all `sequences` of the batch; `source`: what
    `squares.parts` are, or None where there is one part only, which says nothing.
    """

    def measure(gradient, squares, tokens, opt_state) -> dict[str, Moments]:
        total = block_squares(gradient)
        scales = None
        if metric == "preconditioned":
            scales = _block_scales(opt_state, optimizer)
        norms, norm_scales = block_norms(total["blocks"]), scales and block_norms(scales["blocks"])

        def moments(total, parts, scales, tokens_squared) -> Moments:
            whole, apart = (_weigh(tree, scales) for tree in (total, parts))
            s, g = single_step(whole, apart, tokens, tokens_squared, sequences)
            good = jnp.isfinite(s) & jnp.isfinite(g) & (whole > 0)
            values = (jnp.ones_like(s), s, g, s * s, g * g, s * g)
            return Moments(*(jnp.where(good, x, 0) for x in values))

        found = {"norms": moments(norms, squares.norms, norm_scales, squares.norms_tokens)}
        if source:
            found[source] = moments(total, squares.parts, scales, squares.parts_tokens)
        return found

    return measure


def in_halves(
    gradient: Callable[[Params, Sequences, Any], Measured],
) -> Callable[[Params, Sequences, Any], Measured]:
    """The same gradient as a sum over two halves of the batch, every other sequence each: parts
    that every strategy has, for twice the time."""

    def whole(params, batch: Sequences, key) -> Measured:
        rows = batch.weights.shape[1]
        number = jnp.arange(batch.weights.shape[0])[:, None] * rows + jnp.arange(rows)
        halves = []
        for half in (0, 1):
            weights = batch.weights * (number % 2 == half)[..., None]
            halves.append(gradient(params, batch._replace(weights=weights), key))
        sums, grads, squares = jax.tree.map(jnp.add, *halves)
        parts = jax.tree.map(jnp.add, *(block_squares(half[1]) for half in halves))
        parts_tokens = sum(jnp.square(half[0].tokens) for half in halves)
        return sums, grads, squares._replace(parts=parts, parts_tokens=parts_tokens)

    return whole


def _weigh(squares: Any, scales: Any) -> jax.Array:
    if scales is not None:
        squares = jax.tree.map(jnp.multiply, squares, scales)
    return sum((jnp.sum(x) for x in jax.tree.leaves(squares)), jnp.zeros(()))


def _block_scales(opt_state: optax.OptState, optimizer: OptimizerConfig) -> Params:
    """One over the root mean square of each block's gradient; 0 where there never was any.

    From Adam's second moment; from Lion's momentum, whose sign gives all elements of a tensor the
    same step whatever their size. So the quadratic model of McCandlish et al. 2018 holds for the
    preconditioned step where the curvature goes as the gradient's size.
    """
    get = optax.tree_utils.tree_get
    name, default = ("nu", 0.95) if optimizer.name == "adamw" else ("mu", 0.99)
    decay = default if optimizer.b2 is None else optimizer.b2
    moment = get(opt_state, name)
    correction = 1 - decay ** jnp.maximum(get(opt_state, "count"), 1)
    if optimizer.name == "adamw":
        moment = jax.tree.map(jnp.sqrt, moment)
    sums, sizes = block_squares(moment), jax.tree.map(jnp.size, moment)

    def scale(total, size):
        mean = total / (size / total.size)
        mean = mean / correction if optimizer.name == "adamw" else mean / correction**2
        return jnp.where(mean > 0, jax.lax.rsqrt(jnp.where(mean > 0, mean, 1.0)), 0.0)

    return jax.tree.map(scale, sums, sizes)
