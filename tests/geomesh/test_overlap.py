# SPDX-License-Identifier: Apache-2.0
"""Exchanges beside inner steps: the same bits together and apart, whatever interrupts them."""

import shutil
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from apart import (
    BATCH,
    EXACT,
    REGIONS,
    ROUND_SAMPLES,
    SEQ_LEN,
    SIGNS,
    Apart,
    make_config,
    one_program,
    together,
)
from made_text import words_and_cache

import geojax.geomesh.slice_trainer as slice_module
import geojax.geomesh.trainer as trainer_module
from geojax import runs
from geojax.config import (
    BalanceConfig,
    ClockConfig,
    ConfigError,
    ExchangeConfig,
    OptimizerConfig,
    OuterConfig,
    SliceConfig,
)
from geojax.geomesh import parts
from geojax.geomesh.balance import Option, SliceProfile
from geojax.geomesh.clock import modelled_exchange_seconds, traffic
from geojax.geomesh.worker import Worker
from geojax.launch import processes
from geojax.track.metrics import read_records
from geojax.track.summary import check_accounting, load_run, summarise

pytestmark = pytest.mark.xdist_group("overlap")  # programs are compiled once a process

ROUND_SECONDS = 4.0  # of inner steps, the same for all slices


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    with words_and_cache(tmp_path_factory.mktemp("text"), 500) as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def _one_program():
    with one_program(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "CHUNK_STEPS", 3)  # less than go ahead
        yield


