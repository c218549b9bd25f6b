# SPDX-License-Identifier: Apache-2.0
"""A run that goes on with other slices than it began with: more, fewer, and on other devices."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from apart import SEQ_LEN, make_config
from made_text import write_words

from geojax import runs
from geojax.config import CheckpointConfig, ExchangeConfig, RunConfig, SliceConfig
from geojax.geomesh import parts
from geojax.track.metrics import read_records
from geojax.track.summary import check_accounting, load_run

ROUNDS = 6
BEFORE = (
    SliceConfig("a", region="eastus", speed=2.0),
    SliceConfig("b", region="westus2", speed=1.0),
)
AFTER = (
    SliceConfig("c", region="koreacentral", speed=1.0),
    SliceConfig("a", region="eastus", speed=1.5, devices=4, tp=2),
    SliceConfig("d", region="westus2", speed=1.0),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_words(tmp_path_factory.mktemp("text"))


@pytest.fixture
def config(text, monkeypatch) -> RunConfig:
    monkeypatch.setenv("GEOJAX_CACHE", str(text.parent / "cache"))
    return replace(
        make_config(text, ExchangeConfig(schedule="two_phase"), ROUNDS),
        slices=BEFORE,
        checkpoint=CheckpointConfig(every_rounds=1),
    )


def stop_in_round_3(trainer):
    """When some of its inner steps are done."""
    beat = trainer._watchdog.beat

    def beating(where):
        beat(where)
        if where.endswith("round 3"):
            trainer._stop.set()

    trainer._watchdog.beat = beating


def kept(worker):
    """Copies of what is shared, of both error feedbacks and of the inner optimizer's state."""
    shared = (worker.outer.params, worker.outer.opt_state)
    own = (worker.feedback.own, worker.feedback.shard, worker.program.host(worker.state).opt_state)
    return jax.tree.map(np.array, (shared, *own))


@pytest.mark.runs
@pytest.mark.parametrize(
    "slices",
    [
        pytest.param(AFTER, id="more"),
        pytest.param(BEFORE[:1], id="fewer", marks=pytest.mark.full),
    ],
)
def test_what_is_shared_goes_on_and_no_sample_is_missed(
    slices, config, trainers, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(parts, "CHUNK_STEPS", 2)
    folder = tmp_path / "run"
    trainers.hooks = [stop_in_round_3]
    assert not runs.start(config, folder)
    (before,) = trainers.made
    begun = sum(w.progress.done for w in before.workers)
    assert 0 < begun < sum(w.work.inner_steps for w in before.workers)
    shared, own = kept(before.workers[0])[:2]

    seen = []
    trainers.hooks = [lambda trainer: seen.extend(map(kept, trainer.workers))]
    runs.save_config(replace(config, slices=slices), folder / "config.json")
    capsys.readouterr()
    assert runs.resume(folder)
    said = " ".join(capsys.readouterr().out.split())
    assert f"done again {begun} inner steps of the open round" in said
    assert "slices before a, b; others from here on" in said
    assert ("slice a dp2-tp2-pp1-mb2-gb4" in said) == (slices is AFTER)
    after = trainers.made[1]
    names = [s.name for s in slices]
    for name, (outer, feedback, shard, opt_state) in zip(names, seen, strict=True):
        jax.tree.map(np.testing.assert_array_equal, outer, shared)
        if name == "a":
            jax.tree.map(np.testing.assert_array_equal, feedback, own)
        for part in (feedback, opt_state):
            assert any(np.any(x) for x in jax.tree.leaves(part)) == (name == "a")
        assert not np.any(shard)
    records = read_records(folder / "metrics.jsonl")
    (changed,) = [r for r in records if r["kind"] == "slices"]
    assert (changed["round"], changed["from"], changed["to"]) == (2, ["a", "b"], names)
    run = load_run(folder)
    check_accounting(run)
    assert {r["slice"] for r in run.slices if r["round"] > 2} == set(names)
    assert sum(r["tokens"] for r in run.slices) == after.position.cursor * SEQ_LEN
    assert after.position.cursor * SEQ_LEN >= config.train.total_tokens
    assert run.evals[-1]["loss"] < run.evals[0]["loss"]
    # And from here on it is a run like any other.
    trainers.hooks = []
    assert runs.resume(folder)
