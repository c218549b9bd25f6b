# SPDX-License-Identifier: Apache-2.0
"""One exchange: pseudo-gradients of the local slices in, the merged one out, for each local slice.

Invariant: what a slice's message does not carry is in its error feedback, and nothing else is; a
slice that is left out of a round sends no elements and keeps its error feedback as it was.

gather: every slice sends its whole message to every other, and each decodes and merges all of them.
two_phase: slice k owns shard k of the parameters. All send it theirs, it merges them, encodes the
result again, with error feedback of its own, and sends it to all.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from geojax.geomesh.codec import (
    Leaves,
    Message,
    Share,
    decode,
    encode,
    finite,
    sign_agreement,
)
from geojax.geomesh.layout import Layout
from geojax.geomesh.message import FRAME_BYTES, Header, MessageError, pack, unpack
from geojax.geomesh.outer import merge_weights
from geojax.meshes.wan import wire_bytes

_LARGEST = 1e30  # sums over a tile and over slices do not overflow


@runtime_checkable
class Exchange(Protocol):
    """An engine that moves bytes between all slices; this process holds some of them."""

    def all_gather(self, messages: Sequence[Message]) -> list[list[Message]]: ...

    def all_to_all(self, messages: Sequence[Sequence[Message]]) -> list[list[Message]]: ...


@dataclass
class ErrorFeedback:
    """What a slice's messages did not carry yet; belongs to the slice's identity."""

    own: list[Float32[np.ndarray, "..."]]
    """Of its pseudo-gradient, one array a leaf."""
    shard: Float32[np.ndarray, " n"]
    """two_phase: of the shard that it merges; empty under gather."""


@dataclass
class Contribution:
    """What one local slice brings to an exchange."""

    index: int
    pseudo_gradient: Leaves
    """Leaves of the pytree; not finite, or beyond 1e30: the slice is left out."""
    tokens: int
    """0: the slice is left out."""
    steps: int
    feedback: ErrorFeedback | None
    energy: Share = Share()
    """Set by the exchange."""


class Most(NamedTuple):
    """Loss-bearing tokens that a slice's samples of a round can hold."""

    tokens: int
    step_tokens: int
    """Those of one inner step."""


class Merged(NamedTuple):
    """What an exchange yields."""

    pseudo_gradients: list[Leaves] | None
    """One for each local slice, decoded from the messages that it received; None: all were left
    out."""
    headers: list[Header]
    """Of all slices, in order; no tokens: left out."""
    agreement: Share
    sent_bytes: list[int]
    """By each local slice, to other slices."""
    exchange_seconds: float
    """Real time that messages were under way."""


