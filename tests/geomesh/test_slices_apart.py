# SPDX-License-Identifier: Apache-2.0
"""A run whose slices know each other by gRPC alone has the bits of one in one process.

Slices are threads here; tests/launch has processes.
"""

import threading
from dataclasses import replace

import jax
import numpy as np
import pytest
from apart import (
    BATCH,
    EXACT,
    REGIONS,
    SEQ_LEN,
    SIGNS,
    Apart,
    make_config,
    one_program,
    together,
)
from made_text import words_and_cache

import geojax.geomesh.slice_trainer as slice_module
from geojax.config import (
    BalanceConfig,
    ClockConfig,
    ConaConfig,
    ConfigError,
    GrpcConfig,
    NoiseConfig,
    ScalingConfig,
    SliceConfig,
)
from geojax.geomesh.slice_checkpoint import Saved
from geojax.geomesh.slice_trainer import SliceTrainer
from geojax.geomesh.wan.member import Member
from geojax.launch import processes
from geojax.models.transformer import count_params
from geojax.track.metrics import read_records
from geojax.track.summary import check_accounting, load_run
from geojax.train.checkpoint import read_params


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    with words_and_cache(tmp_path_factory.mktemp("text"), 500) as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def _one_program():
    with one_program():
        yield


@pytest.mark.parametrize(
    "exchange",
    [
        pytest.param(SIGNS, id="signs"),
        pytest.param(EXACT, id="fp32"),
        pytest.param(replace(SIGNS, codec="int8"), id="int8", marks=pytest.mark.full),
    ],
)
def test_slices_apart_have_the_bits_and_the_records_of_slices_together(
    exchange, text, tmp_path, monkeypatch
):
    config = make_config(text, exchange)
    one = together(config, tmp_path / "one")
    apart = Apart(config, tmp_path / "apart", monkeypatch)
    apart.go()
    assert apart.hashes() == [r["hash"] for r in one]
    run, other = load_run(apart.folder), load_run(tmp_path / "one")
    check_accounting(run)
    assert run.seconds == pytest.approx(other.seconds)
    assert run.end
    for mine, theirs in zip(run.evals, other.evals, strict=True):
        assert {**mine, "seconds": 0} == {**theirs, "seconds": 0}
    fields = ("slice", "steps", "tokens", "loss", "merged", "captured_energy", "sent_bytes")
    for mine, theirs in zip(run.slices, other.slices, strict=True):
        assert [mine[f] for f in fields] == [theirs[f] for f in fields]
        assert 0 <= mine["peer_bytes"] - mine["sent_bytes"] < 1000 * len(REGIONS)
    params, _ = read_params(apart.folder)
    whole, _ = read_params(tmp_path / "one")
    same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), params, whole)
    assert all(jax.tree.leaves(same))


@pytest.mark.runs
def test_slices_that_are_stopped_in_a_round_go_on_as_if_nothing_had_happened(
    text, tmp_path, monkeypatch
):
    config = make_config(text)
    one = together(config, tmp_path / "one")
    apart = Apart(config, tmp_path / "apart", monkeypatch)
    run = slice_module.Worker.run
    calls = []

    def stopping(worker, *args):
        if worker.index == 1:
            calls.append(1)
            if len(calls) == 3:
                apart.stop()  # while the others may be working, waiting or done
        return run(worker, *args)

    monkeypatch.setattr(slice_module.Worker, "run", stopping)
    apart.go()
    assert not any(apart.results.values()), apart.results
    assert len(apart.hashes()) < len(one)
    again = Apart(config, tmp_path / "apart", monkeypatch)
    again.go()
    assert again.hashes() == [r["hash"] for r in one], again.said()
    assert "goes on from its checkpoint" in again.said()


@pytest.mark.full
def test_a_slice_that_starts_anew_takes_part_again(text, tmp_path, monkeypatch):
    """All checkpoints of one slice are lost between two starts: it takes a peer's state."""
    import shutil

    config = make_config(text, rounds=8)
    apart = Apart(config, tmp_path / "apart", monkeypatch)
    run = slice_module.Worker.run
    calls = []

    def stopping(worker, *args):
        calls.append(worker.index)
        if calls.count(1) == 4:
            apart.stop()
        return run(worker, *args)

    with monkeypatch.context() as patch:
        patch.setattr(slice_module.Worker, "run", stopping)
        apart.go()
    shutil.rmtree(tmp_path / "apart" / "slices" / REGIONS[2])
    again = Apart(config, tmp_path / "apart", monkeypatch)
    again.go()
    assert "took the shared state" in again.outputs[REGIONS[2]].getvalue(), again.said()
    run = load_run(again.folder)
    check_accounting(run)
    assert run.rounds[-1]["tokens"] == config.train.total_tokens
    assert {r["slice"] for r in run.slices if r["round"] == len(run.rounds)} == set(REGIONS)
    # What it took is in the givers' account.
    state = 4 * count_params(config.model)
    assert sum(r["peer_bytes"] - r["sent_bytes"] for r in run.slices) > state


