# SPDX-License-Identifier: Apache-2.0
"""Files of results as sections of a report.

Invariant: a file is known by what it holds, never by its name, and its tables are those that the
command that wrote it prints.
"""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from geojax.config import ConfigError
from geojax.report import parts
from geojax.report.parts import Content, Parts
from geojax.track.section import Block, Picture, Section, Target

_MADE_BY = ("command", "generated", "clock", "machine", "versions")


@dataclass(frozen=True)
class _Kind:
    """A kind of file."""

    what: str
    command: str
    """What writes it."""
    keys: frozenset[str]
    """That it has, and no other kind has all of."""
    items: frozenset[str]
    """That its first result has."""
    parts: Callable[[Content], Parts]
    settings: tuple[str, ...]
    """Keys of what else the page says of it."""


def read_results(path: Path) -> Section:
    """The section of a file of results. ConfigError where it is none that is known."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:  # also covers bytes that are not UTF-8
        raise ConfigError(f"{path} is not JSON ({error}); {_WANTED}") from error
    kind = next((k for k in _KINDS if _fits(content, k)), None)
    if kind is None:
        has = f"it has {sorted(content)[:6]}" if isinstance(content, dict) else "it is no object"
        raise ConfigError(f"{path} holds no results that a report knows ({has}); {_WANTED}")
    with _readable_as(kind, path):
        blocks, pictures = kind.parts(content)
    named = [
        Picture(f"{path.stem}-{p.name}", p.about, partial(_draw, p, kind, path)) for p in pictures
    ]
    title = f"{path.name}: {kind.what}"
    blocks = [Block(title, blocks[0].table, blocks[0].notes), *blocks[1:]]
    return Section(title, tuple(blocks), tuple(named), _facts(path, content, kind.settings))


@contextmanager
def _readable_as(kind: _Kind, path: Path) -> Generator[None]:
    """What goes wrong inside is the file's fault."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path} looks like {kind.what}, and cannot be read as that ({type(error).__name__}: "
            f"{first}); write it again with `{kind.command}`"
        ) from error


def _draw(picture: Picture, kind: _Kind, path: Path, target: Target) -> None:
    with _readable_as(kind, path):
        picture.draw(target)


def _fits(content: Any, kind: _Kind) -> bool:
    if not isinstance(content, dict) or not kind.keys <= set(content):
        return False
    if not kind.items:
        return True
    results = content["results"]
    first = results[0] if isinstance(results, list) and results else None
    return isinstance(first, dict) and kind.items <= set(first)


def _facts(path: Path, content: Content, settings: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(label, value) of its settings and of what made it."""
    keys = [key for key in (*settings, *_MADE_BY) if content.get(key) is not None]
    return (*((key.replace("_", " "), _fact(content[key])) for key in keys), ("file", str(path)))


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def _kind(
    what: str,
    command: str,
    keys: str,
    items: str,
    parts: Callable[[Content], Parts],
    settings: str = "",
) -> _Kind:
    return _Kind(
        what,
        f"geojax {command}",
        frozenset(keys.split()),
        frozenset(items.split()),
        parts,
        tuple(settings.split()),
    )


_KINDS = (
    _kind(
        "how deep prefixes may be shared",
        "profile depth",
        "profiles steps criterion",
        "",
        parts.depths_parts,
        "revision builder segments criterion bound length count",
    ),
    _kind(
        "what reuse of prefixes costs in accuracy",
        "bench bicache",
        "examples results",
        "cell accuracy bound",
        parts.bicache_parts,
        "examples seq_len steps",
    ),
    _kind(
        "what the guard saves",
        "bench guard",
        "watches revision",
        "",
        parts.guard_parts,
        "revision every",
    ),
    _kind(
        "throughput under policies of reuse",
        "bench throughput",
        "points",
        "",
        parts.throughput_parts,
    ),
    _kind(
        "what was published, and what came of it",
        "bench paper",
        "claims parts",
        "",
        parts.paper_parts,
    ),
    _kind(
        "a server under load",
        "bench serve --json",
        "model_id mean_ttft_ms requests",
        "",
        parts.serve_parts,
        "model_id num_prompts request_rate burstiness max_concurrency",
    ),
    _kind(
        "methods over seeds",
        "bench geomesh",
        "summary results seeds",
        "method",
        parts.geomesh_parts,
        "seeds",
    ),
    _kind(
        "settings tried", "bench tune", "results seeds", "method setting", parts.tune_parts, "seeds"
    ),
    _kind(
        "CONA beside other methods",
        "bench cona",
        "demands results",
        "ratios changes seconds",
        parts.cona_parts,
    ),
    _kind(
        "runs side by side",
        "report --json",
        "target_perplexity results",
        "hours_to_target wan_idle",
        parts.runs_parts,
    ),
    _kind(
        "a run simulated",
        "simulate --json",
        "plan results",
        "variant round_seconds",
        parts.simulated_parts,
        "regions loss jitter_seconds seed",
    ),
    _kind(
        "patterns over numbers of slices",
        "simulate --scaling --json",
        "codec results",
        "pattern wan_bytes",
        parts.scaling_parts,
        "method",
    ),
    _kind(
        "published tables made again",
        "simulate tables --json",
        "hours_by_size ablation_hours",
        "",
        parts.tables_parts,
    ),
)

_WANTED = "give a run folder, or a file that one of these wrote: " + ", ".join(
    f"`{kind.command}`" for kind in _KINDS
)
