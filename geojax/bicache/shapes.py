# SPDX-License-Identifier: Apache-2.0
"""What a batch is compiled for, and its arrays.

Invariant: sizes come in buckets, and everything that differs within them is an argument, so that
few programs serve all requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from geojax.bicache.denoise import Rows
from geojax.bicache.depth import probe_places
from geojax.bicache.pages import pages_of
from geojax.bicache.slot import Slot
from geojax.diffusion.canvas import Canvas, Rules, begin, power_of_two

_FEWEST_ROWS = 64  # of a suffix
_NARROWEST = 32  # window


class Shape(NamedTuple):
    """What a program is compiled for."""

    rows: int
    prefix_pages: int
    suffix_rows: int
    window_rows: int

    @property
    def looking(self) -> "Shape":
        """Of a call in which a guard looks: coarser, since there are few of these."""
        return self._replace(suffix_rows=power_of_two(self.suffix_rows))


@dataclass(frozen=True)
class Shapes:
    """Of batches of one engine."""

    mask_id: int
    layers: int
    page: int
    keeps_suffix: bool
    """Whether keys and values of suffixes are kept between steps."""

    def of(self, slots: Sequence[Slot]) -> Shape:
        """The smallest that holds the slots."""
        suffix = max(int(s.rules.length[0]) - s.prefix for s in slots)
        widest = max(
            int(min(s.rules.block_size[0], s.rules.end[0] - s.rules.begin[0])) for s in slots
        )
        return Shape(
            power_of_two(len(slots)),
            page_bucket(max(len(s.counts) for s in slots)),
            suffix_bucket(suffix),
            max(power_of_two(widest), _NARROWEST),
        )

    def assemble(
        self, slots: Sequence[Slot], shape: Shape, probes: int, looked: Sequence[int]
    ) -> tuple[Rows, Canvas, Rules]:
        """Arrays of a batch; rows beyond the slots are done.

        `looked`: rows of each slot's prefix that a guard looks at in its refreshes, before which a
        call ends; `probes`: the most that there may be, or 0 where nobody looks in this call.
        """
        layers, b = self.layers, shape.rows
        behind = pages_of(shape.suffix_rows, self.page) if self.keeps_suffix else 0
        empty = begin([], self.mask_id, b, shape.prefix_pages * self.page + shape.suffix_rows)
        canvas, rules = ([np.array(x) for x in part] for part in empty)
        rows = Rows(
            prefix=np.zeros(b, np.int32),
            depth=np.full(b, layers, np.int32),
            table=np.zeros((layers, b, shape.prefix_pages), np.int32),
            counts=np.zeros((b, shape.prefix_pages), np.int32),
            hidden=np.zeros((b, shape.prefix_pages), np.int32),
            suffix=np.zeros((layers, b, behind), np.int32),
            every=np.ones(b, np.int32),
            since=np.ones(b, np.int32),
            watched=np.zeros(b, bool),
            probes=np.zeros((b, probes), np.int32),
            probe_slots=np.zeros((b, probes), np.int32),
            probe_count=np.zeros(b, np.int32),
        )
        for i, slot in enumerate(slots):
            for whole, part in zip(canvas, slot.canvas, strict=True):
                if whole.ndim == 2:
                    whole[i, : part.shape[1]] = part[0]
                else:
                    whole[i] = part[0]
            for whole, part in zip(rules, slot.rules, strict=True):
                whole[i] = part[0]
            rows.prefix[i], rows.depth[i] = slot.prefix, slot.depth
            rows.every[i], rows.since[i] = slot.every, slot.since
            rows.watched[i] = looked[i] > 0
            pages = len(slot.counts)
            rows.table[:, i, :pages], rows.counts[i, :pages] = slot.table, slot.counts
            rows.hidden[i, :pages] = slot.hidden
            rows.suffix[:, i, : slot.suffix.shape[1]] = slot.suffix
            if probes and looked[i]:
                places = probe_places(slot.prefix, looked[i])
                before = np.cumsum(slot.counts) - slot.counts
                at = np.searchsorted(before, places, side="right") - 1
                rows.probe_count[i] = looked[i]
                rows.probes[i, : looked[i]] = places
                rows.probe_slots[i, : looked[i]] = at * self.page + places - before[at]
        return rows, Canvas(*canvas), Rules(*rules)


def shapes_within(
    rows: Sequence[int], prefix_pages: int, suffix: int, block: int
) -> Iterator[Shape]:
    """All that batches of these sizes may have: of so many requests, with prefixes, suffixes and
    blocks up to these."""
    windows = [_NARROWEST]
    while windows[-1] < block:
        windows.append(2 * windows[-1])
    counts = sorted({power_of_two(n) for n in rows})
    for sizes in product(
        counts, page_buckets(prefix_pages), buckets(_FEWEST_ROWS, suffix), windows
    ):
        yield Shape(*sizes)


def bucket(size: int) -> int:
    """The smallest of 0, 1, 2, 3, 4, 6, 8, 12, ... (powers of two, and 1.5 times them) that is not
    below `size`."""
    whole = power_of_two(size) if size else 0
    return whole // 4 * 3 if whole >= 4 and size <= whole // 4 * 3 else whole


def buckets(least: int, most: int) -> list[int]:
    """From that of `least` up to the first that holds `most`."""
    found = [bucket(least)]
    while found[-1] < most:
        found.append(bucket(found[-1] + 1))
    return found


def suffix_bucket(rows: int) -> int:
    return max(bucket(rows), _FEWEST_ROWS)


def page_bucket(pages: int) -> int:
    """The same in pairs of pages: a prefix's rows cost something in refreshes only."""
    return 2 * bucket(-(-pages // 2))


def page_buckets(most: int) -> list[int]:
    """From none up to the first that holds `most`."""
    return [2 * pairs for pairs in buckets(0, -(-most // 2))]
