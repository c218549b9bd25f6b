# SPDX-License-Identifier: Apache-2.0
"""What geojax depends on, as installed here: `python scripts/dependencies.py`.

One line a package that pyproject.toml names: version, its own megabytes, and those with all that it
needs in turn (packages that several need are in each of them).
"""

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement


def needs(found: Distribution, extras: tuple[str, ...] = ("",)) -> set[str]:
    """Names of what it requires here."""
    parsed = [Requirement(text) for text in found.requires or ()]
    return {
        plain(r.name)
        for r in parsed
        if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)
    }


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(name: str) -> set[str]:
    """`name` and all that it needs, as far as it is installed."""
    seen, left = set(), {name}
    while left:
        name = left.pop()
        try:
            left |= needs(distribution(name)) - seen - {name}
            seen.add(name)
        except PackageNotFoundError:
            continue
    return seen


def megabytes(name: str) -> float:
    files = distribution(name).files or ()
    paths = (file.locate() for file in files if "__pycache__" not in file.parts)
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def main() -> None:
    geojax = distribution("geojax")
    core = needs(geojax)
    for title, names in (
        ("core", core),
        (
            "extras and tools that are installed",
            needs(geojax, ("serve", "test", "lint")) - core - {"geojax"},
        ),
    ):
        print(f"{title:<38}own MB  with all it needs")
        every = set[str]()
        for name in sorted(names):
            try:
                version = distribution(name).version
            except PackageNotFoundError:
                continue
            whole = closure(name)
            every |= whole
            print(
                f"  {name:<20}{version:<14}{megabytes(name):8.1f}{sum(map(megabytes, whole)):10.1f}"
            )
        print(f"  {'all, each once':<34}{sum(map(megabytes, every)):18.1f}")


if __name__ == "__main__":
    main()
