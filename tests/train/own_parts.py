# SPDX-License-Identifier: Apache-2.0
"""Parts of a run that are not geojax's: a layer and optimizers, which configs of tests name."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon

from geojax.models.layers import make_norm, normal_init


class Gated(nnx.Module):
    """x + down(sigmoid(gain * gate(norm(x)))): no attention, a vector and two matrices."""

    def __init__(self, config, *, rngs):
        self.own_norm = make_norm(config)
        self.gate = normal_init(rngs, config.dim, config.mlp_dim, fan_in=config.dim)
        self.gain = nnx.Param(jnp.ones(config.mlp_dim))
        self.down = normal_init(rngs, config.mlp_dim, config.dim, fan_in=config.mlp_dim)

    def __call__(self, x, rotary, inputs, collectives, attend):
        gate, gain, down = (w[...].astype(x.dtype) for w in (self.gate, self.gain, self.down))
        return x + jax.nn.sigmoid(gain * (self.own_norm(x) @ gate)) @ down


def adamw() -> optax.GradientTransformation:
    """What geojax's own adamw with b2 0.95 is."""
    return optax.adamw(1.0, b1=0.9, b2=0.95, weight_decay=0.0)


def masked() -> optax.GradientTransformation:
    """Muon for layers' matrices, AdamW for the rest: a state with holes."""

    def dims(path, leaf):
        layers = path[0].key == "blocks" and leaf.ndim == 3
        return MuonDimensionNumbers(1, 2) if layers else None

    def every(params):
        return jax.tree_util.tree_map_with_path(dims, params)

    return muon(1.0, muon_weight_dimension_numbers=every)


def factored() -> optax.GradientTransformation:
    """Keeps of a matrix one number a row and a column."""
    return optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=8), optax.scale(-1.0))


def nothing() -> None:
    """No optimizer."""


def fails() -> optax.GradientTransformation:
    raise KeyError("rate")


A_NUMBER = 3
