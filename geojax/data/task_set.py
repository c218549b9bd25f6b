# SPDX-License-Identifier: Apache-2.0
"""Generated tasks in the place of a corpus: rows without end, made when they are read."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool

from geojax.config import MaskingConfig, require
from geojax.data import tasks
from geojax.data.splits import Split, Windows

_ROWS = 2**31 - 1  # of a split; numbers of rows, not memory
_SEEDS = {"train": 0, "valid": 1}


@dataclass(frozen=True)
class Generated:
    """Rows of `tasks.make_rows`."""

    seed: int
    seq_len: int

    @property
    def sequences(self) -> int:
        return _ROWS

    def read(self, numbers: Sequence[int]) -> Windows:
        rows = tasks.make_rows(np.array(numbers, np.uint64), self.seed, self.seq_len)
        beyond = lambda x: np.pad(x, ((0, 0), (0, 1)))  # noqa: E731
        return Windows(beyond(rows.tokens), beyond(rows.real), beyond(rows.maskable))


@dataclass(frozen=True)
class TaskSet:
    """What a run asks of a corpus, of generated tasks."""

    seq_len: int
    masking: MaskingConfig | None = None
    vocab_size: ClassVar[int] = tasks.VOCAB
    eos_id: ClassVar[int] = tasks.END
    mask_id: ClassVar[int] = tasks.MASK
    tokenizer_fingerprint: ClassVar[str] = "none"
    folder: ClassVar[Path] = Path(
        "tasks-" + hashlib.sha256(Path(tasks.__file__).read_bytes()).hexdigest()[:16]
    )
    """No folder; its name says which rows these are."""

    @property
    def sequences(self) -> int:
        return _ROWS

    @property
    def ordinary(self) -> Bool[np.ndarray, "vocab"]:
        return np.arange(tasks.VOCAB) < tasks.BEGIN

    def split(self, name: Literal["train", "valid"], seq_len: int) -> Split:
        return Generated(_SEEDS[name], seq_len)

    def require_batch(self, batch: int) -> None:
        """There are always enough."""


def prepare_tasks(seq_len: int, masking: MaskingConfig | None, vocab_size: int) -> TaskSet:
    """ConfigError where the model's vocabulary is too small, or tokens are not masked."""
    require(
        vocab_size >= tasks.VOCAB,
        f"data.source.kind 'tasks' has {tasks.VOCAB} ids with its mask, beyond model.vocab_size "
        f"{vocab_size}; raise it",
    )
    require(
        masking is not None and masking.kind == "diffusion",
        "data.source.kind 'tasks' is for masked diffusion: set data.masking to "
        "MaskingConfig(kind='diffusion')",
    )
    tasks.make_rows(np.zeros(1, np.uint64), 0, seq_len)  # refuses what is too short
    return TaskSet(seq_len, masking)
