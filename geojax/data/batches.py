# SPDX-License-Identifier: Apache-2.0
"""Sequences, and the one global cursor over them.

Invariant: global sample n is a pure function of (corpus, seq_len, seed, masking, n): sequence
`order(n % sequences)` of epoch `n // sequences`, each epoch its own permutation and its own masks.
Training state therefore holds one number, the next sample; slices of any batch size and number of
inner steps take disjoint, contiguous ranges from it, and a resumed run continues with the very next
sample. Every sequence carries its number, from which dropout draws as well.

Sequence s covers tokens [s T, s T + T + 1) of the stream, so an epoch predicts every token once,
save the stream's first and the fewer than T that fill no sequence; or it is one example. Under
masking its tokens are the first T of these, its targets the same tokens, and its loss is of the
masked ones alone. A shifted model predicts them one place earlier, and so never a first token.

Shapes: S steps, B sequences a batch, T tokens a sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from jaxtyping import Float32, Int32, UInt32

from geojax.config import DataConfig, MaskingConfig
from geojax.data.corpus import Corpus
from geojax.data.masking import Masker
from geojax.data.splits import Split, Windows
from geojax.data.task_set import TaskSet

if TYPE_CHECKING:
    import grain


class Batch(NamedTuple):
    """Sequences as a model takes them."""

    tokens: Int32[np.ndarray, "*lead T"]
    targets: Int32[np.ndarray, "*lead T"]
    """The token after each; under masking, the token that each was, or of a shifted model the
    token that the one after it was."""
    weights: Float32[np.ndarray, "*lead T"]
    """What a target counts in the loss: 1, or 0 at padding, in prompts and, under a document mask,
    after end-of-text; under masking, as the masker says, and 0 where nothing is masked."""
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

    corpus: Corpus | TaskSet
    seq_len: int
    seed: int
    """At least 0."""
    document_mask: bool = False
    masking: MaskingConfig | None = None
    shifted: bool = False
    """Whether the model predicts a masked token one place before it."""

    @property
    def sequences(self) -> int:
        """Sequences an epoch."""
        return self._split.sequences

    def ids(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(epoch, sequence in the stream) of global samples start..stop."""
        order = self._order
        return [(n // self.sequences, cast(int, order[n])) for n in range(start, stop)]

    def chunk(self, start: int, steps: int, batch: int) -> Batch:
        """Global samples start..start + steps * batch, in order, as [S, B, T]."""
        return self._padded(start, steps, batch, steps)

    def chunks(
        self,
        start: int | np.ndarray,
        steps: int,
        batch: int,
        chunk_steps: int,
        prefetch: int = 2,
        rows: Sequence[int] | None = None,
    ) -> Iterator[tuple[Batch, int]]:
        """Yield the samples of `chunk(start, steps, batch)` piecewise, `prefetch` pieces ahead.

        In place of the first one, `start` may hold all samples, in order.

        Each item is (batch [chunk_steps, B, T], steps that are real): only the last has fewer than
        chunk_steps, and steps of weight 0 after them, so that one compiled shape serves all.
        `rows`: the places of each batch to read, where a process feeds some of the devices only;
        B is then their number.
        """
        import grain

        def read(first: int) -> tuple[Batch, int]:
            real = min(chunk_steps, steps - first)
            return self._padded(later(first * batch), real, batch, chunk_steps, rows), real

        def later(done: int) -> int | np.ndarray:
            if isinstance(start, np.ndarray):
                return start[done:]
            return start + done

        firsts = grain.MapDataset.source(range(0, steps, chunk_steps))
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        yield from firsts.map(read).to_iter_dataset(options)

    def _padded(
        self,
        start: int | np.ndarray,
        steps: int,
        batch: int,
        padded_steps: int,
        rows: Sequence[int] | None = None,
    ) -> Batch:
        places = np.arange(batch) if rows is None else np.asarray(rows)
        spots = (np.arange(padded_steps)[:, None] * batch + places).reshape(-1)
        if isinstance(start, np.ndarray):
            samples = start[np.minimum(spots, len(start) - 1)]
        else:
            samples = start + spots
        order = self._order
        flat = _read(
            self._split.read(
                [cast(int, order[n]) for n in samples[: steps * len(places)].tolist()]
            ),
            samples,
            self.corpus.eos_id if self.document_mask else None,
            self._masker,
            self.shifted,
        )
        return Batch(*(x.reshape(padded_steps, len(places), *x.shape[1:]) for x in flat))

    @cached_property
    def _split(self) -> Split:
        return self.corpus.split("train", self.seq_len)

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

    Masks depend on the sequence and the draw alone, so that evaluations, and runs of all seeds,
    compare.
    """

    corpus: Corpus | TaskSet
    seq_len: int
    document_mask: bool = False
    masking: MaskingConfig | None = None
    shifted: bool = False
    """Whether the model predicts a masked token one place before it."""

    @property
    def sequences(self) -> int:
        """Sequences there are."""
        return self._split.sequences

    def batches(
        self, batch: int, sequences: int, first: int = 0, draws: int = 1
    ) -> Iterator[Batch]:
        """Yield `sequences` sequences from `first` on, or what there is of them, as [B, T], under
        `draws` masks one after another.

        The last batch of a draw is filled up with rows of weight 0.
        """
        end = min(first + sequences, self.sequences)
        eos_id = self.corpus.eos_id if self.document_mask else None
        for draw in range(draws):
            for start in range(first, end, batch):
                windows = self._split.read(range(start, min(start + batch, end)))
                samples = np.arange(start, start + batch) + draw * self.sequences
                yield _read(windows, samples, eos_id, self._masker, self.shifted)

    @cached_property
    def _split(self) -> Split:
        return self.corpus.split("valid", self.seq_len)

    @cached_property
    def _masker(self) -> Masker | None:
        return _masker(self.corpus, self.masking, None)


def both_splits(
    corpus: Corpus | TaskSet, config: DataConfig, shifted: bool
) -> tuple[TrainSequences, ValidSequences]:
    """The sequences of a run; `shifted`: as in them."""
    how = (config.document_mask, config.masking, shifted)
    train = TrainSequences(corpus, config.seq_len, config.seed, *how)
    return train, ValidSequences(corpus, config.seq_len, *how)


def _masker(
    corpus: Corpus | TaskSet, masking: MaskingConfig | None, seed: int | None
) -> Masker | None:
    if masking is None:
        return None
    return Masker(masking, corpus.mask_id, corpus.ordinary, seed)


def _read(
    windows: Windows,
    samples: np.ndarray,
    eos_id: int | None,
    masker: Masker | None,
    shifted: bool,
) -> Batch:
    """Windows as [rows, T], `samples` being the number of each row; rows beyond the windows are
    zeros of weight 0. `eos_id` masks documents; None packs them as one."""
    rows, seq_len = len(samples), windows.tokens.shape[1] - 1
    whole, real, scored = (
        np.concatenate([x, np.zeros((rows - len(x), seq_len + 1), x.dtype)]) for x in windows
    )
    tokens, targets = np.ascontiguousarray(whole[:, :-1]), np.ascontiguousarray(whole[:, 1:])
    weights = scored[:, 1:].astype(np.float32)
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
        targets, real, scored = tokens, real[:, :-1], scored[:, :-1].copy()
        real = real & (np.arange(seq_len) < masker.lengths(samples, seq_len)[:, None])
        scored &= real
        if shifted:
            # Who predicts a token is the one before it, of the same document.
            scored[:, 0] = False
            scored[:, 1:] &= segments[:, 1:] == segments[:, :-1]
        tokens, weights = masker(tokens, samples, scored)
        segments = segments + ~real
        if shifted:
            last = np.zeros((rows, 1))
            targets = np.append(targets[:, 1:], last.astype(np.int32), axis=1)
            weights = np.append(weights[:, 1:], last.astype(np.float32), axis=1)
    return Batch(tokens, targets, weights, segments, positions, samples.astype(np.uint32))
