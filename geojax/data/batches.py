# SPDX-License-Identifier: Apache-2.0
"""Sequences, and the one global cursor over them.

Invariant: global sample n is a pure function of (corpus, seq_len, seed, n): sequence
`order(n % sequences)` of epoch `n // sequences`, each epoch its own permutation. Training state
therefore holds one number, the next sample; slices of any batch size and number of inner steps
take disjoint, contiguous ranges from it, and a resumed run continues with the very next sample.

Sequence s covers tokens [s T, s T + T + 1) of the stream, so an epoch predicts every token once,
save the stream's first and the fewer than T that fill no sequence.

Shapes: S steps, B sequences a batch, T tokens predicted a sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from jaxtyping import Float32, Int32

from geojax.data.corpus import Corpus

if TYPE_CHECKING:
    import grain


class Batch(NamedTuple):
    """Sequences as a model takes them."""

    tokens: Int32[np.ndarray, "*lead T"]
    targets: Int32[np.ndarray, "*lead T"]
    """The token after each."""
    weights: Float32[np.ndarray, "*lead T"]
    """1 where the target bears loss, 0 at padding and, under a document mask, after end-of-text."""
    segments: Int32[np.ndarray, "*lead T"]
    """Number of the document inside the sequence under a document mask, else 0."""
    positions: Int32[np.ndarray, "*lead T"]
    """Place inside the sequence, or inside the document under a document mask."""


def allot(cursor: int, sequences: Sequence[int]) -> tuple[list[range], int]:
    """Each slice's range of global samples for one round, and the cursor of the next round.

    `sequences[i]` is H_i * b_i of slice i, at least 1; ranges are contiguous in slice order.
    """
    assert min(sequences) >= 1, f"a slice takes no sequence: {list(sequences)}"
    borders = list(accumulate(sequences, initial=cursor))
    return [range(start, stop) for start, stop in pairwise(borders)], borders[-1]


@dataclass(frozen=True)
class TrainSequences:
    """Training sequences by global sample."""

    corpus: Corpus
    seq_len: int
    seed: int
    """At least 0."""
    document_mask: bool = False

    @property
    def sequences(self) -> int:
        """Sequences an epoch."""
        return (len(self.corpus.train) - 1) // self.seq_len

    def ids(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(epoch, sequence in the stream) of global samples start..stop."""
        order = self._order
        return [(n // self.sequences, cast(int, order[n])) for n in range(start, stop)]

    def chunk(self, start: int, steps: int, batch: int) -> Batch:
        """Global samples start..start + steps * batch, in order, as [S, B, T]."""
        return self._padded(start, steps, batch, steps)

    def chunks(
        self, start: int, steps: int, batch: int, chunk_steps: int, prefetch: int = 2
    ) -> Iterator[tuple[Batch, int]]:
        """Yield the samples of `chunk(start, steps, batch)` piecewise, `prefetch` pieces ahead.

        Each item is (batch [chunk_steps, B, T], steps that are real): only the last has fewer than
        chunk_steps, and steps of weight 0 after them, so that one compiled shape serves all.
        """
        import grain

        def read(first: int) -> tuple[Batch, int]:
            real = min(chunk_steps, steps - first)
            return self._padded(start + first * batch, real, batch, chunk_steps), real

        firsts = grain.MapDataset.source(range(0, steps, chunk_steps))
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        yield from firsts.map(read).to_iter_dataset(options)

    def _padded(self, start: int, steps: int, batch: int, padded_steps: int) -> Batch:
        rows = [sequence for _, sequence in self.ids(start, start + steps * batch)]
        flat = _read(
            self.corpus.train,
            rows,
            padded_steps * batch,
            self.seq_len,
            self.corpus.eos_id if self.document_mask else None,
        )
        return Batch(*(x.reshape(padded_steps, batch, self.seq_len) for x in flat))

    @cached_property
    def _order(self) -> "grain.MapDataset[int]":
        """Sequence of each global sample. Grain reshuffles every repetition by its number."""
        import grain

        return grain.MapDataset.source(range(self.sequences)).seed(self.seed).shuffle().repeat()


@dataclass(frozen=True)
class ValidSequences:
    """Held-out sequences in the order of the stream; a last one that is not full is padded."""

    corpus: Corpus
    seq_len: int
    document_mask: bool = False

    @property
    def sequences(self) -> int:
        """Sequences there are."""
        return -((1 - len(self.corpus.valid)) // self.seq_len)

    def batches(self, batch: int, sequences: int, first: int = 0) -> Iterator[Batch]:
        """Yield `sequences` sequences from `first` on, or what there is of them, as [B, T].

        The last batch is filled up with rows of weight 0.
        """
        stream = self.corpus.valid
        end = min(first + sequences, self.sequences)
        eos_id = self.corpus.eos_id if self.document_mask else None
        for start in range(first, end, batch):
            rows = range(start, min(start + batch, end))
            yield _read(stream, rows, batch, self.seq_len, eos_id)


def _read(
    stream: np.ndarray, sequences: Sequence[int], rows: int, seq_len: int, eos_id: int | None
) -> Batch:
    """`sequences` of `stream` as [rows, T]; rows beyond them, and places beyond the stream, are
    zeros of weight 0. `eos_id` masks documents; None packs them as one."""
    places = np.array(sequences, np.int64)[:, None] * seq_len + np.arange(seq_len + 1)
    real = places < len(stream)
    windows = np.zeros((rows, seq_len + 1), np.int32)
    windows[: len(places)] = stream[np.where(real, places, 0)] * real
    weights = np.zeros((rows, seq_len), np.float32)
    weights[: len(places)] = real[:, 1:]
    tokens, targets = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
    positions = np.tile(np.arange(seq_len, dtype=np.int32), (rows, 1))
    segments = np.zeros_like(tokens)
    if eos_id is not None:
        starts = np.zeros(tokens.shape, bool)
        starts[:, 1:] = tokens[:, :-1] == eos_id
        segments = np.cumsum(starts, axis=1, dtype=np.int32)
        positions = positions - np.maximum.accumulate(positions * starts, axis=1)
        weights *= tokens != eos_id
    return Batch(tokens, targets, weights, segments, positions)
