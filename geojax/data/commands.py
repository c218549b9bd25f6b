# SPDX-License-Identifier: Apache-2.0
"""What the command line says of a corpus."""

from geojax.data.corpus import Corpus
from geojax.data.task_set import TaskSet
from geojax.data.tasks import TASKS


def describe(corpus: Corpus | TaskSet) -> list[tuple[str, str]]:
    """Rows of (label, value) for the console."""
    if isinstance(corpus, TaskSet):
        return [
            ("tasks", f"{', '.join(task.name for task in TASKS)}; made as they are read"),
            ("vocabulary", f"{corpus.vocab_size} ids, mask {corpus.mask_id}"),
        ]
    tokens = len(corpus.train) + len(corpus.valid)
    rows = [
        ("documents", f"{corpus.train_documents:,} train, {corpus.valid_documents:,} validation"),
        ("tokens", f"{len(corpus.train):,} train, {len(corpus.valid):,} validation"),
        ("vocabulary", f"{corpus.vocab_size:,} entries, end-of-text {corpus.eos_id}"),
        ("text bytes a token", f"{corpus.text_bytes / tokens:.2f}"),
        ("stored as", str(corpus.train.dtype)),
        ("sequences", f"{corpus.sequences:,} an epoch of {corpus.seq_len:,} tokens each"),
        ("folder", str(corpus.folder)),
    ]
    masking = corpus.masking
    if masking and masking.kind == "diffusion":
        cut = f"; {_percent(masking.cut)} of sequences cut to any length" if masking.cut else ""
        line = f"any share of a sequence hidden by token {corpus.mask_id} and predicted{cut}"
        rows.insert(-1, ("masking", line))
    elif masking:
        fates = {
            f"token {corpus.mask_id}": 1 - masking.randomize - masking.keep,
            "random": masking.randomize,
            "unchanged": masking.keep,
        }
        line = ", ".join(f"{_percent(share)} {fate}" for fate, share in fates.items())
        rows.insert(
            -1, ("masking", f"{_percent(masking.fraction)} of a sequence predicted, of it {line}")
        )
    return rows


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"
