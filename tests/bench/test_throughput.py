# SPDX-License-Identifier: Apache-2.0
"""`geojax bench throughput`: what it predicts, and that it keeps what was measured."""

import json

import pytest

from geojax.bench import throughput
from geojax.bench.throughput import BLOCK, STEPS, ThroughputOptions, operations, run_throughput
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 320}, "use 330 or more"),
        ({"rounds": 0}, "rounds 0 must be at least 1"),
        ({"batches": (1, 0)}, "at least 1 each"),
        ({"layers": 1}, "layers 1 must be at least 2"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(options, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        run_throughput(ThroughputOptions(out=tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


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
    (tmp_path / "batch1-share0.5.json").unlink()
    assert run_throughput(options)[1:] == points[1:]
    assert json.loads((tmp_path / "throughput.json").read_text())["points"][1]["share"] == 0.7
    assert (tmp_path / "throughput.png").stat().st_size > 5000
    assert "bicache-dual over dual" in capsys.readouterr().out
