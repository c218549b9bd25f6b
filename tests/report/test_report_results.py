# SPDX-License-Identifier: Apache-2.0
"""Files of results are known by what they hold, and say what their commands say."""

import io
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from pages import read
from rich.console import Console

from geojax.bench.bicache_table import Cell, Result, loss_tables
from geojax.bench.cona_outcome import SHARES, Change, Figures, Reached
from geojax.bench.cona_report import _result
from geojax.bench.cona_tables import change_table, demand_table, method_table
from geojax.bench.geomesh import bench_table, tune_table
from geojax.bench.guard_table import Watch, watch_table
from geojax.bench.paper import collect, verdict_table
from geojax.bench.serve import LoadOptions, Sent, figures_of
from geojax.bench.serve_table import load_table
from geojax.bench.throughput_table import Point, Row
from geojax.bench.throughput_table import table as throughput_table
from geojax.bicache.depth import Depths, Effect, ShareProfile
from geojax.bicache.depth_report import depth_lines, depth_table
from geojax.config import ConfigError
from geojax.report.page import page
from geojax.report.results import read_results
from geojax.simulate.outcome import Outcome, outcome_table
from geojax.simulate.scaling import scaling_table
from geojax.simulate.tables import ablation_table, size_table
from geojax.track.metrics import to_json
from geojax.track.report import report

ABOUT = {"machine": "a made-up machine", "versions": {"jax": "0.12.0"}}


def _depths():
    effects = (Effect(0.0, 0.0, 1.0), Effect(1e-3, 2e-3, 0.9))
    profile = ShareProfile(0.5, (0.99,), (0.98,), effects, (0.25, 1.0), (0.1, 0.2))
    profiles = (profile, replace(profile, share=0.9))
    content = {"revision": "abc", "builder": "prefix", "criterion": "output", "bound": 0.05}
    content |= {"steps": ((0.5, 0), (0.9, 1)), "guard": [], "length": 64, "count": 8}
    content["profiles"] = [asdict(p) for p in profiles]
    lines = depth_lines(Depths(((0.5, 0), (0.9, 1))), 1)
    assert "prefix of 90% or more: 1 of 1 layers" in lines
    return content, [depth_table(p) for p in profiles], 1


def _bicache():
    cells = [Cell("copy", 0.5, "none", None, None), Cell("copy", 0.5, "bicache-dual", None, 2)]
    cells += [Cell("fill", 0.5, "bicache", 4, depth) for depth in (1, 2)]
    results = [Result(cell, 0.9, 0.01, 0.02, 0.03) for cell in cells]
    content = {"examples": 500, "seq_len": 64, "steps": 8, "results": [asdict(r) for r in results]}
    return content, loss_tables(results), 0


def _guard():
    watches = [Watch("copy", 0.5, 4, 500, 0.98, 0.9, 0.97, None, 12, 0.021)]
    content = {"revision": "abc", "every": 4, "watches": [asdict(w) for w in watches]}
    return content, [watch_table(watches)], 0


def _throughput():
    policies = [(n, k) for n in ("refresh", "bicache") for k in (1, 4, 16)]
    policies += [("dual", None), ("bicache-dual", None)]
    rows = tuple(Row(1, 0.7, name, every, 2.0, 1.5, 2.5, 2.1, 2.05) for name, every in policies)
    point = Point(1, 0.7, 512, 6, 3, 1.0, 0.4, 0.03, "a machine", rows)
    return {"points": [asdict(point)]}, [throughput_table(point)], 1


def _paper():
    content = collect(Path("nowhere"))
    return content, [verdict_table(content["claims"])], 0


def _serve():
    sent = [Sent(200, 0.1 * i, 0.2 * i, [0.1], 20, 8, 16) for i in range(1, 9)]
    figures = figures_of([*sent, Sent(503, error="full")], 4.0, LoadOptions(requests=9), "llada")
    return figures, [load_table(figures)], 1


def _nobody_served():
    """No time has a value, which JSON writes as null."""
    figures = figures_of([Sent(503, error="full")], 4.0, LoadOptions(requests=1), "llada")
    return figures, [load_table(figures)], 1


def _geomesh():
    spread = {"mean": 0.5, "deviation": math.nan}
    row = {"time_saved": None, "final_perplexity": spread, "perplexity_over_diloco": spread}
    row |= {"straggler_idle": 0.1, "wan_idle": 0.2, "hours_same_tokens": 3.0}
    summary = {"geomesh": row | {"published_hours": 2.8}, "fp16": row | {"published_hours": None}}
    content = {"seeds": [0, 1], "summary": summary, "results": [{"method": "geomesh"}]}
    return content, [bench_table(summary)], 0


def _tune():
    results = [
        {"method": "diloco", "setting": "rate1", "final_perplexity": p} for p in (20.1, None)
    ]
    return {"seeds": [0], "results": results}, [tune_table(results)], 0


