# SPDX-License-Identifier: Apache-2.0
"""Sequences, and the one global cursor over them.

Invariant: global sample n is a pure function of (corpus, seq_len, seed, masking, n): sequence
`order(n % sequences)` of epoch `n // sequences`, each epoch its own permutation and its own masks.
Training state therefore holds one number, the next sample; slices of any batch size and number of
inner steps take disjoint, contiguous ranges from it, and a resumed run continues with the very next
sample. Every sequence carries its number, from which dropout draws as well.

Sequence s covers tokens [s T, s T + T + 1) of the stream, so an epoch predicts every token once,
save the stream's first and the fewer than T that fill no sequence. Under masking its tokens are the
first T of these, its targets the same tokens, and its loss is of the masked ones alone.

Shapes: S steps, B sequences a batch, T tokens a sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from jaxtyping import Float32, Int32, UInt32

from geojax.config import MaskingConfig
from geojax.data.corpus import Corpus
from geojax.data.masking import Masker

if TYPE_CHECKING:
    import grain


class Batch(NamedTuple):
    """Sequences as a model takes them."""

    tokens: Int32[np.ndarray, "*lead T"]
    targets: Int32[np.ndarray, "*lead T"]
    """The token after each; under masking, the token that each was."""
    weights: Float32[np.ndarray, "*lead T"]
    """1 where the target bears loss, 0 at padding and, under a document mask, after end-of-text;
    under masking, 1 at masked tokens only."""
    segments: Int32[np.ndarray, "*lead T"]
    """Number of the document inside the sequence under a document mask, else 0. Under masking,
    where tokens see those after them, padding has a number of its own."""
    positions: Int32[np.ndarray, "*lead T"]
    """Place inside the sequence, or inside the document under a document mask."""
    samples: UInt32[np.ndarray, "*lead"]
    """Number of the sequence modulo 2**32: its global sample in training, its place in the stream
    in validation. Rows of padding count on."""


def empty_batch(lead: tuple[int, ...], seq_len: int) -> Batch:
    """Zeros of the shapes and types of a batch, to compile with."""
    places = (*lead, seq_len)
    tokens, targets, segments, positions = (np.zeros(places, np.int32) for _ in range(4))
    weights, samples = np.zeros(places, np.float32), np.zeros(lead, np.uint32)
    return Batch(tokens, targets, weights, segments, positions, samples)


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
    masking: MaskingConfig | None = None

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
        self,
        start: int,
        steps: int,
        batch: int,
        chunk_steps: int,
        prefetch: int = 2,
        rows: Sequence[int] | None = None,
    ) -> Iterator[tuple[Batch, int]]:
        """Yield the samples of `chunk(start, steps, batch)` piecewise, `prefetch` pieces ahead.

        Each item is (batch [chunk_steps, B, T], steps that are real): only the last has fewer than
        chunk_steps, and steps of weight 0 after them, so that one compiled shape serves all.
        `rows`: the places of each batch to read, where a process feeds some of the devices only;
        B is then their number.
        """
        import grain

        def read(first: int) -> tuple[Batch, int]:
            real = min(chunk_steps, steps - first)
            return self._padded(start + first * batch, real, batch, chunk_steps, rows), real

        firsts = grain.MapDataset.source(range(0, steps, chunk_steps))
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        yield from firsts.map(read).to_iter_dataset(options)

    def _padded(
        self,
        start: int,
        steps: int,
        batch: int,
        padded_steps: int,
        rows: Sequence[int] | None = None,
    ) -> Batch:
        places = np.arange(batch) if rows is None else np.asarray(rows)
        samples = (start + np.arange(padded_steps)[:, None] * batch + places).reshape(-1)
        order = self._order
        flat = _read(
            self.corpus.train,
            [cast(int, order[n]) for n in samples[: steps * len(places)].tolist()],
            samples,
            self.seq_len,
            self.corpus.eos_id if self.document_mask else None,
            self._masker,
        )
        return Batch(*(x.reshape(padded_steps, len(places), *x.shape[1:]) for x in flat))

    @cached_property
    def _masker(self) -> Masker | None:
        return _masker(self.corpus, self.masking, self.seed)

    @cached_property
    def _order(self) -> "grain.MapDataset[int]":
        """Sequence of each global sample. Grain reshuffles every repetition by its number."""
        import grain

        return grain.MapDataset.source(range(self.sequences)).seed(self.seed).shuffle().repeat()


@dataclass(frozen=True)
class ValidSequences:
    """Held-out sequences in the order of the stream; a last one that is not full is padded.

    Masks depend on the sequence alone, so that evaluations, and runs of all seeds, compare.
    """

    corpus: Corpus
    seq_len: int
    document_mask: bool = False
    masking: MaskingConfig | None = None

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
            samples = np.arange(start, start + batch)
            yield _read(stream, rows, samples, self.seq_len, eos_id, self._masker)

    @cached_property
    def _masker(self) -> Masker | None:
        return _masker(self.corpus, self.masking, None)


def _masker(corpus: Corpus, masking: MaskingConfig | None, seed: int | None) -> Masker | None:
    if masking is None:
        return None
    return Masker(masking, corpus.mask_id, corpus.ordinary, seed)


def _read(
    stream: np.ndarray,
    sequences: Sequence[int],
    samples: np.ndarray,
    seq_len: int,
    eos_id: int | None,
    masker: Masker | None,
) -> Batch:
    """`sequences` of `stream` as [rows, T], `samples` being the number of each row; rows beyond the
    sequences, and places beyond the stream, are zeros of weight 0. `eos_id` masks documents; None
    packs them as one."""
    rows = len(samples)
    places = np.array(sequences, np.int64)[:, None] * seq_len + np.arange(seq_len + 1)
    inside = places < len(stream)
    windows = np.zeros((rows, seq_len + 1), np.int32)
    windows[: len(places)] = stream[np.where(inside, places, 0)] * inside
    real = np.zeros((rows, seq_len + 1), bool)
    real[: len(places)] = inside
    tokens, targets = np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
    weights = real[:, 1:].astype(np.float32)
    positions = np.tile(np.arange(seq_len, dtype=np.int32), (rows, 1))
    segments = np.zeros_like(tokens)
    samples = samples.astype(np.uint64)
    if eos_id is not None:
        starts = np.zeros(tokens.shape, bool)
        starts[:, 1:] = tokens[:, :-1] == eos_id
        segments = np.cumsum(starts, axis=1, dtype=np.int32)
        positions = positions - np.maximum.accumulate(positions * starts, axis=1)
        weights *= tokens != eos_id
    if masker:
        targets = tokens
        tokens, weights = masker(tokens, samples, real[:, :-1])
        segments = segments + ~real[:, :-1]
    return Batch(tokens, targets, weights, segments, positions, samples.astype(np.uint32))
