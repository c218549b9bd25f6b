# SPDX-License-Identifier: Apache-2.0
"""Text for runs of a second, and where they keep its tokens."""

import random
from pathlib import Path

import pytest
from tiny_run import tiny_run

from geojax.config import RunConfig


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    documents = (" ".join(rng.choices(words, k=400)) for _ in range(16))
    path = folder / "words.txt"
    path.write_text("\n\n".join(documents))
    return path


@pytest.fixture
def cache(text, monkeypatch):
    monkeypatch.setenv("GEOJAX_CACHE", str(text.parent / "cache"))


@pytest.fixture
def config(text) -> RunConfig:
    return tiny_run(text)
