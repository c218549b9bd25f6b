# SPDX-License-Identifier: Apache-2.0
"""Imports go the one way that docs/design.md says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BESIDE = ("models", "meshes", "configs")


def _levels() -> dict[str, int]:
    """Height of each part of geojax, from the arrows in docs/design.md; parts of one have equal."""
    text = " ".join((ROOT / "docs/design.md").read_text().split())
    arrows = re.search(r"Arrows run one way: `([^`]+)`", text)[1].split(" -> ")
    return {
        part.strip(): height
        for height, parts in enumerate(reversed(arrows))
        for part in parts.strip("{}").split(",")
    }


def _imports() -> Iterator[tuple[Path, str, str]]:
    """Each file, its part of geojax, and what it imports of geojax, inside functions as well."""
    packages = {p.name: p for p in [ROOT / "geojax", *(ROOT / n for n in _BESIDE)]}
    for name, folder in packages.items():
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder)
            part = name if name in _BESIDE else inner.with_suffix("").parts[0]
            if path.name == "__main__.py" or (part in (*_BESIDE, "__init__") and name == "geojax"):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.ImportFrom(module="geojax"):
                        yield from ((path, part, alias.name) for alias in node.names)
                    case ast.ImportFrom(module=str(module)) if module.startswith("geojax."):
                        yield path, part, module.removeprefix("geojax.")
                    case ast.Import():
                        wanted = (a.name for a in node.names if a.name.startswith("geojax."))
                        yield from ((path, part, w.removeprefix("geojax.")) for w in wanted)


def test_imports_go_the_way_of_the_arrows():
    levels, found = _levels(), list(_imports())
    assert len(found) > 1000
    for path, part, module in found:
        if module not in ("config.base", "config.own"):  # they know nothing of a config
            other = module.split(".")[0]
            where = f"{path.relative_to(ROOT)} imports geojax.{module}"
            assert levels[part] >= levels[other], where
