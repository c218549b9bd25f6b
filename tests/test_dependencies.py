# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml names what the code imports, and docs/dependencies.md says what it is for."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _declared(texts) -> set[str]:
    return {_plain(Requirement(text).name) for text in texts} - {"geojax"}


def _imported() -> set[str]:
    """Top-level names that the code imports, inside functions as well."""
    found = set()
    for folder in ("geojax", "models", "meshes", "configs"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.split(".")[0])
    return found - {"geojax"} - sys.stdlib_module_names


def test_what_is_imported_is_declared():
    tools = {"test", "lint"}
    texts = chain(PROJECT["dependencies"], *(EXTRAS[n] for n in EXTRAS if n not in tools))
    declared, homes = _declared(texts), packages_distributions()
    assert len(_imported()) > 20
    for name in sorted(_imported()):
        home = {_plain(d) for d in homes.get(name, [name])}
        assert home & declared, f"{name} is imported, and no dependency of pyproject.toml"


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_what_is_declared_is_accounted_for(extra):
    rows = (ROOT / "docs/dependencies.md").read_text().splitlines()
    known = {
        _plain(word) for row in rows if row.startswith("|") for word in re.findall(r"[\w.-]+", row)
    }
    for name in _declared(EXTRAS[extra] if extra else PROJECT["dependencies"]):
        assert name in known, f"{name} has no row in docs/dependencies.md"
