# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml names what the code imports, and docs/dependencies.md says what it is for."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from itertools import chain, takewhile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _declared(texts) -> set[str]:
    return {_plain(Requirement(text).name) for text in texts} - {"geojax"}


def _imports(body: Iterable[ast.AST]) -> set[str]:
    """Top-level names that these statements import."""
    found = set()
    for node in body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found - {"geojax"} - sys.stdlib_module_names


def _files() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("geojax", "models", "meshes", "configs"):
        for path in (ROOT / folder).rglob("*.py"):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


@cache
def _homes() -> Mapping[str, list[str]]:
    return packages_distributions()


def _undeclared(names: set[str], declared: set[str]) -> set[str]:
    homes = _homes()
    return {n for n in names if not {_plain(d) for d in homes.get(n, [n])} & declared}


def test_what_is_imported_is_declared():
    """By the core where a module imports it at once; by an extra where a function asks for it, and
    in what is of one extra."""
    core = _declared(PROJECT["dependencies"])
    optional = _declared(chain(*(EXTRAS[n] for n in EXTRAS if n not in ("test", "lint"))))
    files = list(_files())
    assert len(files) > 200
    for name, tree in files:
        of_extra = name.startswith(("geojax/serve/", "geojax/bench/serve"))
        assert not _undeclared(_imports(tree.body), core | (optional if of_extra else set())), name
        assert not _undeclared(_imports(ast.walk(tree)), core | optional), name


ASIDE = {"jaxlib", "google-cloud-storage", "jax-s-plugins"}
"""Named in the tables, and declared by others."""


def _rows(head: str, column: int) -> set[str]:
    """Packages that a table names in a column."""
    lines = (ROOT / "docs/dependencies.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head)) + 2
    rows = takewhile(lambda line: line.startswith("|"), lines[start:])
    cells = [row.split("|")[column] for row in rows if "**" not in row]
    return {
        _plain(re.sub("[^\\w.]+", "-", w.strip()))
        for c in cells
        for w in re.split(", with | with |, | and ", c)
    }


def test_each_package_has_a_row_and_each_row_a_package():
    assert _rows("| package |", 1) - ASIDE == _declared(PROJECT["dependencies"])
    texts = chain(*EXTRAS.values())
    assert _rows("| extra |", 2) - ASIDE == _declared(texts) - {"jax"}
