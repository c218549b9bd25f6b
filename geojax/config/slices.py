# SPDX-License-Identifier: Apache-2.0
"""Slices whose strategies CONA chooses: what then may not be set elsewhere.

Invariant: no setting is ignored; one that would be is refused.
"""

from typing import TYPE_CHECKING

from geojax.config.base import require
from geojax.config.cona import ConaConfig
from geojax.config.geomesh import BalanceConfig, SliceConfig
from geojax.meshes.strategy import enumerate_strategies

if TYPE_CHECKING:
    from geojax.config.run import RunConfig


def check_sliced_cona(run: "RunConfig", cona: ConaConfig) -> None:
    """ConfigError for whatever CONA decides or does not look at, a modelled slice without a GPU's
    figures, and one whose devices can take no batch."""
    settings = [
        ("balance.batch_sizes", run.balance.batch_sizes, BalanceConfig.batch_sizes),
        ("train.micro_batch", run.train.micro_batch, None),
    ]
    for name in ("layouts", "start", "timing_error", "trial_share"):
        settings.append((f"cona.{name}", getattr(cona, name), getattr(ConaConfig, name)))
    for s in run.slices:
        for name in ("tp", "pp", "remat", "sharding"):
            value, default = getattr(s, name), getattr(SliceConfig, name)
            settings.append((f"slice {s.name}: {name}", value, default))
    for name, value, default in settings:
        require(
            value == default,
            f"{name} {value!r} means nothing where cona chooses the strategies of slices, from "
            f"cona.global_batches and cona.micro_batches; leave it at {default!r}",
        )
    modelled = run.clock.kind == "modelled"
    for s in run.slices:
        require(
            not s.speed,
            f"slice {s.name}: speed {s.speed} makes steps take time by their sequences alone, so "
            "that the smallest batch is always best; with cona give each slice its gpu",
        )
        devices, model = (s.gpus, run.clocked_model()) if modelled else (s.devices, run.model)
        found = enumerate_strategies(model, devices, cona.global_batches, cona.micro_batches)
        require(
            found.legal,
            f"slice {s.name}: its {devices} devices can take none of cona.global_batches "
            f"{cona.global_batches}: {', '.join(reason for _, reason in found.excluded[:1])}",
        )