def _cona():
    ratios = {n: [Reached(r, r < 2)] * len(SHARES) for n, r in (("CONA", 1.0), ("other", 2.5))}
    change = Change(8, math.inf, None, 0.1, (1.0, 0.5, None), None, "it pays", "earlier")
    sums = {"CONA": 30.0, "other": 40.0}
    worth = {"8": (1.0, 1.1)}
    oracle = ("", [], [])
    found = Figures(
        *(
            "gpt",
            0,
            ratios,
            sums,
            {"8": 31.0},
            worth,
            worth,
            sums,
            *oracle,
            2,
            1,
            0.01,
            [change],
            ["gb4"],
        )
    )
    content = {"demands": {}, "results": [_result(found)]}
    return content, [method_table([found]), demand_table([found]), change_table(found)], 0


def _simulated():
    plain = Outcome(
        "demo",
        4,
        4,
        "azure",
        "gather",
        False,
        11.0,
        0.7,
        0.6,
        0.4,
        0.1,
        100,
        300.0,
        300,
        9,
        5,
        0.2,
        0,
    )
    found = {"as it is": plain, "overlapped": replace(plain, overlap=True, wan_idle=0.0)}
    results = [asdict(o) | {"variant": name} for name, o in found.items()]
    change = {"slice": "h100", "at_seconds": 60.0, "factor": 0.5}
    content = {"plan": [], "results": results, "changes": [change], "regions": ["a", "b"]}
    content["straggler_idle_by_round"] = {name: [0.1, 0.3] for name in found}
    return content, [outcome_table(found)], 1


def _scaling():
    row = {"slices": 2, "round_seconds": 6.0, "sent_bytes": 1e6, "wan_bytes": 5e5}
    rows = [row | {"pattern": p, "fastest": p == "hub"} for p in ("gather", "two_phase", "hub")]
    content = {"method": "demo", "wan": "azure", "codec": "sign", "changes": [], "results": rows}
    return content, [scaling_table(content)], 1


def _tables():
    content = {
        "wan": "azure",
        "hours_by_size": {"150m": {"diloco": 3.7, "geomesh": 0.9}},
        "hours_to_target": {},
        "published_to_target": {"diloco": 3.7},
        "ablation_hours": {"diloco": 12.0},
        "published_ablation_hours": {"diloco": 12.0},
        "idle": {"diloco": [0.2, 0.6]},
        "published_idle": {},
    }
    return content, [size_table(content), ablation_table(content)], 0


KINDS = (
    *(
        _depths,
        _bicache,
        _guard,
        _throughput,
        _paper,
        _serve,
        _nobody_served,
        _geomesh,
        _tune,
        _cona,
    ),
    *(_simulated, _scaling, _tables),
)


def _shown(table):
    file = io.StringIO()
    Console(file=file, width=200).print(table)
    return file.getvalue()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_file_says_what_its_command_said(kind, tmp_path):
    content, tables, pictures = kind()
    path = tmp_path / "any.name"
    path.write_text(json.dumps(to_json(content | ABOUT)))
    section = read_results(path)
    found = [block.table for block in section.blocks if block.table]
    assert [_shown(table) for table in found] == [_shown(table) for table in tables]
    assert all(len(_shown(table)) > 100 for table in found)
    assert len(section.pictures) == pictures
    assert ("machine", "a made-up machine") in section.facts
    assert ("versions", "jax 0.12.0") in section.facts
    for picture in section.pictures:
        picture.draw(tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 1000
    cells = read(page([replace(section, pictures=())])).cells
    for table in tables:
        for column in table.columns:
            assert {" ".join(str(cell).split()) for cell in column.cells} <= set(cells)


def test_figures_of_a_report_say_what_it_said(make_run, tmp_path, capsys):
    folders = [make_run("geomesh"), make_run("diloco", wan_seconds=220.0, balanced=False)]
    report(folders, None, tmp_path / "figures", 30.0)
    table = capsys.readouterr().out.split("Target")[0]
    section = read_results(tmp_path / "figures")
    assert [line.rstrip() for line in _shown(section.blocks[0].table).splitlines()] == [
        line.rstrip() for line in table.splitlines()
    ]
    assert "Target perplexity 30." in section.blocks[0].notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", r"holds no results that a report knows \(it is no object\)"),
        ('{"results": []}', r"it has \['results'\]"),
        ('{"results": 5, "examples": 1}', "holds no results"),
        ('{"profiles": 5, "steps": [], "criterion": "output"}', "looks like how deep prefixes"),
        ('{"watches": [{"task": "copy"}], "revision": ""}', "write it again with `geojax bench g"),
        ('{"codec": 1, "results": [{"pattern": "a", "wan_bytes": 1}]}', "looks like patterns over"),
    ],
)
def test_what_is_no_result_is_named(tmp_path, text, message):
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"some\.json.*{message}"):
        read_results(path)


def test_what_cannot_be_drawn_is_named_too(tmp_path):
    content, _, _ = _serve()
    path = tmp_path / "some.json"
    path.write_text(json.dumps(to_json(content | {"requests": [5]})))
    (picture,) = read_results(path).pictures
    with pytest.raises(ConfigError, match=r"some\.json looks like a server under load"):
        picture.draw(tmp_path / "picture.png")
