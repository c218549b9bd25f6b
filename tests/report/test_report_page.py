# SPDX-License-Identifier: Apache-2.0
"""A page says what the terminal says, loads nothing, and runs nobody's text."""

import json
import re

import pytest
from browser import CHROMIUM, browser
from made_run import write_chained
from pages import read

from geojax.cli import main
from geojax.report.inputs import read_inputs
from geojax.report.page import page

HOSTILE = """<script>alert("1")</script>'&amp; $x^{$ [bold] {{ 7 * 7 }} <!--"""


@pytest.fixture
def mix(make_run, tmp_path):
    """Runs of both clocks, one by a chain, and a file of results."""
    folders = [
        make_run("geomesh"),
        make_run("diloco", balanced=False, wan_seconds=220.0),
        make_run("here", clock="measured"),
        write_chained(tmp_path / "chained"),
    ]
    guard = {"machine": "m", "revision": "abc", "every": 4, "watches": []}
    names = ("task", "share", "depth", "requests", "right", "unguarded", "guarded", "recovered")
    watch = dict(zip(names, ("copy", 0.5, 4, 500, 0.98, 0.9, 0.97, None), strict=True))
    guard["watches"] = [watch | {"retreats": 12, "extra": 0.021}]
    (tmp_path / "guard.json").write_text(json.dumps(guard))
    return [*map(str, folders), str(tmp_path / "guard.json")]


def _words(text):
    """Without where lines break, or a column's width makes them break."""
    return re.sub(r"\s+", "", text)


def test_a_page_of_any_mix_says_what_the_terminal_says(mix, tmp_path, capsys):
    path = tmp_path / "new" / "page.html"
    assert main(["report", *mix, "--html", str(path)]) == 0
    shown, found = capsys.readouterr().out, read(path.read_text())
    sections = read_inputs(mix, None, False).sections()
    tables = [b for section in sections for b in section.blocks if b.table and not b.aside]
    assert len(tables) == 3 + 2 + 1  # comparisons; a chain and its scores; a file
    for block in tables:
        for column in block.table.columns:
            for cell in (str(column.header), *map(str, column.cells)):
                assert " ".join(cell.split()) in found.cells
                for word in cell.split():
                    assert word in shown, "what a terminal has no room for"
    notes = [n for section in sections for b in section.blocks if not b.aside for n in b.notes]
    assert len(notes) > 10
    for note in notes:
        assert note in found.notes
        assert _words(note) in _words(shown)
    assert {section.title for section in sections} <= set(found.titles)
    assert found.ids.count("section-1") == 1
    assert path.read_text().count("<svg") == 3 + 3 + 1 + 1  # no picture of waits where nobody waits
    assert found.scripts == []  # nothing goes on


def test_a_card_says_what_a_run_is(mix, tmp_path):
    folder = tmp_path / "geomesh"
    config = {"model": {"family": "llama", "layers": 3}, "data": {"source": {"kind": "wiki"}}}
    (folder / "config.json").write_text(json.dumps(config))
    text = page(read_inputs([str(folder)], None, False).sections())
    said = " ".join(read(text).texts)
    for part in ("llama, layers 3", "wiki", "a made-up machine", "jax 0.12.0", "4 slices"):
        assert part in said
    assert "ended" in said
    assert '"layers": 3' in said  # the config itself


def test_text_of_users_is_text(make_run, tmp_path, capsys):
    folder = make_run("run", method=HOSTILE)
    (folder / "config.json").write_text(json.dumps({"data": {"source": {"kind": HOSTILE}}}))
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"h100"', json.dumps(f"_{HOSTILE}")))
    path = tmp_path / "page.html"
    assert main(["report", str(folder), "--html", str(path), "--out", str(tmp_path)]) == 0
    found = read(path.read_text())
    assert "script" not in found.seen
    assert " ".join(HOSTILE.split()) in found.cells
    assert HOSTILE in found.titles
    assert f"_{HOSTILE}" in "".join(found.texts)
    assert "[bold]" in capsys.readouterr().out
    perplexity, gantt = (text for text in path.read_text().split("<svg")[1:3])
    for picture in (perplexity, gantt):
        assert "&lt;script&gt;alert" in picture


def test_only_a_page_that_is_followed_loads_itself_again(mix, tmp_path):
    metrics = tmp_path / "here" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    sections = read_inputs([str(tmp_path / "here")], None, False).sections()
    assert read(page(sections)).scripts == []
    followed = read(page(sections, ["run b has not begun"], 2.5))
    (script,) = followed.scripts
    assert "location.reload" in script
    assert "2500" in script
    assert "waiting: run b has not begun" in followed.notes
    assert "not ended" in "".join(followed.texts)


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
def test_a_browser_shows_it_as_it_is(mix, tmp_path):
    path = tmp_path / "page.html"
    assert main(["report", *mix, "--html", str(path)]) == 0
    with browser(tmp_path / "profile") as tab:
        tab.open(path.as_uri())
        tab.wait("document.readyState == 'complete' && document.querySelectorAll('svg').length")
        assert tab.run("document.querySelectorAll('section').length") == 3 + 4 + 1
        for width in (360, 1300):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            tab.call("Emulation.setDeviceMetricsOverride", **size)
            assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.logged == []
        assert tab.requested == [path.as_uri()]
