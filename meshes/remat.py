# SPDX-License-Identifier: Apache-2.0
"""What the backward pass finds of the forward pass, and what it computes again."""

from typing import Any

from geojax.meshes.axes import TENSOR
from geojax.meshes.strategy import Remat
from geojax.models.dropout import KEPT_MASK

LAYER_INPUT = "layer input"
_SUMS = ("reduce_scatter", "psum", "psum_invariant")
_ATTENTION = "dot_product_attention_fwd"  # start of the name of cuDNN's kernel


def keeps(remat: Remat, primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether the backward pass finds the result of an operation of the forward pass.

    Always a layer's input. Under "matmuls" also products with weights, summed over devices; under
    "none" also what attention and all other collectives gave, and dropout's masks. All else is
    elementwise, and cheaper to compute again than to write and read. Weights that were cast,
    gathered from other copies or picked out of a stage's chunks are never kept.
    """
    name = params["name"] if primitive.name == "name" else primitive.name
    if name == LAYER_INPUT:
        return True
    if remat == "full":
        return False
    if name == "dot_general":
        return not params["dimension_numbers"][1][0]  # with batch dims it is attention's
    axes = params.get("axis_name", params.get("axes"))
    between_parts = axes in (TENSOR, (TENSOR,))
    if name in _SUMS:
        return between_parts
    if remat == "matmuls":
        return False
    if name == "all_gather":
        return between_parts
    return name == KEPT_MASK or name.startswith(_ATTENTION)
