# SPDX-License-Identifier: Apache-2.0
"""What a report shows of each kind of file of results: its tables, and pictures.

Invariant: tables are made by the functions that print them where the file is written; a module is
imported when a file of its kind is read.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from rich.table import Table

from geojax.track.section import Block, Picture

type Content = Mapping[str, Any]
type Parts = tuple[list[Block], list[Picture]]


def depths_parts(content: Content) -> Parts:
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


def bicache_parts(content: Content) -> Parts:
    from geojax.bench.bicache_table import Result, loss_tables

    results = TypeAdapter(tuple[Result, ...]).validate_python(content["results"])
    return [Block(table=table) for table in loss_tables(results)], []


def guard_parts(content: Content) -> Parts:
    from geojax.bench.guard_table import Watch, alarm_line, watch_table

    found = TypeAdapter(tuple[Watch, ...]).validate_python(content["watches"])
    return [Block(table=watch_table(found), notes=(alarm_line(found),))], []


def throughput_parts(content: Content) -> Parts:
    from geojax.bench.throughput_table import Point, notes, plot_throughput, table

    points = TypeAdapter(tuple[Point, ...]).validate_python(content["points"])
    blocks = [Block(table=table(p), notes=tuple(notes(p))) for p in points]
    about = "Throughput over no reuse, by the prefix's share of a request."
    return blocks, [Picture("throughput", about, partial(plot_throughput, points))]


def paper_parts(content: Content) -> Parts:
    from geojax.bench.paper import verdict_table

    return [Block(table=verdict_table(content["claims"]))], []


def serve_parts(content: Content) -> Parts:
    from geojax.bench.serve_table import load_table, plot_load

    about = "Share of answered requests that had their first text, and their end, by a time."
    picture = Picture("answers", about, partial(plot_load, content))
    return [Block(table=load_table(content))], [picture]


def geomesh_parts(content: Content) -> Parts:
    from geojax.bench.geomesh import bench_note, bench_table

    table, note = bench_table(content["summary"]), bench_note(len(content["seeds"]))
    return [Block(table=table, notes=(note,))], []


def tune_parts(content: Content) -> Parts:
    from geojax.bench.geomesh import tune_table

    return [Block(table=tune_table(content["results"]))], []


def cona_parts(content: Content) -> Parts:
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


def runs_parts(content: Content) -> Parts:
    from geojax.track.summary import Summary
    from geojax.track.summary_table import slowest, summary_table, target_notes

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


def simulated_parts(content: Content) -> Parts:
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


def scaling_parts(content: Content) -> Parts:
    from geojax.simulate.scaling import plot_scaling, scaling_lines, scaling_table

    about = "Bytes sent and round time by pattern; dashed where the fastest one changes."
    picture = Picture("scaling", about, partial(plot_scaling, content))
    table, lines = scaling_table(content), scaling_lines(content)
    return [Block(table=table, notes=tuple(lines))], [picture]


def tables_parts(content: Content) -> Parts:
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