class Synchronizer:
    """Runs exchanges of one layout under one schedule."""

    def __init__(
        self,
        layout: Layout,
        exchange: Exchange | None,
        names: Sequence[str],
        schedule: Literal["gather", "two_phase"],
        merge: Literal["tokens", "fednova"],
    ):
        """`names`: of all slices, in order. Without an engine there are `pack`, `check` and
        `merge`, for one that may leave slices out."""
        self._layout = layout
        self._exchange = exchange
        self._names = names
        self._merge: Literal["tokens", "fednova"] = merge
        self._schedule = schedule
        count = len(names)
        self._shards = [layout.shard(i, count) for i in range(count)]

    def init_feedback(self, index: int, leaves: Leaves) -> ErrorFeedback:
        """No error yet, for slice `index` and a parameter pytree with these leaves."""
        owned = self._shards[index].num_elements if self._schedule == "two_phase" else 0
        own = [np.zeros(leaf.shape, np.float32) for leaf in leaves]
        return ErrorFeedback(own, np.zeros(owned, np.float32))

    def exchange(self, round_: int, contributions: Sequence[Contribution]) -> Merged:
        """Exchange and merge; `contributions` are of the local slices, in order."""
        assert self._exchange, "an engine was given"
        for c in contributions:
            _leave_out_if_not_finite(c)
        if self._schedule == "gather":
            return self._gather(self._exchange, round_, contributions)
        return self._two_phase(self._exchange, round_, contributions)

    def _gather(
        self, engine: Exchange, round_: int, contributions: Sequence[Contribution]
    ) -> Merged:
        messages = [self._message(round_, c, self._layout) for c in contributions]
        with _Timer() as timer:
            received = engine.all_gather(messages)
        rows = [self.merge(round_, row, contributions[0].pseudo_gradient) for row in received]
        results = [row.pseudo_gradients for row in rows]
        all_or_none = None if any(r is None for r in results) else [r[0] for r in results if r]
        sent = wire_bytes("gather", len(self._names), messages[0].size)
        return rows[-1]._replace(
            pseudo_gradients=all_or_none,
            sent_bytes=[sent] * len(contributions),
            exchange_seconds=timer.seconds,
        )

    def pack(self, round_: int, contribution: Contribution) -> Message:
        """A slice's whole message, as under gather, for an engine that may leave it out: error
        feedback is overwritten, so hand over a copy, and keep it once the message was merged."""
        _leave_out_if_not_finite(contribution)
        return self._message(round_, contribution, self._layout)

    def check(self, round_: int, index: int, message: Message) -> None:
        """MessageError unless it is slice `index`'s message for the round, and finite."""
        header, body = unpack(message, round_, index, self._names[index])
        if body.size != self._layout.num_bytes or not (
            header.tokens == 0 or finite(body, self._layout, _LARGEST)
        ):
            raise MessageError(
                f"slice {self._names[index]}: its message for round {round_} has {body.size} bytes "
                f"of {self._layout.num_bytes}, or numbers that are not finite"
            )

    def merge(
        self,
        round_: int,
        row: Sequence[Message | None],
        like: Leaves,
        most: Sequence[Most] | None = None,
    ) -> Merged:
        """One slice's part of a gather: all messages, None of a slice that is left out. `like` has
        the shapes of the result. A message that says more than `most` of its slice is left out, for
        its weight would be what it says."""
        headers, bodies = self._open(round_, row)
        if most:
            headers = [
                h if h.tokens <= min(m.tokens, h.steps * m.step_tokens) else h._replace(tokens=0)
                for h, m in zip(headers, most, strict=True)
            ]
        out = _empty_like(like)
        merged = self._merge_into(out, headers, bodies, self._layout)
        agreement = self._agreement(headers, bodies, self._layout)
        return Merged([out] if merged else None, headers, agreement, [0], 0.0)

    def _two_phase(
        self, engine: Exchange, round_: int, contributions: Sequence[Contribution]
    ) -> Merged:
        sending = [[self._message(round_, c, s) for s in self._shards] for c in contributions]
        with _Timer() as timer:
            received = engine.all_to_all(sending)
        agreement, headers, merged_any, shards = Share(), [], False, []
        for c, row in zip(contributions, received, strict=True):
            headers, bodies = self._open(round_, row)
            flat = self._shards[c.index].flattened()
            out = [np.empty(flat.num_elements, np.float32)]
            merged = self._merge_into(out, headers, bodies, flat)
            merged_any |= merged
            agreement += self._agreement(headers, bodies, flat)
            shards.append(self._merged_shard(round_, c, flat, out if merged else None))
        with timer:
            gathered = engine.all_gather(shards)
        results = []
        for row in gathered:
            out = _empty_like(contributions[0].pseudo_gradient)
            for shard, body in zip(self._shards, self._open(round_, row)[1], strict=True):
                decode([body], [1.0], shard, out)
            results.append(out if merged_any else None)
        others = len(self._names) - 1
        sent = [
            sum(m.size for i, m in enumerate(row) if i != c.index) + others * shard.size
            for c, row, shard in zip(contributions, sending, shards, strict=True)
        ]
        return Merged(_all_or_none(results), headers, agreement, sent, timer.seconds)

    def _message(self, round_: int, c: Contribution, layout: Layout) -> Message:
        if c.tokens:
            residual = c.feedback.own if c.feedback else None
            body, energy = encode(c.pseudo_gradient, layout, residual)
            c.energy += energy
        else:
            body = np.zeros(layout.num_bytes, np.uint8)
        return pack(Header(round_, c.index, c.tokens, c.steps), body)

    def _merged_shard(
        self, round_: int, c: Contribution, flat: Layout, merged: Leaves | None
    ) -> Message:
        if merged is None:
            body = np.zeros(flat.num_bytes, np.uint8)
        else:
            body, _ = encode(merged, flat, [c.feedback.shard] if c.feedback else None)
        return pack(Header(round_, c.index, c.tokens, c.steps), body)

    def _open(
        self, round_: int, row: Sequence[Message | None]
    ) -> tuple[list[Header], list[Message]]:
        absent = np.empty(0, np.uint8)
        opened = [
            (Header(round_, i, 0, 0), absent)
            if message is None
            else unpack(message, round_, i, self._names[i])
            for i, message in enumerate(row)
        ]
        return [header for header, _ in opened], [body for _, body in opened]

    def _merge_into(
        self, out: Leaves, headers: Sequence[Header], bodies: Sequence[Message], layout: Layout
    ) -> bool:
        """Whether there was anything to merge."""
        weights = merge_weights(headers, self._merge)
        if weights is None:
            return False
        joined = [body for body, header in zip(bodies, headers, strict=True) if header.tokens]
        decode(joined, [w for w in weights if w], layout, out)
        return True

    @staticmethod
    def _agreement(headers: Sequence[Header], bodies: Sequence[Message], layout: Layout) -> Share:
        joined = [body for body, header in zip(bodies, headers, strict=True) if header.tokens]
        return sign_agreement(joined, layout)


class _Timer:
    """Seconds inside `with`, summed over uses."""

    def __init__(self):
        self.seconds = 0.0

    def __enter__(self) -> "_Timer":
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


def payload_bytes(layout: Layout) -> int:
    """Bytes of one slice's message."""
    return FRAME_BYTES + layout.num_bytes


def _leave_out_if_not_finite(contribution: Contribution) -> None:
    leaves = contribution.pseudo_gradient
    if not all(np.abs(leaf).max(initial=0.0) <= _LARGEST for leaf in leaves):
        contribution.tokens = 0  # a NaN is not <= either


def _empty_like(leaves: Leaves) -> list[np.ndarray]:
    return [np.empty(leaf.shape, np.float32) for leaf in leaves]


def _all_or_none(results: list) -> list | None:
    return None if any(r is None for r in results) else results
