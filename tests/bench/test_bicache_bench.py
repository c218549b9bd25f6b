# SPDX-License-Identifier: Apache-2.0
"""What `geojax bench bicache` compares, and how it counts."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from made_run import figures

from geojax.bench import bicache
from geojax.bench import guard as guard_bench
from geojax.bench.bicache import BicacheOptions, cells, compare, run_bicache
from geojax.bench.guard import GuardOptions, run_guard
from geojax.bench.guard_table import Watch
from geojax.bicache.depth import Depths, Guard
from geojax.config import ConfigError
from geojax.data import tasks
from geojax.diffusion.load import load
from geojax.models.config import get_model
from geojax.models.transformer import init_params
from geojax.models.weights import SpecialTokens, save_safetensors

DEEP = replace(get_model("dlm-tasks"), layers=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of tasks that knows nothing."""
    config = replace(get_model("dlm-tasks"), layers=2, dim=24, heads=1, kv_heads=1, mlp_dim=16)
    params = jax.tree.map(np.asarray, init_params(config, 0))
    target = tmp_path_factory.mktemp("tasks") / "model"
    save_safetensors(params, config, target, special=SpecialTokens(mask=tasks.MASK, eos=tasks.END))
    return target


def test_every_depth_and_every_policy_is_compared_with_no_reuse_first():
    found = list(cells("copy", 0.7, 4, Depths(((0.0, 2),)), 4, "prefix"))
    assert found[0].policy == "none"
    assert {c.policy for c in found} == {
        *("none", "refresh", "prefix", "dual", "full", "bicache", "bicache-dual")
    }
    assert [c.depth for c in found if c.policy == "bicache"] == [1, 2, 3]
    assert [c.depth for c in found if c.policy == "full"] == [4]
    assert [c.depth for c in found if c.policy == "bicache-dual"] == [2]
    assert len({c.name for c in found}) == len(found)


def test_losses_are_paired_and_their_bound_covers_them():
    cell, rng = next(cells("copy", 0.7, 4, None, 4, "prefix")), np.random.default_rng(0)
    plain = rng.random(2000) < 0.9
    worse = plain & (rng.random(2000) < 0.95)
    found = compare(cell, worse, plain)
    assert found.loss == pytest.approx(np.mean(plain) - np.mean(worse))
    # Unpaired, the error would be three times as large.
    assert 0 < found.bound - found.loss < 1.645 * np.sqrt(0.05 * 0.95 / 2000) * 1.1
    same = compare(cell, plain, plain)
    assert (same.loss, same.bound) == (0, pytest.approx(3 / 2000))
    covered = 0
    for _ in range(400):
        worse = plain & (rng.random(2000) < 0.98)
        covered += compare(cell, worse, plain).bound >= 0.02 * plain.mean()
    assert covered / 400 > 0.92


@pytest.mark.full
def test_a_second_start_takes_what_was_answered(folder, tmp_path, capsys):
    options = BicacheOptions(folder, out=tmp_path, count=6, tasks=("fill",), every=2, steps=3)
    first = run_bicache(options)
    assert {r.cell.share for r in first} == {0.5, 0.7, 0.9}
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("fill-*.json")}
    assert len(files) == len(first)
    assert run_bicache(options) == first
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.glob("fill-*.json")}
    assert len(json.loads((tmp_path / "bicache.json").read_text())["results"]) == len(first)


@pytest.mark.full
def test_the_guard_is_asked_about_every_task_and_counts_what_it_costs(folder, tmp_path):
    options = GuardOptions(folder, out=tmp_path, depth=1, count=2, every=4)
    found = run_guard(options)
    assert {w.task for w in found} == {task.name for task in tasks.TASKS}
    assert all(w.requests == 2 and 0 < w.extra <= 0.05 for w in found)
    # The model knows nothing, so that no prefix moves much: nobody has a reason to retreat.
    assert sum(w.retreats for w in found) == 0
    assert all(w.guarded == w.unguarded and w.recovered is None for w in found)
    assert len(json.loads((tmp_path / "guard.json").read_text())["watches"]) == len(found)


def test_what_the_guard_was_asked_is_kept(folder, tmp_path, monkeypatch):
    asked = []

    def watch(model, guard, name, share, options):
        asked.append((name, share))
        return Watch(name, share, options.depth, options.count, 1.0, 0.5, 0.9, 0.8, 1, 0.01)

    monkeypatch.setattr(guard_bench, "_watch", watch)
    monkeypatch.setattr(guard_bench, "_profiled", lambda *_: Guard(((1, 0.1),)))
    options = GuardOptions(folder, out=tmp_path / "new" / "out", depth=1, count=2)
    first = run_guard(options)
    assert len(asked) == len(first) == 3 * len(tasks.TASKS)
    (options.out / "copy-0.7-depth1-every4.json").write_text("[]")
    assert run_guard(options) == first
    assert asked[len(first) :] == [("copy", 0.7)]
    run_guard(replace(options, count=3))
    assert len(asked) == 2 * len(first) + 1
    assert len(figures(options.out / "guard.json")["watches"]) == len(first)


@pytest.mark.parametrize(("harm", "sweep"), [(0.0, True), (0.3, True), (0.3, False)])
def test_depths_are_tried_one_by_one_only_where_reuse_costs_something(
    harm, sweep, folder, tmp_path, monkeypatch
):
    def answer(cell, model, rows, steps):
        rng = np.random.default_rng(0)
        right = np.ones(len(rows.tokens), bool)
        return right & (rng.random(len(right)) >= harm) if cell.depth else right

    monkeypatch.setattr(bicache, "answer", answer)
    monkeypatch.setattr(bicache, "load", lambda path: replace(load(path), config=DEEP))
    options = BicacheOptions(folder, out=tmp_path, count=500, tasks=("copy",), sweep=sweep)
    found = run_bicache(options)
    tried = {r.cell.depth for r in found if r.cell.policy == "bicache"}
    assert tried == ({1, 2, 3} if harm and sweep else {1})
    assert len(figures(tmp_path / "bicache.json")["results"]) == len(found)


@pytest.mark.parametrize("text", ["[]", "{", '{"right": [1]}', "7"])
def test_a_cell_that_cannot_be_read_is_answered_again(text, folder, tmp_path, monkeypatch):
    asked = []

    def answer(cell, model, rows, steps):
        asked.append(cell.name)
        return np.ones(len(rows.tokens), bool)

    monkeypatch.setattr(bicache, "answer", answer)
    options = BicacheOptions(folder, out=tmp_path, count=3, tasks=("copy",))
    first = run_bicache(options)
    count = len(asked)
    (tmp_path / f"{asked[0]}.json").write_text(text)
    assert run_bicache(options) == first
    assert asked[count:] == asked[:1]


def test_bad_input_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="refreshes every 0 steps"):
        run_bicache(BicacheOptions(folder, out=tmp_path / "none", every=0))
    with pytest.raises(ConfigError, match="refreshes every 0 steps"):
        run_guard(GuardOptions(folder, out=tmp_path / "none", depth=1, every=0))
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="count 1 must be at least 2"):
        run_bicache(BicacheOptions(folder, out=tmp_path, count=1))
    with pytest.raises(ConfigError, match=r"depth 2 must lie in 1\.\.1"):
        run_guard(GuardOptions(folder, depth=2))
    with pytest.raises(ConfigError, match=r"no task is named \['swap'\]"):
        run_bicache(BicacheOptions(folder, out=tmp_path, tasks=("swap",)))
