# SPDX-License-Identifier: Apache-2.0
"""Optimizers and schedules from optax, with the learning rate as a function of tokens.

Invariant: an optimizer here yields an unscaled direction and counts no rate; the caller multiplies
by a rate that depends on the tokens seen by all slices together. So slices with different numbers
of inner steps, batch ramps and resumed runs all follow one schedule.
"""

from typing import Any

import jax
import optax

from geojax.config import ConfigError, OptimizerConfig, ScheduleConfig, require
from geojax.config.own import load_own
from geojax.models.params import roles

_RESOLUTION = 1_000_000  # optax schedules count steps; one step is this share of the run


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Direction of descent before the learning rate; decoupled weight decay included.

    Weight decay leaves vectors (norm scales, biases) alone. ConfigError where an optimizer of the
    user's own is none.
    """
    if config.name == "own":
        return _own(config.function)
    b1 = 0.9 if config.b1 is None else config.b1
    if config.name == "lion":
        core = optax.scale_by_lion(b1, 0.99 if config.b2 is None else config.b2)
    elif config.name == "adamw":
        core = optax.scale_by_adam(b1, 0.95 if config.b2 is None else config.b2)
    elif config.momentum:
        core = optax.trace(config.momentum, config.nesterov)
    else:
        core = optax.identity()
    if not config.weight_decay:
        return core
    return optax.chain(core, optax.add_decayed_weights(config.weight_decay, _decayed))


def make_schedule(config: ScheduleConfig, peak: float) -> optax.Schedule:
    """Learning rate at a progress in [0, 1]: tokens seen over tokens of the whole run."""
    warmup = round(config.warmup_fraction * _RESOLUTION)
    rest = max(1, _RESOLUTION - warmup)
    final = config.final_fraction
    if config.decay == "cosine":
        main = optax.cosine_decay_schedule(peak, rest, alpha=final)
    else:
        main = optax.linear_schedule(peak, peak * final, rest)
    if warmup:
        main = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), main], [warmup])
    return lambda progress: main(progress * _RESOLUTION)


def _own(function: str) -> optax.GradientTransformation:
    """The user's, turned about: optax's updates are added, and a direction here is descended."""
    make = load_own(function, "optimizer function")
    try:
        made = make()
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"optimizer function {function!r} failed: {reason}") from error
    require(
        isinstance(made, optax.GradientTransformation),
        f"optimizer function {function!r} returned {type(made).__name__}; return an optax "
        "optimizer, such as optax.adamw(1.0)",
    )
    return optax.chain(made, optax.scale(-1.0))


def _decayed(params: Any) -> Any:
    return jax.tree.map(lambda role: role.kind != "vector", roles(params))
