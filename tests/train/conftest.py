# SPDX-License-Identifier: Apache-2.0
"""Text for runs of a second, and where they keep its tokens."""

from pathlib import Path

import pytest
from made_text import write_words
from tiny_run import tiny_run

from geojax.config import RunConfig


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    return write_words(tmp_path_factory.mktemp("text"))


@pytest.fixture
def cache(text, monkeypatch):
    monkeypatch.setenv("GEOJAX_CACHE", str(text.parent / "cache"))


@pytest.fixture
def config(text) -> RunConfig:
    return tiny_run(text)
