# SPDX-License-Identifier: Apache-2.0
"""A model in fragments: every P-th layer, and with one of them what is not a layer.

Layers a stride apart, as Streaming DiLoCo found best. Embedding (and whatever else comes before
the layers) goes with the first fragment; head and last norm with the last. Invariant: every
parameter is in exactly one fragment, and `put` undoes `take`.
"""

from typing import Any

import jax
import numpy as np

from geojax.models.transformer import Params

_FIRST = ("embed", "positions", "types")


def take(params: Params, index: int, fragments: int) -> Params:
    """Fragment `index`: a pytree like `params` with fewer entries, and views of its arrays."""
    part: dict[str, Any] = {"blocks": jax.tree.map(lambda x: x[index::fragments], params["blocks"])}
    for name, value in params.items():
        if name != "blocks" and _owner(name, fragments) == index:
            part[name] = value
    return part


def put(params: Params, part: Params, index: int, fragments: int) -> Params:
    """`params` with fragment `index` replaced; the arrays given stay as they were."""

    def replaced(whole: np.ndarray, layers: np.ndarray) -> np.ndarray:
        whole = np.array(whole)
        whole[index::fragments] = layers
        return whole

    rest = {name: value for name, value in part.items() if name != "blocks"}
    blocks = jax.tree.map(replaced, params["blocks"], part["blocks"])
    return dict(params) | {"blocks": blocks} | rest


def _owner(name: str, fragments: int) -> int:
    return 0 if name.startswith(_FIRST) else fragments - 1
