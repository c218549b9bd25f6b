# SPDX-License-Identifier: Apache-2.0
"""What geojax depends on, as installed here: `python scripts/dependencies.py`.

One line a package that pyproject.toml names: version, its own megabytes, and those with all that it
needs in turn (packages that several need are in each of them). Of an extra, what it adds.
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


def show(name: str) -> None:
    whole = sum(map(megabytes, closure(name)))
    print(f"  {name:<22}{distribution(name).version:<12}{megabytes(name):8.1f}{whole:10.1f}")


def main() -> None:
    geojax = distribution("geojax")
    core = needs(geojax)
    base = set[str]().union(*map(closure, core))
    print(f"{'core':<36}own MB  with all it needs")
    for name in sorted(core):
        show(name)
    print(f"  {'all, each once':<34}{sum(map(megabytes, base)):18.1f}")
    for extra in geojax.metadata.get_all("Provides-Extra") or ():
        names = needs(geojax, (extra,)) - core - {"geojax"}
        found = {name for name in names if closure(name)}
        if found < names or not names:
            print(f"{extra}: not installed here")
            continue
        more = set[str]().union(*map(closure, found)) - base
        print(f"{extra}: {sum(map(megabytes, more)):.1f} MB beside the core")
        for name in sorted(found):
            show(name)


if __name__ == "__main__":
    main()
