# SPDX-License-Identifier: Apache-2.0
"""The plans that slices trained by under CONA, and why these were changed.

Invariant: as of geojax.track.chain, which does the same for runs on one cluster.
"""

import json

from pydantic import TypeAdapter

from geojax.config import BalanceConfig, ConaConfig, ScalingConfig
from geojax.track.chain import agreement, chain_table
from geojax.track.section import Block
from geojax.track.summary import Run


def plan_blocks(run: Run) -> list[Block]:
    """Empty for a run without such plans."""
    if not run.plans:
        return []
    from geojax.geomesh.steering import replay  # which imports JAX; few reports need it

    def part(kind, name: str):
        return TypeAdapter(kind).validate_json(json.dumps(run.config.get(name)))

    scaling = part(ScalingConfig | None, "scaling")
    rule = scaling.rate_rule() if scaling else None
    pairs = replay(run.plans, part(BalanceConfig, "balance"), part(ConaConfig, "cona"), rule)
    table = chain_table(run)
    table.columns[1].header = "plan: strategy x inner steps of each slice"
    return [Block("its plans", table, (agreement(run.plans, pairs),))]