@pytest.mark.runs
def test_a_slice_that_comes_back_after_the_end_has_the_end_on_disk(text, tmp_path, monkeypatch):
    """It was killed before it saved, and finds a run that is over."""
    import shutil

    apart = Apart(make_config(text, rounds=3), tmp_path / "apart", monkeypatch)
    apart.go()
    folders = [apart.folder / "slices" / name for name in REGIONS]
    shutil.rmtree(folders[2] / "checkpoints")
    # The others would leave at once, and it may be slow to begin.
    took, adopt, wait = threading.Event(), SliceTrainer.adopt, Member.wait_for_the_end

    def adopting(trainer, *args):
        adopt(trainer, *args)
        took.set()

    def waiting(member):
        assert took.wait(120)
        wait(member)

    monkeypatch.setattr(SliceTrainer, "adopt", adopting)
    monkeypatch.setattr(Member, "wait_for_the_end", waiting)
    again = Apart(apart.config, tmp_path / "apart", monkeypatch)
    again.go()
    saved = [read_params(folder)[0] for folder in folders]
    for other in saved[1:]:
        jax.tree.map(np.testing.assert_array_equal, saved[0], other)
    records = read_records(apart.folder / "metrics.jsonl")
    assert [r["kind"] for r in records].count("end") == 1


def test_work_of_a_round_that_was_undone_is_not_taken_up_again():
    saved = Saved({}, {"epoch": 0, "border": 6, "mid_round": True})
    assert saved.in_round(7)
    assert not saved.of_another_round().in_round(7)
    assert saved.of_another_round().round == 7


@pytest.mark.full
def test_under_cona_slices_apart_take_the_same_plans(text, tmp_path, monkeypatch):
    config = make_config(text)
    cona = replace(
        config,
        train=replace(config.train, compute_dtype="bfloat16", total_tokens=900 * SEQ_LEN),
        slices=(
            SliceConfig("h", "eastus", gpu="h100", gpus=8),
            SliceConfig("a", "westus2", gpu="a100-40gb", gpus=4),
        ),
        cona=ConaConfig((4, 16)),
        scaling=ScalingConfig(base_batch=4),
        noise=NoiseConfig(probe_steps=5, first_steps=2),
        balance=BalanceConfig(inner_steps=4),
        clock=ClockConfig("modelled", model="llama-150m", wan="geomesh-azure", switch_seconds=0.5),
    )
    one = together(cona, tmp_path / "one")
    apart = Apart(cona, tmp_path / "apart", monkeypatch)
    apart.go()
    assert apart.hashes() == [r["hash"] for r in one]
    plans = [r["decision"]["plan"] for r in apart.records("plan")]
    other = read_records(tmp_path / "one" / "metrics.jsonl")
    assert plans == [r["decision"]["plan"] for r in other if r["kind"] == "plan"]
    for mine, theirs in zip(apart.records("round"), one, strict=True):
        assert (mine["noise"], mine["strategy"]) == (theirs["noise"], theirs["strategy"])
    check_accounting(load_run(apart.folder))


@pytest.mark.full
def test_under_the_measured_clock_times_add_up_and_plans_may_follow_them(
    text, tmp_path, monkeypatch
):
    config = make_config(text, rounds=12)
    measured = replace(
        processes.with_grpc(config),
        slices=tuple(SliceConfig(name) for name in REGIONS),
        clock=ClockConfig(),
        balance=BalanceConfig(sync_share=0.5, batch_sizes=(BATCH,), replan=0.03),
    )
    run, slow = slice_module.Worker.run, threading.Event()

    def slowed(worker, *args):
        before = worker.progress.compute_seconds
        run(worker, *args)
        if worker.index == 2 and slow.is_set():  # this slice is three times as slow
            took = worker.progress.compute_seconds - before
            threading.Event().wait(2 * took)
            worker.progress = replace(
                worker.progress, compute_seconds=worker.progress.compute_seconds + 2 * took
            )

    slow.set()
    monkeypatch.setattr(slice_module.Worker, "run", slowed)
    apart = Apart(measured, tmp_path / "apart", monkeypatch)
    apart.go()
    found = load_run(apart.folder)
    check_accounting(found)
    assert min(r["wan_seconds"] for r in found.slices) >= 0
    assert {r["slice"] for r in found.slices} == set(REGIONS)
    assert found.switches, apart.said()


def test_what_cannot_run_as_processes_is_refused(text):
    config = make_config(text)
    with pytest.raises(ConfigError, match="two_phase"):
        processes.with_grpc(replace(config, exchange=replace(SIGNS, schedule="two_phase")))
    with pytest.raises(ConfigError, match="two or more"):
        processes.with_grpc(replace(config, slices=config.slices[:1]))
    with pytest.raises(ConfigError, match="geojax launch"):
        replace(config, grpc=GrpcConfig(port=7000))
    with pytest.raises(ConfigError, match=r"balance\.replan"):
        replace(config, balance=replace(config.balance, replan=0.03))
    with pytest.raises(ConfigError, match="no slice"):
        processes.take_part(config, text.parent, "nowhere", "127.0.0.1:7000")
    with pytest.raises(ConfigError, match="HOST:PORT"):
        processes.take_part(config, text.parent, REGIONS[0], "7000")


def test_configs_differ_by_what_changes_the_run_and_by_nothing_else(text):
    config = processes.with_grpc(make_config(text))
    own = replace(config, grpc=GrpcConfig(bind="10.0.0.1", port=7000, advertise="here"))
    assert processes.fingerprint(own) == processes.fingerprint(config)
    for other in (
        replace(config, seed=1),
        replace(config, grpc=GrpcConfig(quorum=0.6)),
        replace(config, train=replace(config.train, total_tokens=10**6)),
    ):
        assert processes.fingerprint(other) != processes.fingerprint(config)
