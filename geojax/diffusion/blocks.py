# SPDX-License-Identifier: Apache-2.0
"""Blocks of answers, each told of once, when it will not change any more.

Invariant: what is told of a request, joined, is its answer from the first mask on.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int32

from geojax.diffusion.request import Request, masks
from geojax.diffusion.sampler import Progress

OnBlock = Callable[[int, int, Int32[np.ndarray, " k"]], None]
"""The request's place in the batch, the block's first position, and its tokens; those of a last
block end with the end-of-text token where there is one."""


def by_block(
    requests: Sequence[Request], mask_id: int, on_block: OnBlock
) -> Callable[[Progress], None]:
    """An `on_step`, of `Sampler.sample` or `Engine.answer` for these requests, that calls
    `on_block` for each block that was committed since it was called last."""
    told, borders = [], []
    for request in requests:
        places = np.flatnonzero(masks(request, mask_id))
        first, end = int(places[0]), int(places[-1]) + 1
        told.append(first)
        borders.append([*range(first, end, request.sampling.block or end - first)[1:], end])

    def on_step(progress: Progress) -> None:
        for i, row in enumerate(borders):
            filled = int(progress.filled[i])
            while row and (filled >= row[0] or progress.done[i]):
                border = min(row.pop(0), filled)
                if border > told[i]:
                    on_block(i, told[i], progress.tokens[i, told[i] : border])
                    told[i] = border

    return on_step
