# SPDX-License-Identifier: Apache-2.0
"""Files of results as sections of a report.

Invariant: a file is known by what it holds, never by its name, and its tables are those that the
command that wrote it prints.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.table import Table

from geojax.config import ConfigError
from geojax.track.section import Block, Picture, Section

type Content = Mapping[str, Any]
type Parts = tuple[list[Block], list[Picture]]

_MADE_BY = ("generated", "clock", "machine", "versions")


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
    try:
        blocks, pictures = kind.parts(content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path} looks like {kind.what}, and cannot be read as that ({type(error).__name__}: "
            f"{first}); write it again with `{kind.command}`"
        ) from error
    named = [Picture(f"{path.stem}-{p.name}", p.about, p.draw) for p in pictures]
    title = f"{path.name}: {kind.what}"
    blocks = [Block(title, blocks[0].table, blocks[0].notes), *blocks[1:]]
    return Section(title, tuple(blocks), tuple(named), _facts(path, content, kind.settings))


def _fits(content: Any, kind: _Kind) -> bool:
    if not isinstance(content, dict) or not kind.keys <= set(content):
        return False
    if not kind.items:
        return True
    results = content["results"]
    first = results[0] if isinstance(results, list) and results else None
    return isinstance(first, dict) and kind.items <= set(first)


def _depths(content: Content) -> Parts:
    from geojax.bicache.depth import Depths, ShareProfile
    from geojax.bicache.depth_report import depth_lines, depth_table, plot_profiles

    profiles = TypeAdapter(tuple[ShareProfile, ...]).validate_python(content["profiles"])
    depths = Depths(tuple((float(share), int(depth)) for share, depth in content["steps"]))
    blocks = [Block(table=depth_table(profile)) for profile in profiles]
    lines = depth_lines(depths, len(profiles[0].key_cosine))
    about = (
        "Cosine of keys and values of the prefix alone to those of the whole request, by layer; "
        "and what reuse below a depth does to predictions."
    )
    picture = Picture("profile", about, partial(plot_profiles, profiles))
    return [*blocks, Block(notes=tuple(lines))], [picture]


def _bicache(content: Content) -> Parts:
    from geojax.bench.bicache_table import Result, loss_tables

    results = TypeAdapter(tuple[Result, ...]).validate_python(content["results"])
    return [Block(table=table) for table in loss_tables(results)], []


def _guard(content: Content) -> Parts:
    from geojax.bench.guard_table import Watch, alarm_line, watch_table

    found = TypeAdapter(tuple[Watch, ...]).validate_python(content["watches"])
    return [Block(table=watch_table(found), notes=(alarm_line(found),))], []


def _serve(content: Content) -> Parts:
    from geojax.bench.serve_table import load_table, plot_load

    about = "Share of answered requests that had their first text, and their end, by a time."
    picture = Picture("answers", about, partial(plot_load, content))
    return [Block(table=load_table(content))], [picture]


def _geomesh(content: Content) -> Parts:
    from geojax.bench.geomesh import bench_note, bench_table

    table, note = bench_table(content["summary"]), bench_note(len(content["seeds"]))
    return [Block(table=table, notes=(note,))], []


def _tune(content: Content) -> Parts:
    from geojax.bench.geomesh import tune_table

    return [Block(table=tune_table(content["results"]))], []


def _cona(content: Content) -> Parts:
    from geojax.bench.cona_outcome import Figures
    from geojax.bench.cona_tables import change_table, demand_table, method_table

    adapter, by_model = TypeAdapter(Figures), dict[str, list[Figures]]()
    for result in content["results"]:
        changes = [
            change | {"crossing": math.inf if change["crossing"] is None else change["crossing"]}
            for change in result["changes"]
        ]
        figures = adapter.validate_python(result | {"changes": changes})
        by_model.setdefault(figures.model, []).append(figures)
    blocks = []
    for found in by_model.values():
        gone = tuple(f"missing: seed {o.seed}, {name}" for o in found for name in o.missing)
        tables: list[Table] = [method_table(found), demand_table(found), change_table(found[0])]
        blocks += [Block(table=table) for table in tables]
        blocks.append(Block(notes=gone))
    return blocks, []


def _runs(content: Content) -> Parts:
    from geojax.track.report import slowest, summary_table, target_notes
    from geojax.track.summary import Summary

    adapter = TypeAdapter(Summary)
    summaries = []
    for result in content["results"]:
        final = result["final_perplexity"]
        given = result | {"final_perplexity": math.inf if final is None else final}
        summaries.append(adapter.validate_python(given))
    names = [s.method for s in summaries]
    if len(set(names)) < len(names):
        names = [f"{s.method} seed {s.seed}" for s in summaries]
    last = slowest(names, summaries)
    notes = target_notes(content["target_perplexity"], "", last, len(summaries) > 1)
    times = f"Times: {content['clock']} clock."
    table = summary_table(names, summaries, last[0] if last else None)
    return [Block(table=table, notes=(*notes, times))], []


def _simulated(content: Content) -> Parts:
    from geojax.simulate.outcome import Outcome, outcome_table, plot_straggler_idle

    results = [dict(result) for result in content["results"]]
    names = [result.pop("variant") for result in results]
    found = TypeAdapter(list[Outcome]).validate_python(results)
    first = found[0]
    changes = [
        f"{change['slice']} at speed {change['factor']:g} from {change['at_seconds']:g} s on."
        for change in content["changes"]
    ]
    note = (
        f"{first.method}: {first.slices} slices in {first.regions} regions of {first.wan}, by "
        f"{first.pattern}. Times: modelled clock; nothing was trained."
    )
    pictures = []
    if by_round := content.get("straggler_idle_by_round"):
        about = "Straggler idle of each round, of the slice with most (modelled clock)."
        pictures.append(Picture("straggler", about, partial(plot_straggler_idle, by_round)))
    table = outcome_table(dict(zip(names, found, strict=True)))
    return [Block(table=table, notes=(note, *changes))], pictures


def _scaling(content: Content) -> Parts:
    from geojax.simulate.scaling import plot_scaling, scaling_lines, scaling_table

    about = "Bytes sent and round time by pattern; dashed where the fastest one changes."
    picture = Picture("scaling", about, partial(plot_scaling, content))
    table, lines = scaling_table(content), scaling_lines(content)
    return [Block(table=table, notes=tuple(lines))], [picture]


def _tables(content: Content) -> Parts:
    from geojax.simulate.tables import (
        ABLATION_NOTE,
        SIZE_NOTE,
        ablation_table,
        disagreements,
        size_table,
    )

    notes = (ABLATION_NOTE, *disagreements(content["ablation_hours"]))
    times = f"Times: modelled clock, {content['wan']}; nothing was trained."
    return [
        Block(table=size_table(content), notes=(SIZE_NOTE,)),
        Block(table=ablation_table(content), notes=(*notes, times)),
    ], []


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
        _depths,
        "revision builder criterion bound length count",
    ),
    _kind(
        "what reuse of prefixes costs in accuracy",
        "bench bicache",
        "examples results",
        "cell accuracy bound",
        _bicache,
        "examples seq_len steps",
    ),
    _kind(
        "what the guard saves",
        "bench guard --json",
        "watches revision",
        "",
        _guard,
        "revision every",
    ),
    _kind(
        "a server under load",
        "bench serve --json",
        "model_id mean_ttft_ms requests",
        "",
        _serve,
        "model_id num_prompts request_rate burstiness max_concurrency",
    ),
    _kind(
        "methods over seeds", "bench geomesh", "summary results seeds", "method", _geomesh, "seeds"
    ),
    _kind("settings tried", "bench tune", "results seeds", "method setting", _tune, "seeds"),
    _kind(
        "CONA beside other methods",
        "bench cona",
        "demands results",
        "ratios changes seconds",
        _cona,
    ),
    _kind(
        "runs side by side",
        "report --json",
        "target_perplexity results",
        "hours_to_target wan_idle",
        _runs,
    ),
    _kind(
        "a run simulated",
        "simulate --json",
        "plan results",
        "variant round_seconds",
        _simulated,
        "regions loss jitter_seconds seed",
    ),
    _kind(
        "patterns over numbers of slices",
        "simulate --scaling --json",
        "codec results",
        "pattern wan_bytes",
        _scaling,
        "method",
    ),
    _kind(
        "published tables made again",
        "simulate tables --json",
        "hours_by_size ablation_hours",
        "",
        _tables,
    ),
)

_WANTED = "give a run folder, or a file that one of these wrote: " + ", ".join(
    f"`{kind.command}`" for kind in _KINDS
)
