# SPDX-License-Identifier: Apache-2.0
"""Text to batches: sources, tokenizers, corpora, and sequences under one global cursor.

Arrows run one way: batches -> {masking, corpus -> {sources, tokenizer}}. Nothing here imports JAX,
and grain, tokenizers and datasets are imported only where they are used.
"""

from geojax.data.batches import (
    Batch,
    TrainSequences,
    ValidSequences,
    allot,
    both_splits,
    empty_batch,
)
from geojax.data.commands import describe
from geojax.data.corpus import Corpus, cache_dir, prepare
from geojax.data.sources import iter_documents
from geojax.data.task_set import TaskSet
from geojax.data.tokenizer import Tokenizer, load_tokenizer, read_tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "TaskSet",
    "Tokenizer",
    "TrainSequences",
    "ValidSequences",
    "allot",
    "both_splits",
    "cache_dir",
    "describe",
    "empty_batch",
    "iter_documents",
    "load_tokenizer",
    "prepare",
    "read_tokenizer",
]
