# SPDX-License-Identifier: Apache-2.0
"""Methods to compare with that have loops of their own, over the demo's base."""

from collections.abc import Callable
from dataclasses import replace

from geojax.config import (
    ExchangeConfig,
    HalosConfig,
    OuterConfig,
    RunConfig,
    ServerConfig,
    StreamingConfig,
)
from geojax.configs.geomesh import TUNED, Optimizers, diloco


def halos(base: RunConfig, tuned: Optimizers = TUNED) -> RunConfig:
    """HALoS: no rounds, a server in each region and one for all; AdamW.

    Kim et al. 2025. Each slice takes the inner steps that fit its speed, as with the published
    code's scaled numbers of steps.
    """
    return replace(
        diloco(base, tuned),
        name="halos",
        balance=replace(base.balance, mode="adaptive"),
        outer=OuterConfig(),
        halos=HalosConfig(  # the best of nine on the tuning text (docs/simulate.md)
            local_server=ServerConfig(learning_rate=0.7, momentum=0.3),
            global_server=ServerConfig(learning_rate=0.35, momentum=0.3),
            updates_per_push=2,
        ),
    )


def streaming_diloco(base: RunConfig, tuned: Optimizers = TUNED) -> RunConfig:
    """Streaming DiLoCo: parts of the model in turn, beside the steps; AdamW.

    Douillard et al. 2025, with 8 bits for their 4.
    """
    return replace(
        diloco(base, tuned),
        name="streaming-diloco",
        exchange=ExchangeConfig(codec="int8", schedule="two_phase"),
        # At a local weight of 0.5, their choice, perplexity is 2.7 % higher on the tuning text.
        streaming=StreamingConfig(fragments=2, lag_steps=3, local_weight=0.0),
    )


BASELINES: dict[str, Callable[..., RunConfig]] = {
    "halos": halos,
    "streaming-diloco": streaming_diloco,
}
