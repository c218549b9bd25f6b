# SPDX-License-Identifier: Apache-2.0
"""Methods to compare with that need loops of their own: HALoS and Streaming DiLoCo.

Invariant: no setting is ignored; one that such a method would not look at is refused.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from geojax.config.base import STRICT, require
from geojax.config.geomesh import ExchangeConfig, OuterConfig

if TYPE_CHECKING:
    from geojax.config.run import RunConfig


@dataclass(frozen=True)
class ServerConfig:
    """A parameter server's outer optimizer: delayed Nesterov (Liu et al. 2024)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    learning_rate: float = 1.0
    """Of every update that arrives."""
    momentum: float = 0.0
    every: int = 1
    """Updates that are summed before they enter the momentum, which acts once then."""

    def __post_init__(self):
        require(
            self.learning_rate > 0,
            f"halos: a server's learning_rate {self.learning_rate} must be above 0",
        )
        require(
            0 <= self.momentum < 1,
            f"halos: a server's momentum {self.momentum} must lie in [0, 1)",
        )
        require(self.every >= 1, f"halos: a server's every {self.every} must be at least 1")


@dataclass(frozen=True)
class HalosConfig:
    """Hierarchical asynchronous local SGD (Kim et al. 2025)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    local_server: ServerConfig
    """Of each region: takes the updates of its slices as they come."""
    global_server: ServerConfig
    """In the region of the first slice: takes the regions' as they come."""
    updates_per_push: int
    """Slices' updates that a region takes before it sends what they came to."""
    local_weight: float = 0.25
    """Share of the region's own parameters when the global ones come back."""

    def __post_init__(self):
        require(
            self.updates_per_push >= 1,
            f"halos.updates_per_push {self.updates_per_push} must be at least 1",
        )
        require(
            0 <= self.local_weight < 1,
            f"halos.local_weight {self.local_weight} must lie in [0, 1); at 1 nothing global would "
            "reach a region",
        )


@dataclass(frozen=True)
class StreamingConfig:
    """Streaming DiLoCo (Douillard et al. 2025)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    fragments: int = 2
    """Parts of the model, each a share of the layers, exchanged in turn over a round."""
    lag_steps: int = 1
    """Inner steps between sending a fragment and taking its result in."""
    local_weight: float = 0.5
    """Share of a slice's own parameters when a fragment's result comes in."""

    def __post_init__(self):
        require(self.fragments >= 1, f"streaming.fragments {self.fragments} must be at least 1")
        require(self.lag_steps >= 0, f"streaming.lag_steps {self.lag_steps} must be at least 0")
        require(
            0 <= self.local_weight < 1,
            f"streaming.local_weight {self.local_weight} must lie in [0, 1); at 1 slices would "
            "never meet",
        )


def check_baselines(run: "RunConfig") -> None:
    """ConfigError where a run by one of these methods sets what they do not look at."""
    name = "halos" if run.halos else "streaming"
    require(
        not (run.halos and run.streaming),
        "halos and streaming are two methods; set one of them",
    )
    require(
        run.slices and run.cona is None,
        f"{name} is a method of slices with a plan of their own; give slices, and leave cona out",
    )
    require(
        run.clock.kind == "modelled",
        f"{name} runs in the order of modelled time; set clock.kind to 'modelled'",
    )
    if run.halos:
        exact = ExchangeConfig(codec="fp32", error_feedback=False)
        for part, value, wanted in (
            ("exchange", run.exchange, exact),
            ("outer", run.outer, OuterConfig()),
        ):
            require(
                value == wanted,
                f"halos sends whole float32 updates to its servers, which have optimizers of their "
                f"own; leave {part} at {wanted}",
            )
        return
    assert run.streaming is not None
    fragments, lag = run.streaming.fragments, run.streaming.lag_steps
    steps = run.balance.inner_steps
    require(
        run.balance.mode == "equal" and steps,
        "streaming sends each fragment at the same step of all slices; set balance.mode to 'equal' "
        "and balance.inner_steps",
    )
    layers = min(run.model.layers, run.clocked_model().layers)
    require(
        fragments <= layers,
        f"streaming.fragments {fragments} exceed the model's {layers} layers; use {layers} or "
        "fewer",
    )
    assert steps is not None
    require(
        lag < steps // fragments,
        f"streaming.lag_steps {lag}: a fragment must be back before the next one goes, "
        f"balance.inner_steps {steps} / {fragments} fragments later; use at most "
        f"{steps // fragments - 1}",
    )
