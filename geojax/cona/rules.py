# SPDX-License-Identifier: Apache-2.0
"""How learning rate, weight decay and Adam's memory follow the batch.

Invariant: at `base_batch`, where the config was tuned, every factor is 1 (a table's is what its
entries say), so a run that never leaves that batch is the run of the config. Batches and noise
scales are in sequences.
"""

import math
from typing import assert_never

import numpy as np

from geojax.config.rate import RateRule


def check_step(batch: int, noise: float) -> None:
    """ValueError unless the batch is at least 1 and the noise scale at least 0 (or infinite)."""
    if batch < 1:
        raise ValueError(f"batch {batch} must be at least 1 sequence; leave the strategy out")
    if not noise >= 0:
        raise ValueError(
            f"noise scale {noise} must be at least 0; average its numerator and denominator over "
            "more steps before dividing"
        )


def rate_factor(rule: RateRule, batch: int, noise: float) -> float:
    """The factor on the config's learning rate for steps on `batch` sequences.

    With k = batch / base_batch: linear k, sqrt √k, and adascale the gain of Johnson et al. 2020,
    (V + G²) / (V/k + G²), for a gradient of squared norm G² and variance V over batches of
    base_batch. As V / G² = noise / base_batch, that is (1 + noise/base_batch) / (1 + noise/batch):
    the ratio of the best learning rates of both batches under McCandlish et al. 2018. It lies
    between 1 (no noise) and k (nothing but noise).

    A table is interpolated linearly in log batch and log factor, and held beyond its ends.
    """
    check_step(batch, noise)
    match rule.kind:
        case "linear":
            return _capped(rule, batch, noise) / rule.base_batch
        case "sqrt":
            return math.sqrt(_capped(rule, batch, noise) / rule.base_batch)
        case "adascale":
            if math.isinf(noise):
                return batch / rule.base_batch
            return (1 + noise / rule.base_batch) / (1 + noise / batch)
        case "table":
            batches, factors = np.log(np.array(rule.table)).T
            return math.exp(np.interp(math.log(batch), batches, factors))
        case _:
            assert_never(rule.kind)


def _capped(rule: RateRule, batch: int, noise: float) -> float:
    return min(batch, max(noise, rule.base_batch)) if rule.cap else batch


def beta2_for(beta2: float, batch: int, base_batch: int) -> float:
    """Adam's second-moment decay a step, with the half-life in samples that it has at
    `base_batch`."""
    return beta2 ** (batch / base_batch)