def overlapped(text, overlap, exchange=SIGNS, rounds=5):
    return make_config(text, replace(exchange, overlap=overlap), rounds)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """Folder of an undisturbed run in one process, half a round's steps beside each exchange."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    together(overlapped(text, 0.5), folder)
    return folder


def figures(folder):
    """All that was recorded, but for wall time."""
    found = read_records(folder / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k != "wall_seconds"} for r in found]


def hashes(folder):
    return [r["hash"] for r in figures(folder) if r["kind"] == "round"]


def test_steps_that_go_beside_an_exchange_take_its_time_away(text, whole):
    config = overlapped(text, 0.5)
    run = load_run(whole)
    check_accounting(run)
    exchange = modelled_exchange_seconds(config, traffic(config).payload_bytes)
    # One exchange is waited for, the last. It is less than the half of a round that covers it.
    assert run.seconds == pytest.approx(5 * ROUND_SECONDS + exchange)
    assert summarise(run, None).wan_idle == pytest.approx(exchange / run.seconds)
    assert run.start["lag_steps"] == [5, 3, 2]
    assert [r["late_seconds"] > 0 for r in run.slices] == [True] * 12 + [False] * 3


def test_a_result_taken_in_at_once_has_the_bits_of_no_overlap(text, tmp_path, monkeypatch):
    one = together(make_config(text), tmp_path / "one")

    def go_on(self, contributions, cursor):
        for worker in self.workers:
            worker.go_on()
        return [0] * len(self.workers)

    monkeypatch.setattr(trainer_module.Trainer, "_go_on", go_on)
    again = together(make_config(text), tmp_path / "again")
    assert [r["hash"] for r in again] == [r["hash"] for r in one]


def test_one_slice_trains_as_if_it_exchanged_nothing(text, tmp_path):
    """What it takes in is what it sent: whatever it does meanwhile counts once, and in full."""
    plain = OuterConfig(OptimizerConfig(name="sgd", learning_rate=1.0))
    params = {}
    for overlap in (0.0, 0.5, 1.0):
        config = replace(
            overlapped(text, overlap, EXACT),
            slices=(SliceConfig("a", REGIONS[0], speed=1.0),),
            balance=BalanceConfig(inner_steps=10, batch_sizes=(4,)),
            outer=plain,
        )
        folder = tmp_path / str(overlap)
        together(config, folder)
        evals = [r["loss"] for r in figures(folder) if r["kind"] == "eval"]
        params[overlap] = evals[-1]
        assert evals[-1] < evals[0] - 0.01
    # Sums in another order: Lion's signs flip here and there.
    assert params[0.5] == pytest.approx(params[0.0], abs=2e-3)
    assert params[1.0] == pytest.approx(params[0.0], abs=2e-3)


@pytest.mark.parametrize("chunks", [9, 11])
def test_a_run_that_is_stopped_in_the_window_goes_on_as_if_nothing_had_happened(
    text, whole, tmp_path, monkeypatch, chunks
):
    """In the second round, after 3 of the 5 steps ahead of the first slice, and after 3 of the 5
    that follow when it has taken the result in; the others have done nothing of it yet."""
    run, seen = Worker.run, []

    def stopping(worker, sequences, share, progress, stopped, until=None):
        def counted():
            seen.append(1)
            if len(seen) == chunks:
                made[0]._stop.set()
            return stopped()

        return run(worker, sequences, share, progress, counted, until)

    made = []
    init = trainer_module.Trainer.__init__

    def kept(self, *args):
        init(self, *args)
        made.append(self)

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "run", stopping)
        patch.setattr(trainer_module.Trainer, "__init__", kept)
        together(overlapped(text, 0.5), folder)
    where = [(w.progress.done, w.sent is not None) for w in made[0].workers]
    assert where == [(3, True) if chunks == 9 else (8, False), (0, True), (0, True)]
    assert runs.resume(folder)
    assert figures(folder) == figures(whole)


@pytest.mark.parametrize(
    ("overlap", "exchange"),
    [
        (0.5, SIGNS),
        pytest.param(0.2, SIGNS, marks=pytest.mark.full),
        pytest.param(1.0, EXACT, marks=pytest.mark.full),
    ],
)
def test_slices_apart_have_the_bits_and_the_records_of_slices_together(
    text, whole, tmp_path, monkeypatch, overlap, exchange
):
    config = overlapped(text, overlap, exchange)
    if (overlap, exchange) != (0.5, SIGNS):
        whole = tmp_path / "one"
        together(config, whole)
    apart = Apart(config, tmp_path / "apart", monkeypatch)
    apart.go()
    assert apart.hashes() == hashes(whole), apart.said()
    run, other = load_run(apart.folder), load_run(whole)
    check_accounting(run)
    assert run.seconds == pytest.approx(other.seconds)
    fields = ("slice", "steps", "tokens", "loss", "merged", "captured_energy")
    times = ("compute_seconds", "straggler_seconds", "wan_seconds", "late_seconds")
    for mine, theirs in zip(run.slices, other.slices, strict=True):
        assert [mine[f] for f in fields] == [theirs[f] for f in fields]
        assert [mine[t] for t in times] == pytest.approx([theirs[t] for t in times], abs=1e-9)
    for mine, theirs in zip(run.evals, other.evals, strict=True):
        assert {**mine, "seconds": 0} == {**theirs, "seconds": 0}


@pytest.mark.runs
def test_slices_apart_that_are_stopped_while_they_go_on_lose_nothing(
    text, whole, tmp_path, monkeypatch
):
    apart = Apart(overlapped(text, 0.5), tmp_path / "apart", monkeypatch)
    run, calls = Worker.run, []

    def stopping(worker, sequences, share, progress, stopped, until=None):
        if worker.index == 1 and until:  # it has sent its message
            calls.append(until)
            if len(calls) == 3:
                apart.stop()
        return run(worker, sequences, share, progress, stopped, until)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "run", stopping)
        apart.go()
    assert not any(apart.results.values()), apart.results
    assert len(apart.hashes()) < 5
    again = Apart(overlapped(text, 0.5), tmp_path / "apart", monkeypatch)
    again.go()
    assert again.hashes() == hashes(whole), again.said()


@pytest.mark.full
def test_a_slice_that_leaves_in_the_window_is_missed_and_comes_back(text, tmp_path, monkeypatch):
    config = overlapped(text, 0.5, rounds=12)
    apart = Apart(config, tmp_path / "apart", monkeypatch)
    run, left, calls = slice_module.SliceTrainer.go_on, threading.Event(), []

    def leaving(trainer):
        if trainer.index == 1:
            calls.append(1)
            if len(calls) == 3 and not left.is_set():
                left.set()
                apart.stop()
        return run(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(slice_module.SliceTrainer, "go_on", leaving)
        apart.go()
    # Its checkpoints are lost: it comes back with a peer's state, of a border.
    shutil.rmtree(tmp_path / "apart" / "slices" / REGIONS[1])
    again = Apart(config, tmp_path / "apart", monkeypatch)
    again.go()
    found = load_run(again.folder)
    check_accounting(found)
    assert found.rounds[-1]["tokens"] >= config.train.total_tokens
    assert found.rounds[-1]["samples"] * SEQ_LEN == found.rounds[-1]["tokens"]
    assert {r["slice"] for r in found.slices if r["round"] == len(found.rounds)} == set(REGIONS)


def test_a_slice_that_was_left_out_begins_from_what_is_shared(text, tmp_path, monkeypatch):
    contribution, rounds = Worker.contribution, []

    def poisoned(worker):
        found = contribution(worker)
        if worker.index == 0:
            rounds.append(1)
            if len(rounds) == 2:
                found.pseudo_gradient[0][:] = np.nan
        return found

    monkeypatch.setattr(Worker, "contribution", poisoned)
    folder = tmp_path / "run"
    together(overlapped(text, 0.5), folder)
    run = load_run(folder)
    check_accounting(run)
    mine = [r for r in run.slices if r["slice"] == REGIONS[0]]
    assert [r["merged"] for r in mine] == [True, False, True, True, True]
    # It did nothing ahead in round 2, so it has a whole round to do when the others have half.
    assert mine[1]["late_seconds"] == 0
    assert mine[2]["compute_seconds"] == pytest.approx(
        1.5 * ROUND_SECONDS - mine[2]["late_seconds"]
    )


@pytest.mark.runs
@pytest.mark.parametrize("overlap", [pytest.param(0.0, marks=pytest.mark.full), 0.5])
def test_measured_waits_do_not_have_evaluations_in_them(text, tmp_path, monkeypatch, overlap):
    """One slice evaluates for 2 seconds more than the others, after each round."""

    def profiles(config, *_):
        return [SliceProfile(config.slices[0].name, (Option(BATCH, 0.01, 0),), None)]

    monkeypatch.setattr(slice_module, "measured_profiles", profiles)
    evaluate = slice_module.evaluate_shared

    def slow(worker, *args):
        time.sleep(2.0 if worker.index == 2 else 0.0)
        return evaluate(worker, *args)

    monkeypatch.setattr(slice_module, "evaluate_shared", slow)
    config = processes.with_grpc(make_config(text))
    config = replace(
        config,
        slices=tuple(SliceConfig(name) for name in REGIONS),
        clock=ClockConfig(),
        exchange=replace(config.exchange, overlap=overlap),
        balance=BalanceConfig(inner_steps=4, batch_sizes=(BATCH,)),
        train=replace(config.train, total_tokens=3 * 3 * 4 * BATCH * SEQ_LEN),
        eval=replace(config.eval, every_tokens=SEQ_LEN),
    )
    apart = Apart(config, tmp_path / "apart", monkeypatch)
    apart.go()
    run = load_run(apart.folder)
    check_accounting(run)
    assert len(run.evals) == 4
    busy = [r["busy_seconds"] for r in run.slices if r["slice"] == REGIONS[2]]
    assert len(busy) == 3
    assert min(busy) > 2.0
    for part in ("wan", "straggler"):
        assert all(0 <= r[f"{part}_seconds"] < 1.5 for r in run.slices)


def test_what_cannot_overlap_is_refused(text):
    config = overlapped(text, 0.5)
    with pytest.raises(ConfigError, match=r"\[0, 1\]"):
        ExchangeConfig(overlap=1.5)
    measured = {"slices": tuple(SliceConfig(n) for n in REGIONS), "clock": ClockConfig()}
    with pytest.raises(ConfigError, match="geojax launch"):
        replace(config, **measured)
    launched = processes.with_grpc(replace(config, exchange=SIGNS))
    ahead = replace(launched.exchange, overlap=0.5)
    balance = replace(config.balance, replan=0.03)
    with pytest.raises(ConfigError, match=r"balance\.replan"):
        replace(launched, **measured, balance=balance, exchange=ahead)
    assert replace(launched, **measured, exchange=ahead).exchange.overlap == 0.5
    assert config.train.total_tokens == 5 * ROUND_SAMPLES * SEQ_LEN
