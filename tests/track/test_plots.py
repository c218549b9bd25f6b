# SPDX-License-Identifier: Apache-2.0
"""Pictures are drawn, show what they should, and do so without pyplot's global state."""

import subprocess
import sys

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from geojax.track.plots import plot_gantt, plot_idle, plot_perplexity
from geojax.track.summary import load_run

WAN, STRAGGLER = "#CC79A7", "#E69F00"


@pytest.fixture
def runs(make_run):
    return [
        load_run(make_run("diloco", balanced=False, wan_seconds=220.0)),
        load_run(make_run("geomesh")),
    ]


def _share(path, colour):
    """Share of a picture's pixels that have `colour`."""
    pixels = imread(path)[..., :3]
    return float(np.mean(np.all(np.abs(pixels - to_rgb(colour)) < 0.01, axis=-1)))


@pytest.mark.parametrize("target", [30.0, 5.0])
def test_perplexity_shows_each_run(runs, tmp_path, target):
    plot_perplexity(runs, tmp_path / "p.png", target)
    for colour in ("#0072B2", "#D55E00"):
        assert _share(tmp_path / "p.png", colour) > 1e-4


def test_a_diverged_run_can_be_drawn(make_run, tmp_path):
    plot_perplexity([load_run(make_run(perplexities=(512.0, None)))], tmp_path / "p.png", 30.0)


def test_gantt_and_idle_show_waits_in_proportion(runs, tmp_path):
    for plot in (plot_gantt, plot_idle):
        plot(runs[:1], tmp_path / "slow.png")
        plot(runs[1:], tmp_path / "fast.png")
        slow, fast = (_share(tmp_path / f"{name}.png", WAN) for name in ("slow", "fast"))
        # Bars fill their axis, so areas are as shares of time: 220 of 322 s against 60 of 162 s.
        # Rounds' borders, text on the bars and their soft edges cover a little of it.
        assert slow / fast == pytest.approx(220 / 322 / (60 / 162), rel=0.05)
        assert _share(tmp_path / "slow.png", STRAGGLER) > 0.02
        assert _share(tmp_path / "fast.png", STRAGGLER) < 0.02  # the legend and rounded steps


def test_gantt_gives_all_runs_one_time_axis(runs, tmp_path):
    plot_gantt(runs, tmp_path / "g.png", rounds=2)
    pixels = imread(tmp_path / "g.png")[..., :3]
    is_bar = np.any(
        [np.all(np.abs(pixels - to_rgb(c)) < 0.01, axis=-1) for c in ("#0072B2", WAN)], axis=0
    )
    half = len(pixels) // 2  # the legend is below the bars, and narrower than either run's
    slow, fast = (np.flatnonzero(part.sum(axis=0) > 20) for part in (is_bar[:half], is_bar[half:]))
    assert np.ptp(fast) / np.ptp(slow) == pytest.approx(162 / 322, rel=0.02)


def test_names_are_drawn_as_they_are(make_run, tmp_path):
    names = ["$x^{$", "_hidden", "$a$ and $b$"]
    given = [load_run(make_run(str(i), method=name)) for i, name in enumerate(names)]
    with rc_context({"svg.fonttype": "none"}):
        plot_perplexity(given, tmp_path / "p.svg", 30.0)
    text = (tmp_path / "p.svg").read_text()
    for name in names:
        assert f"{name}: " in text  # in the legend, as text and no formula


def test_neither_jax_nor_pyplot_is_imported():
    code = (
        "import sys, geojax.report.command, geojax.track.environment\n"
        "found = {'jax', 'matplotlib'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
