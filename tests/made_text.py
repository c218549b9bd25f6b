# SPDX-License-Identifier: Apache-2.0
"""Text that is made up, so that tests need none from anywhere."""

import random
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


def write_words(folder: Path, words: int = 400, lines: int = 1) -> Path:
    """A file of 16 documents of `lines` lines of `words` words each, of 50 different ones."""
    rng = random.Random(0)
    known = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    documents = (
        "\n".join(" ".join(rng.choices(known, k=words)) for _ in range(lines)) for _ in range(16)
    )
    path = folder / "words.txt"
    path.write_text("\n\n".join(documents))
    return path


@contextmanager
def words_and_cache(folder: Path, words: int = 400, lines: int = 1) -> Generator[Path]:
    """The same, and a cache of tokens beside it, in force meanwhile."""
    path = write_words(folder, words, lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEOJAX_CACHE", str(folder / "cache"))
        yield path
