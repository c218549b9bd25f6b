# SPDX-License-Identifier: Apache-2.0
"""A run by one strategy: what it records, how it stops, is killed, and goes on by another."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_run import BATCH, LLAMA, QUIET, SEQ_LEN, records, stop_after

from geojax import runs
from geojax.config import (
    BalanceConfig,
    CheckpointConfig,
    ConfigError,
    LostRunError,
    MaskingConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
)
from geojax.config.files import read_config
from geojax.meshes.strategy import parse_strategy
from geojax.track.report import report
from geojax.train.checkpoint import Checkpoints
from geojax.train.program import Program, Task

pytestmark = pytest.mark.usefixtures("cache")


def test_records_account_for_every_step_and_a_report_reads_them(config, tmp_path, capsys):
    folder = tmp_path / "run"
    assert runs.start(config, folder, QUIET)
    rounds = records(folder, "round")
    assert [r["step"] for r in rounds] == [4, 8, 12, 16, 20, 24]
    assert rounds[-1]["tokens"] == config.train.total_tokens
    assert [r["round"] for r in records(folder, "eval")] == [0, 2, 4, 6]
    assert sum(r["tokens"] for r in records(folder, "slice")) == config.train.total_tokens
    losses = [r["loss"] for r in records(folder, "eval")]
    assert losses[-1] < losses[0]
    report([folder], None, None, None)
    assert "strategy" in capsys.readouterr().out


@pytest.mark.runs
def test_strategies_train_alike_and_dropout_is_the_same_on_all(config, tmp_path):
    """float32 sums in another order: losses of 5.5 nats differ in the sixth digit."""
    found = {}
    config = replace(config, model=replace(LLAMA, dropout=0.1))
    for strategy in ("dp1-tp1-pp1-mb8-gb8", "dp2-tp1-pp2x2-mb2-gb8-fsdp"):
        folder = tmp_path / strategy
        assert runs.start(replace(config, strategy=strategy), folder, QUIET)
        found[strategy] = [r["loss"] for r in records(folder, "slice")]
    first, *others = found.values()
    for losses in others:
        np.testing.assert_allclose(losses, first, rtol=2e-5)


@pytest.mark.full
def test_a_checkpoint_goes_on_under_other_meshes_and_device_counts(config, tmp_path):
    """dp8, then tp2 x pp4, then 4 devices, then 1: the losses of one that never changed."""
    whole = tmp_path / "whole"
    assert runs.start(config, whole, QUIET)
    folder = tmp_path / "moved"
    total = config.train.total_tokens
    chain = (
        "dp8-tp1-pp1-mb1-gb8-zero",
        "dp1-tp2-pp4-mb2-gb8",
        "dp1-tp1-pp1-mb8-gb8",
    )
    for number, strategy in enumerate(chain, 1):
        part = replace(config, strategy=strategy)
        if number == 1:
            stop_after(part, folder, rounds=number + 1)
        else:
            stop_after(None, folder, rounds=number + 1, strategy=strategy)
    assert runs.resume(folder, QUIET)
    assert records(folder, "round")[-1]["tokens"] == total
    used = [r["strategy"] for r in records(folder, "round")]
    assert set(used) == set(chain)
    losses = [[r["loss"] for r in records(f, "slice")] for f in (folder, whole)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-5)


@pytest.mark.runs
def test_the_rate_follows_the_batch_of_a_strategy_that_takes_over(config, tmp_path):
    """By its default rule, from the batch that the run began with; and back again."""
    folder = tmp_path / "run"
    stop_after(config, folder, rounds=1)
    stop_after(None, folder, rounds=3, strategy="dp2-tp1-pp1-mb1-gb4")
    assert runs.resume(folder, QUIET, strategy="dp1-tp1-pp1-mb8-gb8")
    rounds = records(folder, "round")
    assert sum(r["tokens"] for r in records(folder, "slice")) == config.train.total_tokens
    # While the noise is not known: as if it were the highest.
    assert [r["rate_scale"] for r in rounds] == [1, 0.5, 0.5] + [1] * (len(rounds) - 3)
    assert read_config(folder / "config.json").scaling == ScalingConfig(base_batch=8)


@pytest.mark.full  # test_chain_run kills one too
def test_killed_run_ends_with_the_numbers_of_one_that_was_not(config, text, tmp_path):
    config = replace(config, checkpoint=CheckpointConfig(every_rounds=1))
    config = replace(config, train=replace(config.train, total_tokens=120 * BATCH * SEQ_LEN))
    config = replace(config, strategy="dp2-tp1-pp1-mb2-gb8")
    figures = {}
    for name, kills in (("whole", 0), ("killed", 2)):
        folder = tmp_path / name
        folder.mkdir()
        runs.save_config(config, folder / "config.json")
        for number in range(kills + 1):
            process = launch(folder, text)
            try:
                if number < kills:
                    wait_for_rounds(folder, 8 * (number + 1), process)
                else:
                    assert process.wait(400) == 0, (folder / "log.txt").read_text()[-2000:]
            finally:
                process.kill()
                process.wait(60)
        figures[name] = [(r["round"], r["loss"]) for r in records(folder, "slice")]
    assert figures["killed"] == figures["whole"]


def launch(folder, text):
    environment = os.environ | {
        "GEOJAX_CACHE": str(text.parent / "cache"),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os, sys; os.sched_setaffinity(0, {{{core}}}); "
        "os.execv(sys.executable, [sys.executable, '-m', 'geojax', 'train', '--resume', "
        f"{str(folder)!r}])"
    )
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code], cwd=folder, env=environment, stdout=log, stderr=log
        )


def wait_for_rounds(folder, rounds, process):
    until = time.monotonic() + 400
    path = folder / "metrics.jsonl"
    while time.monotonic() < until:
        assert process.poll() is None, (folder / "log.txt").read_text()[-2000:]
        if path.exists() and path.read_text().count('"kind": "round"') >= rounds:
            return
        time.sleep(0.05)
    raise AssertionError("no progress")


def test_masked_lm_trains_and_its_loss_is_of_masked_tokens_alone(config, tmp_path):
    bert = replace(
        LLAMA, family="bert", tied=True, kv_heads=4, context=SEQ_LEN, attention_dropout=0.1
    )
    data = replace(config.data, masking=MaskingConfig())
    config = replace(config, model=bert, data=data, strategy="dp2-tp2-pp1-mb1-gb8")
    assert runs.start(config, tmp_path / "bert", QUIET)
    tokens = sum(r["tokens"] for r in records(tmp_path / "bert", "slice"))
    assert 0.05 < tokens / config.train.total_tokens < 0.25


def test_a_run_without_one_good_step_ends(config, tmp_path):
    optimizer = OptimizerConfig(name="sgd", learning_rate=1e30)
    config = replace(config, train=replace(config.train, optimizer=optimizer, clip_norm=None))
    with pytest.raises(LostRunError, match="last 3 rounds"):
        runs.start(config, tmp_path / "lost", QUIET)


def test_checkpoint_leaves_are_restored_where_they_are_wanted(tmp_path):
    train = TrainConfig(total_tokens=1, compute_dtype="float32")
    task = Task(LLAMA, train, SEQ_LEN)
    wrote = Program(task, parse_strategy("dp8-tp1-pp1-mb1-gb8-fsdp"), jax.devices())
    state = wrote.init(3)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save({"state": state}, {"a": 1})
        checkpoints.wait()
        for text in ("dp1-tp2-pp4-mb2-gb8", "dp2-tp2-pp1-mb1-gb8-zero", "dp1-tp1-pp1-mb1-gb8"):
            strategy = parse_strategy(text)
            other = Program(task, strategy, jax.devices()[: strategy.devices])
            restored, meta = checkpoints.restore({"state": other.abstract_state})
            assert meta["a"] == 1
            for got, want, place in zip(
                jax.tree.leaves(restored["state"]),
                jax.tree.leaves(state),
                jax.tree.leaves(other.state_shardings),
                strict=True,
            ):
                assert got.sharding == place
                np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "dp3-tp1-pp1-mb1-gb8"}, "global_batch 8 does not divide by dp 3"),
        ({"strategy": "dp1-tp1-pp3-mb1-gb8"}, "layers 4 does not divide by pp 3; use pp 2 or 4"),
        ({"strategy": "dp1-tp4-pp1-mb1-gb8"}, "kv_heads 2 does not divide by tp 4; use tp 2"),
        ({"strategy": "dp1-tp1-pp4-mb4-gb8"}, "2 micro-batches are fewer than pp 4"),
        ({"strategy": "fast"}, "is no strategy; write it like"),
        ({"strategy": ""}, "exactly one"),
        ({"balance": BalanceConfig(inner_steps=7)}, "balance says how slices work together"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_before_anything_runs(config, change, message):
    with pytest.raises(ConfigError, match=message):
        replace(config, **change)


def test_more_devices_than_there_are_is_refused(config, tmp_path):
    many = replace(config, strategy="dp16-tp1-pp1-mb1-gb16")
    with pytest.raises(ConfigError, match="wants 16 devices, and there are 8"):
        runs.start(many, tmp_path / "many", QUIET)
    assert not (tmp_path / "many").exists()
