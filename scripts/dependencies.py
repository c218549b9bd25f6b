# SPDX-License-Identifier: Apache-2.0
"""What geojax depends on, as installed here: `python scripts/dependencies.py`.

One line a package that pyproject.toml names: version, its own megabytes, and those with all that it
needs in turn (packages that several need are in each of them). Of an extra, what it adds.
"""

import re
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement


def needs(found: Distribution, extras: Iterable[str] = ()) -> list[Requirement]:
    """What it requires here, with these of its extras."""
    parsed = [Requirement(text) for text in found.requires or ()]
    asked = ("", *extras)
    return [
        r
        for r in parsed
        if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in asked)
    ]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(wanted: Iterable[Requirement]) -> tuple[set[str], set[str]]:
    """Names of all that these need in turn: what is installed, and what is not."""
    seen, missing, left = set[tuple[str, str]](), set[str](), list(wanted)
    while left:
        r = left.pop()
        key = (plain(r.name), ",".join(sorted(r.extras)))
        if key in seen:
            continue
        try:
            left += needs(distribution(r.name), r.extras)
            seen.add(key)
        except PackageNotFoundError:
            missing.add(plain(r.name))
    return {name for name, _ in seen}, missing


def megabytes(name: str) -> float:
    files = distribution(name).files or ()
    paths = (file.locate() for file in files if "__pycache__" not in file.parts)
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def show(wanted: Requirement) -> None:
    whole = sum(map(megabytes, closure([wanted])[0]))
    found = distribution(wanted.name)
    print(
        f"  {plain(wanted.name):<22}{found.version:<12}{megabytes(wanted.name):8.1f}{whole:10.1f}"
    )


def main() -> None:
    geojax = distribution("geojax")
    core = needs(geojax)
    base, _ = closure(core)
    print(f"{'core':<36}own MB  with all it needs")
    for wanted in sorted(core, key=str):
        show(wanted)
    print(f"  {'all, each once':<34}{sum(map(megabytes, base)):18.1f}")
    known = {str(r) for r in core}
    for extra in geojax.metadata.get_all("Provides-Extra") or ():
        more = [r for r in needs(geojax, [extra]) if str(r) not in known]
        found, missing = closure(more)
        if missing:
            print(f"{extra}: not installed here ({', '.join(sorted(missing))})")
            continue
        print(f"{extra}: {sum(map(megabytes, found - base)):.1f} MB beside the core")
        for wanted in sorted(more, key=str):
            if plain(wanted.name) != "geojax":
                show(wanted)


if __name__ == "__main__":
    main()
