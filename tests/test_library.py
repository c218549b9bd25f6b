# SPDX-License-Identifier: Apache-2.0
"""geojax as a library: what it exports is there, documented, and costs nothing until it is used."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import geojax

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


def fresh(code: str) -> str:
    """What `code` prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    "use", ["import geojax; geojax.RunConfig", "from geojax.cli import main; main(['--help'])"]
)
def test_what_must_answer_at_once_imports_nothing_heavy(use):
    heavy = ("jax", "flax", "optax", "orbax", "scipy", "matplotlib", "pydantic")
    said = fresh(f"import sys; {use}; print([m for m in {heavy} if m in sys.modules])")
    assert said.splitlines()[-1] == "[]"


def test_every_exported_name_is_there_once_and_what_type_checkers_see():
    for name in geojax.__all__:
        assert getattr(geojax, name) is not None
    assert sorted(geojax._PLACES) == sorted(geojax.__all__) == geojax.__all__
    assert set(geojax.__all__) <= set(dir(geojax))
    source = (ROOT / "geojax" / "__init__.py").read_text()
    seen = {
        (named.split(" as ")[-1].strip(), module)
        for module, names in re.findall(r"    from ([\w.]+) import (.+)", source)
        for named in names.split(",")
    }
    assert seen == set(geojax._PLACES.items())


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'geojax' has no attribute 'trian'"):
        geojax.trian  # noqa: B018


def test_the_api_page_is_what_the_docstrings_say():
    main = runpy.run_path(str(ROOT / "scripts" / "api.py"))["main"]
    assert main(["--check"]) == 0, "run `python scripts/api.py`"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) < 60


SAYS = {
    "bicache_own_sampler": r"none: ([\d,]+) rows[^\n]*\nbicache: ([\d,]+) rows",
    "cona_own_layers": r"chain: dp\d.* from \d[^\n]*\nperplexity: ([\d.]+) at first, ([\d.]+) at",
    "geomesh_own_optimizer": r"perplexity: ([\d.]+) at first, ([\d.]+) at the end\neach slice",
}


@pytest.mark.runs
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_its_result_is_better_than_it_began(path, tmp_path):
    done = subprocess.run(
        [sys.executable, str(path)],
        env=os.environ | {"XLA_FLAGS": ""},  # as a user's: one device, optimised
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(SAYS[path.stem], done.stdout)
    assert found, done.stdout
    before, after = (float(x.replace(",", "")) for x in found.groups())
    assert after < before / 2
