# SPDX-License-Identifier: Apache-2.0
"""K slices placed on a WAN, and the exchanges by which each gets what all have.

Model: that of geojax.meshes.wan, by phases, with any number of bytes from each slice to each. Where
the WAN's lines are shared, the slices of a region send over one line, whose bytes to all other
regions go one after another, as one slice's do; local transfers go beside them. With jitter every
transfer of every phase comes later by a draw of its own. Invariant: with one slice a region and no
jitter, `gather` and `two_phase` take what `Wan` says; the draws of a round depend on the seed and
the round alone.

gather, two_phase: as in geojax.geomesh.sync. hub: the slices of a region send their messages to
its first slice, which merges and encodes them again; the hubs exchange by gather or two_phase,
whichever is faster; each hub sends its region what it received (the other hubs' messages and its
own, or the merged one), so that all slices decode the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from geojax.meshes.wan import Wan

Pattern = Literal["gather", "two_phase", "hub"]
PATTERNS: tuple[Pattern, ...] = ("gather", "two_phase", "hub")
SLACK = 0.05
"""How much slower than the fastest a simpler pattern may be to be taken."""
Bytes = Float64[np.ndarray, "K K"]
"""From each slice (row) to each (column)."""


class Exchanged(NamedTuple):
    """One exchange."""

    seconds: float
    sent_bytes: Int64[np.ndarray, " K"]
    """By each slice."""
    wan_bytes: Int64[np.ndarray, " K"]
    """Of these, to other regions."""


@dataclass(frozen=True)
class Network:
    """Slices in `regions` of `wan`, one an entry."""

    wan: Wan
    regions: tuple[str, ...]
    jitter_seconds: float = 0.0
    """Mean of what comes on top of a transfer's latency, exponentially distributed."""
    seed: int = 0

    @cached_property
    def _places(self) -> Int64[np.ndarray, " K"]:
        return np.array([self.wan.regions.index(region) for region in self.regions])

    @cached_property
    def _seconds_per_byte(self) -> Bytes:
        place = self._places
        return 8 / np.array(self.wan.bits_per_second)[np.ix_(place, place)]

    @cached_property
    def _latency(self) -> Bytes:
        place = self._places
        return np.array(self.wan.rtt_seconds)[np.ix_(place, place)] / 2

    @cached_property
    def hubs(self) -> Int64[np.ndarray, " K"]:
        """The hub of each slice: the first slice of its region."""
        return np.array([self.regions.index(region) for region in self.regions])

    def link_seconds(self, src: int, dst: int, num_bytes: int, draw: tuple[int, ...] = ()) -> float:
        """Of one transfer, which is alone on its link; `draw` names its jitter."""
        extra = 0.0
        if self.jitter_seconds:
            extra = float(self._random(draw).exponential(self.jitter_seconds))
        return float(self._latency[src, dst] + num_bytes * self._seconds_per_byte[src, dst] + extra)

    def phase_seconds(self, moved: Bytes, random: np.random.Generator | None = None) -> float:
        """Until the slice with most to send or receive is through, and the latest has arrived."""
        there = moved > 0
        if not there.any():
            return 0.0
        latency = self._latency[there]
        if random is not None:
            latency = latency + random.exponential(self.jitter_seconds, latency.shape)
        assert not np.isnan(latency).any(), "a link without a round trip is refused before"
        return float(latency.max() + self._busy_seconds(moved * self._seconds_per_byte))

    def _busy_seconds(self, busy: Bytes) -> float:
        """Of the slice, or the region's line, with most to send or receive; `busy`: seconds of each
        transfer."""
        parts = [busy]
        if self.wan.shared:
            outside = self._places[:, None] != self._places
            of = np.eye(len(self.wan.regions))[self._places]
            parts = [np.where(outside, 0, busy), of.T @ np.where(outside, busy, 0) @ of]
        return max(float(part.sum(axis).max()) for part in parts for axis in (0, 1))

    def exchange(self, pattern: Pattern, message_bytes: int, round_: int = 0) -> Exchanged:
        """Each slice contributes `message_bytes`; `round_` names the draws of jitter."""
        random = self._random((round_,)) if self.jitter_seconds else None
        phases = self._phases(pattern, message_bytes)
        seconds = sum(self.phase_seconds(moved, random) for moved in phases)
        outside = self._places[:, None] != self._places
        sent, wan = (
            np.rint(sum(np.where(part, moved, 0).sum(1) for moved in phases)).astype(np.int64)
            for part in (True, outside)
        )
        return Exchanged(seconds, sent, wan)

    def fastest(self, message_bytes: int, patterns: Sequence[Pattern] = PATTERNS) -> Pattern:
        """The pattern of the least modelled time, without jitter; of those within 5 % of it the
        first, since it is simpler and a model is no better than that."""
        seconds = {p: self._quiet_seconds(self._phases(p, message_bytes)) for p in patterns}
        limit = (1 + SLACK) * min(seconds.values())
        return next(p for p, took in seconds.items() if took <= limit)

    def _quiet_seconds(self, phases: Sequence[Bytes]) -> float:
        return sum(self.phase_seconds(moved) for moved in phases)

    def _phases(self, pattern: Pattern, message_bytes: int) -> list[Bytes]:
        count = len(self.regions)
        everyone = np.arange(count)
        if pattern != "hub":
            return _flat(pattern, everyone, count, message_bytes)
        hubs = np.unique(self.hubs)
        spokes = everyone[self.hubs != everyone]
        collect = np.zeros((count, count))
        collect[spokes, self.hubs[spokes]] = message_bytes
        between, flat = min(
            ((p, _flat(p, hubs, count, message_bytes)) for p in ("gather", "two_phase")),
            key=lambda pair: self._quiet_seconds(pair[1]),
        )
        spread = collect.T * (len(hubs) if between == "gather" else 1)
        return [collect, *flat, spread]

    def _random(self, draw: tuple[int, ...]) -> np.random.Generator:
        return np.random.default_rng((self.seed, *draw))


def _flat(pattern: str, members: np.ndarray, count: int, message_bytes: int) -> list[Bytes]:
    """Phases of a gather or of two phases among `members` of `count` slices."""
    shard = message_bytes if pattern == "gather" else -(-message_bytes // len(members))
    moved = np.zeros((count, count))
    moved[np.ix_(members, members)] = shard
    np.fill_diagonal(moved, 0)
    return [moved] if pattern == "gather" else [moved, moved]
