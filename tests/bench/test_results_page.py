# SPDX-License-Identifier: Apache-2.0
"""docs/results.md says what the files of figures beside it come to, and nothing else."""

import json
from pathlib import Path

from geojax.bench.paper import PARTS, collect, render

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_made_of_the_figures():
    results = collect(DOCS / "results")
    assert (DOCS / "results.md").read_text() == render(results)
    assert json.loads((DOCS / "results.json").read_text()) == results


def test_figures_name_the_command_that_made_them():
    files = {path.name for path in (DOCS / "results").iterdir()}
    assert files
    assert files <= {part.figures for part in PARTS.values()}
    for name in files:
        content = json.loads((DOCS / "results" / name).read_text())
        assert content["command"].startswith("geojax ")
        assert "/tmp" not in content["command"]
