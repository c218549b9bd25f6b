# SPDX-License-Identifier: Apache-2.0
"""`geojax bench throughput`: what it predicts, and that it keeps what was measured."""

import io
import json
from dataclasses import replace

import pytest
from made_run import figures
from rich.console import Console

from geojax.bench import throughput
from geojax.bench.throughput import STEPS, ThroughputOptions, operations, run_throughput
from geojax.bench.throughput_table import BLOCK, Point, Row, notes, summary
from geojax.bicache.policy import get_policy
from geojax.config import ConfigError
from geojax.models.config import TransformerConfig

CONFIG = TransformerConfig(
    8192, dim=512, layers=12, heads=8, kv_heads=8, mlp_dim=1408, bidirectional=True
)
LENGTH = 512


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("every", [1, 4, 16])
@pytest.mark.parametrize("depth", [0, 6, 11])
def test_operations_are_those_of_the_formula(share, every, depth):
    prefix = round(share * LENGTH)
    private, r, beta = LENGTH - prefix - BLOCK, prefix / LENGTH, depth / CONFIG.layers

    def layers(name, k=None):
        policy = get_policy(name, k)
        head = sum(BLOCK - step * BLOCK // STEPS for step in range(STEPS))
        counted = operations(policy, CONFIG, depth, prefix, private)
        return counted - head * CONFIG.dim * CONFIG.padded_vocab

    plain = layers("none")
    shared = (1 - beta * r) + (every - 1) * (1 - r)
    assert plain / layers("bicache", every) == pytest.approx(every / shared)
    own = 1 + (every - 1) * (1 - r)
    assert plain / layers("refresh", every) == pytest.approx(every / own)
    # One refresh and STEPS - 1 steps of the block alone.
    block = BLOCK / LENGTH
    dual = (1 + (STEPS - 1) * block) / (1 - beta * r + (STEPS - 1) * block)
    assert layers("dual") / layers("bicache-dual") == pytest.approx(dual)


def test_rows_that_only_pad_are_counted_where_all_that_run_are():
    """154 rows run as 192, 51 as 64; 256 are as many as a bucket has."""
    for rows, run in ((154, 192), (51, 64), (256, 256)):
        full = get_policy("full")  # no row of the prefix ever runs
        one, all_ = (
            operations(full, CONFIG, 6, 512 - rows, rows - BLOCK, padded)
            for padded in (False, True)
        )
        assert all_ / one == pytest.approx(
            run / rows, rel=0.05
        )  # attention and head do not scale so
        assert (all_ == one) == (run == rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 320}, "use 330 or more"),
        ({"rounds": 0}, "rounds 0 must be at least 1"),
        ({"depth": 13}, "depth 13 must lie in 1..12"),
        ({"shares": (0.5, 1.0)}, "must lie between 0 and 1"),
        ({"batches": (1, 0)}, "at least 1 each"),
        ({"layers": 1}, "layers 1 must be at least 2"),
        ({"dim": 100}, "dim 100 must be a multiple of 16: .* use 96"),
        ({"dim": 0}, "use 16"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(options, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        run_throughput(ThroughputOptions(out=tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


def made(sampler, batch, share, depth, options):
    """A point without a measurement."""
    rows = tuple(
        Row(batch, share, name, every, 2.0, 1.0, 3.0, 2.5, 2.2)
        for name, every in throughput.POLICIES
    )
    seconds = (1.0, 0.4, 0.03)
    return Point(batch, share, options.length, depth, 1, *seconds, throughput.machine(), rows)


def test_points_of_each_length_are_kept_and_damaged_ones_are_measured_again(tmp_path, monkeypatch):
    measured = []

    def measure(sampler, batch, share, depth, options):
        measured.append((batch, share, options.length))
        return made(sampler, batch, share, depth, options)

    monkeypatch.setattr(throughput, "_measure", measure)
    monkeypatch.setattr(throughput, "init_params", lambda config, seed: {})
    monkeypatch.setattr(throughput, "plot_throughput", lambda points, path: None)
    for length in (400, 500, 400, 500):
        run_throughput(ThroughputOptions(tmp_path, (1,), length=length, layers=2, dim=32, rounds=1))
    assert len(measured) == len(set(measured)) == 6
    for share, text in ((0.5, '{"batch": 1,'), (0.7, "[]"), (0.9, "{}")):
        (tmp_path / f"batch1-share{share}-length400-depth1.json").write_text(text)
    run_throughput(ThroughputOptions(tmp_path, (1,), length=400, layers=2, dim=32, rounds=1))
    assert sorted(measured[6:]) == sorted(measured[:3])
    assert len(figures(tmp_path / "throughput.json")["points"]) == 3


def test_the_notes_say_from_which_refresh_a_shared_prefix_pays():
    options = ThroughputOptions(length=400, rounds=1)
    point = made(None, 4, 0.5, 6, options)
    said = notes(point)
    assert said[0] == "No reuse: 1.00 s, 128.0 tokens/s."  # 4 blocks of 32
    # 400 ms at 30 a refresh: the fourteenth is the first that has saved more.
    assert "takes 400 ms to build (1200 row-layers)" in said[-1]
    assert "saves 30 ms: it pays from refresh 14 on" in said[-1]
    for saved in (0.0, -0.1):
        lines = notes(replace(point, saved_seconds=saved))
        assert lines[-1] == "A refresh takes no less where the prefix is shared."
    # A step takes 1/16 s for 4 x 400 rows; twice as fast as that in all: 1/2 s less one step, which
    # refreshing at every step makes in half the time, over 15 steps of 4 x 32 rows.
    assert said[3] == (
        "A row costs 6.2 times as much in a step of 128 rows (dual) as in one of 1600."
    )


def test_one_table_has_all_points():
    points = [made(None, b, s, 6, ThroughputOptions()) for b in (1, 4) for s in (0.5, 0.9)]
    shown = Console(width=80, file=io.StringIO())
    shown.print(summary(points))
    lines = shown.file.getvalue().splitlines()
    assert sum("2.00 91" in line for line in lines) == len(throughput.POLICIES)
    assert all(line.count("2.00 91") == 4 for line in lines if "2.00" in line)


@pytest.mark.full
def test_a_point_that_was_measured_is_kept(tmp_path, monkeypatch, capsys):
    options = ThroughputOptions(tmp_path, (1,), length=400, layers=2, dim=32, rounds=1)
    points = run_throughput(options)
    assert {r.policy for r in points[0].rows} == {name for name, _ in throughput.POLICIES}
    for point in points:
        for row in point.rows:
            assert 0 < row.low <= row.ratio <= row.high
    measure = throughput._measure
    monkeypatch.setattr(throughput, "_measure", None)
    assert run_throughput(options) == points
    # Other options measure again.
    monkeypatch.setattr(throughput, "_measure", measure)
    (tmp_path / "batch1-share0.5-length400-depth1.json").unlink()
    assert run_throughput(options)[1:] == points[1:]
    assert json.loads((tmp_path / "throughput.json").read_text())["points"][1]["share"] == 0.7
    assert (tmp_path / "throughput.png").stat().st_size > 5000
    assert "bicache-dual over dual" in capsys.readouterr().out
