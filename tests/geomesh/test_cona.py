# SPDX-License-Identifier: Apache-2.0
"""Slices whose strategies and batches follow the gradient's noise: when plans change, and that
nothing is lost then."""

import sys
import threading
import time
from collections import defaultdict
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from made_text import words_and_cache
from rich.console import Console

import geojax.geomesh.trainer as trainer_module
from geojax import runs
from geojax.cona.controller import NoiseWatch
from geojax.cona.noise import NoiseEstimate
from geojax.config import (
    BalanceConfig,
    CheckpointConfig,
    ClockConfig,
    ConaConfig,
    ConfigError,
    DataConfig,
    EvalConfig,
    NoiseConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    ScalingConfig,
    SliceConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
)
from geojax.data import TrainSequences, prepare
from geojax.geomesh import profile as profile_module
from geojax.geomesh import steering
from geojax.geomesh.balance import Option, SliceProfile, SliceWork, make_plan, progress_rate
from geojax.geomesh.options import Preparer
from geojax.geomesh.parts import chunk_steps
from geojax.geomesh.steering import Situation, decide
from geojax.geomesh.trainer import Trainer
from geojax.geomesh.worker import Worker
from geojax.meshes.strategy import parse_strategy, problems
from geojax.models.config import TransformerConfig
from geojax.track.metrics import read_records
from geojax.track.summary import check_accounting, load_run

pytestmark = pytest.mark.xdist_group("slices under CONA")  # programs are compiled once a process

SEQ_LEN, VOCAB = 16, 257
MODEL = TransformerConfig(VOCAB, dim=16, layers=2, heads=2, kv_heads=2, mlp_dim=24)
QUIET = Console(quiet=True)
SMALL, LARGE = 2.0, 200.0
"""Noise scales at which small and large batches are best."""
LOUD_STEPS = 30
"""Good steps after which the injected noise is large."""


def option(text: str, seconds: float) -> Option:
    return Option(parse_strategy(text).global_batch, seconds, 0, text)


PROFILES = (
    SliceProfile(
        "two",
        (option("dp1-tp2-pp1-mb4-gb4", 1.0), option("dp2-tp1-pp1-mb4-gb16", 2.0)),
        None,
    ),
    SliceProfile(
        "four",
        (option("dp4-tp1-pp1-mb1-gb4", 0.5), option("dp2-tp1-pp2-mb2-gb16", 0.9)),
        None,
    ),
)
"""On 2 and 4 devices; other strategies for other batches. The first has its noise by probes."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text file of made-up words, and a cache of its own."""
    with words_and_cache(tmp_path_factory.mktemp("text"), 480) as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def _equal_programs_compile_once():
    """Makers of compiled programs are pure: runs of one config may share what they made."""
    exchange = cache(trainer_module.MeshExchange)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "Program", cache(trainer_module.Program))
        patch.setattr(trainer_module, "MeshExchange", lambda leaders: exchange(tuple(leaders)))
        yield


@pytest.fixture
def config(text) -> RunConfig:
    """Two slices under the measured clock; 3 rounds of small batches, and as many of large ones."""
    return RunConfig(
        name="cona",
        model=MODEL,
        data=DataConfig(
            source=SourceConfig(kind="files", paths=(str(text),)),
            tokenizer=TokenizerConfig(vocab_size=VOCAB),
            seq_len=SEQ_LEN,
            valid_fraction=0.2,
        ),
        train=TrainConfig(
            total_tokens=700 * SEQ_LEN,
            optimizer=OptimizerConfig(name="adamw", learning_rate=2e-3),
            compute_dtype="float32",
        ),
        slices=(SliceConfig("two", devices=2), SliceConfig("four", devices=4)),
        cona=ConaConfig((4, 16), micro_batches=(1, 2, 4)),
        scaling=ScalingConfig(base_batch=4),
        noise=NoiseConfig(probe_steps=5, first_steps=2),
        balance=BalanceConfig(inner_steps=4),
        outer=OuterConfig(OptimizerConfig(name="sgd", learning_rate=0.7, momentum=0.3)),
        eval=EvalConfig(sequences=16, batch=8),
        checkpoint=CheckpointConfig(every_rounds=2),
    )


def estimate(value: float, spread: float = 1.1) -> NoiseEstimate:
    return NoiseEstimate(value, value / spread, value * spread, "whole gradient", 9.0)


@pytest.fixture
def injected(monkeypatch):
    """What is measured is given, so that two runs decide alike; noise grows with the steps seen."""
    monkeypatch.setattr(trainer_module, "measured_profiles", lambda *_: list(PROFILES))
    monkeypatch.setattr(steering, "_CHANGE_MEMORY", 0.0)
    exchange = Trainer._empty_exchange

    def known(self):
        exchange(self)
        return 0.5

    monkeypatch.setattr(Trainer, "_empty_exchange", known)
    monkeypatch.setattr(
        NoiseWatch,
        "estimate",
        lambda self: estimate(LARGE if self.state()["steps"] >= LOUD_STEPS else SMALL),
    )


def records(folder, kind):
    return [r for r in read_records(folder / "metrics.jsonl") if r["kind"] == kind]


def replayed(config, folder):
    rule = config.scaling.rate_rule()
    return steering.replay(records(folder, "plan"), config.balance, config.cona, rule)


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def batches(plan) -> list[int]:
    return [w.batch for w in plan.work]


@pytest.mark.runs
def test_batches_and_strategies_of_slices_follow_the_noise(
    config, injected, trainers, tmp_path, monkeypatch
):
    taken = []
    chunks = TrainSequences.chunks

    def spying(self, first, steps, batch, chunk_steps, **more):
        for i, (chunk, real) in enumerate(chunks(self, first, steps, batch, chunk_steps, **more)):
            begin = first + i * chunk_steps * batch
            taken.extend(range(begin, begin + real * batch))
            yield chunk, real

    monkeypatch.setattr(TrainSequences, "chunks", spying)
    sources = defaultdict(set)
    observe = NoiseWatch.observe

    def listening(self, batch, samples, steps, noise):
        sources[batch, steps].update(noise)
        observe(self, batch, samples, steps, noise)

    prepared = []
    really_prepare = Preparer.prepare

    def preparing(self, plan, workers):
        prepared.append((workers[0].work.batch, plan))
        really_prepare(self, plan, workers)

    monkeypatch.setattr(NoiseWatch, "observe", listening)
    monkeypatch.setattr(Preparer, "prepare", preparing)
    monkeypatch.setattr(sys.modules[__name__], "LOUD_STEPS", 20)  # two rounds; one before it may
    config = replace(config, cona=replace(config.cona, dwell_rounds=3))
    folder = tmp_path / "run"
    assert runs.start(config, folder, QUIET)
    (trainer,) = trainers.made
    assert prepared == [(4, trainer.plan)]

    (switch,) = records(folder, "switch")
    assert switch["round"] == 3  # 12 steps a round; the first two are the dwell's
    assert switch["from"].startswith("dp1-tp2-pp1-mb4-gb4 x 4 + dp4-tp1-pp1-mb1-gb4 x 8")
    strategies = [str(w.program.strategy) for w in trainer.workers]
    assert strategies == ["dp2-tp1-pp1-mb4-gb16", "dp2-tp1-pp2-mb2-gb16"]
    assert strategies == [w.strategy for w in trainer.plan.work]
    parts = records(folder, "slice")
    assert {(r["batch"], r["round"] > 3) for r in parts} == {(4, False), (16, True)}
    # The rule's factor, of the slice's own batch: adascale at the noise as known.
    scales = {r["batch"]: r["rate_scale"] for r in parts}
    assert scales == {4: 1.0, 16: pytest.approx((1 + LARGE / 4) / (1 + LARGE / 16))}

    # No sample is missed or taken twice over the change, and all are distinct.
    last = records(folder, "round")[-1]
    assert sorted(taken) == list(range(last["tokens"] // SEQ_LEN))
    ids = TrainSequences(prepare(config.data, VOCAB), SEQ_LEN, config.data.seed).ids(0, len(taken))
    assert len(set(ids)) == len(ids)

    copies = [bits((w.outer.params, w.outer.opt_state)) for w in trainer.workers]
    assert copies[0] == copies[1]
    losses = [r["loss"] for r in records(folder, "eval")]
    assert losses[-1] < losses[0]
    by_round = defaultdict(list)
    for r in parts:
        by_round[r["round"]].append(r["loss"])
        assert r["skipped"] == 0
    assert max(by_round[4]) < max(by_round[1])  # it goes on where it was
    # Every slice told of its noise, the one without parts by probes in the rounds that were due.
    assert sources[4, 4] == {"norms", "probe"}
    assert sources[4, 8] == {"norms", "parts"}
    assert {"parts"} <= set.union(*(found for (b, _), found in sources.items() if b == 16))
    check_accounting(load_run(folder))
    pairs = replayed(config, folder)
    assert [recorded.kind for recorded, _ in pairs].count("change") == 1
    assert all(recorded == again for recorded, again in pairs)


def test_what_may_be_next_is_compiled_beside_the_rounds_once_and_may_fail(config):
    """A worker that waits for it, and one whose compiler is broken."""

    class Fake:
        def __init__(self, broken):
            self.calls, self.broken, self.ready = [], broken, threading.Event()

        def compile_all(self, steps):
            self.calls.append((steps, threading.current_thread().name))
            self.ready.set()
            if self.broken:
                raise jax.errors.JaxRuntimeError("INTERNAL: no such instruction")

    programs = {}

    def made(devices, strategy):
        return programs.setdefault((devices, strategy), Fake(devices == "a"))

    preparer = Preparer(config, made)
    workers = [SimpleNamespace(index=i, devices="ab"[i]) for i in range(2)]
    plan = make_plan(PROFILES, config.balance, 0.5, lambda batch: float(batch))
    for _ in range(3):
        preparer.prepare(plan, workers)
    assert all(program.ready.wait(30) for program in programs.values())
    preparer.close()
    names = [str(strategy) for _, strategy in programs]
    assert names == [w.strategy for w in plan.work]
    for program in programs.values():
        ((steps, thread),) = program.calls
        assert steps == chunk_steps(config, plan)
        assert thread.startswith("compile")


def stop_at(round_number: int, chunks: int):
    """A hook that sets the stop event in that round, after so many chunks; 0: as it ends."""

    def hook(trainer):
        seen = []

        def counted(worker):
            run = worker._chunks

            def counting(*args):
                for item in run(*args):
                    if trainer.position.round == round_number - 1:
                        seen.append(1)
                        if len(seen) == chunks:
                            trainer._stop.set()
                    yield item

            worker._chunks = counting

        for worker in trainer.workers:
            counted(worker)
        end_round = trainer._end_round

        def ending(cursor, console):
            end_round(cursor, console)
            if trainer.position.round == round_number and not chunks:
                trainer._stop.set()

        trainer._end_round = ending

    return hook


def stop_when_one_is_done(round_number: int):
    """A hook that sets the stop event in that round, when the first slice has done its part and the
    second has begun."""

    def hook(trainer):
        first, second = trainer.workers
        chunks = second._chunks

        def waiting(*args):
            for item in chunks(*args):
                while trainer.position.round == round_number - 1 and not trainer._stop.is_set():
                    if first.finished:
                        trainer._stop.set()
                    time.sleep(0.01)
                yield item

        second._chunks = waiting

    return hook


@pytest.mark.runs
def test_a_run_stopped_around_a_change_goes_on_as_if_it_had_not(
    config, injected, trainers, tmp_path
):
    # In the round before the change, at the border where it is made, in the round after it, and in
    # one of which one slice has done its part.
    assert runs.start(config, tmp_path / "whole", QUIET)
    trainers.hooks = [stop_at(3, 2)]
    assert not runs.start(config, tmp_path / "stopped", QUIET)
    assert 0 < sum(w.progress.done for w in trainers.made[-1].workers) < 12
    for hook in (stop_at(3, 0), stop_at(4, 2), stop_when_one_is_done(5)):
        trainers.hooks = [hook]
        assert not runs.resume(tmp_path / "stopped", QUIET)
        assert batches(trainers.made[-1].plan) == [16, 16]
    assert [w.finished for w in trainers.made[-1].workers] == [True, False]
    trainers.hooks = []
    assert runs.resume(tmp_path / "stopped", QUIET)
    for kind, fields in (
        ("plan", ("round", "inputs", "decision")),
        ("switch", ("round", "from", "to", "why")),
        ("round", ("round", "tokens", "strategy", "noise", "hash")),
        ("slice", ("slice", "batch", "steps", "tokens", "loss", "grad_norm", "rate_scale")),
        ("eval", ("round", "loss")),
    ):
        whole, stopped = (
            [{f: r[f] for f in fields} for r in records(tmp_path / name, kind)]
            for name in ("whole", "stopped")
        )
        assert stopped == whole, kind
    first, *_, last = trainers.made
    assert first._planner.state() == last._planner.state()
    for a, b in zip(first.workers, last.workers, strict=True):
        assert bits((a.outer.params, a.outer.opt_state)) == bits(
            (b.outer.params, b.outer.opt_state)
        )
        assert bits(a.feedback.own) == bits(b.feedback.own)
        assert bits(a.program.host(a.state)) == bits(b.program.host(b.state))


@pytest.mark.runs
def test_an_option_that_fails_is_left_out_and_no_step_is_lost(
    config, injected, trainers, tmp_path, monkeypatch
):
    # The second slice's, after the first has gone over: the first goes back.
    broken = "dp2-tp1-pp2-mb2-gb16"
    compile_worker, take_up = Worker.compile, Worker.take_up
    seen = []

    def failing(self):
        compile_worker(self)
        if str(self.program.strategy) == broken:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying")

    def watching(self, work, chunk_steps, program):
        before = self.work, self.program, bits(self.program.host(self.state))
        try:
            take_up(self, work, chunk_steps, program)
        except jax.errors.JaxRuntimeError:
            assert (self.work, self.program, bits(self.program.host(self.state))) == before
            seen.append("failed")
            raise
        seen.append(str(self.program.strategy))

    monkeypatch.setattr(Worker, "compile", failing)
    monkeypatch.setattr(Worker, "take_up", watching)
    folder = tmp_path / "run"
    assert runs.start(config, folder, QUIET)
    (trainer,) = trainers.made
    small, large = "dp1-tp2-pp1-mb4-gb4", "dp2-tp1-pp1-mb4-gb16"
    assert seen[:3] == [large, "failed", small]
    assert seen.count("failed") == 1  # it is not tried again
    (refused,) = records(folder, "refused")
    assert (refused["slice"], refused["strategy"], refused["round"]) == ("four", broken, 3)
    assert "RESOURCE_EXHAUSTED" in refused["why"]
    assert batches(trainer.plan) == [16, 4]  # the next best, a round later
    assert [r["round"] for r in records(folder, "switch")] == [4]
    copies = [bits((w.outer.params, w.outer.opt_state)) for w in trainer.workers]
    assert copies[0] == copies[1]
    check_accounting(load_run(folder))
    assert all(a == b for a, b in replayed(config, folder))


@pytest.mark.parametrize(
    ("out_of_memory", "left"), [(False, [4, 8, 32]), (True, [4, 8])], ids=["broken", "no memory"]
)
def test_out_of_memory_takes_with_it_what_needs_as_much(config, out_of_memory, left):
    options = tuple(Option(b, b / 4, 100 * b, f"dp1-tp1-pp1-mb1-gb{b}") for b in (4, 8, 16, 32))
    profiles = [SliceProfile(name, options, None) for name in ("two", "four")]
    planner = steering.Planner(config, make_plan(profiles, BALANCE, 0.5, lambda b: 1.0), profiles)
    assert batches(planner.plan) == [4, 4]
    planner.refuse(SliceWork("four", 16, 1, 4.0, "dp1-tp1-pp1-mb1-gb16"), out_of_memory)
    assert [[o.batch for o in p.options] for p in planner._profiles] == [[4, 8, 16, 32], left]
    before, after = planner._change_seconds, 1.0
    planner.changed(planner.plan, after)
    assert after < planner.propose(1, 1)[0].change_seconds < before  # it learns what a change takes
    # What is in force stays, whatever it is said to take.
    planner.refuse(SliceWork("four", 8, 1, 2.0, "dp1-tp1-pp1-mb1-gb8"), out_of_memory=True)
    assert 4 in [o.batch for o in planner._profiles[1].options]


def test_what_cannot_be_measured_is_left_out_and_said(config, caplog, monkeypatch):
    def measure(_, strategy, params):
        if strategy.global_batch > params:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return Option(strategy.global_batch, 1.0, 0, str(strategy))

    monkeypatch.setattr(profile_module, "_measure", measure)
    names = [["dp2-tp1-pp1-mb1-gb4", "dp2-tp1-pp1-mb1-gb16"], ["dp4-tp1-pp1-mb1-gb16"]]
    strategies = [[parse_strategy(n) for n in row] for row in names]
    devices = [tuple(jax.devices()[:2]), tuple(jax.devices()[2:6])]

    def profiles(largest):
        return profile_module.measured_profiles(
            config, devices, strategies, lambda _, s: s, largest
        )

    assert [len(p.options) for p in profiles(16)] == [2, 1]
    assert not caplog.messages
    with pytest.raises(ConfigError, match=r"slice four: none of dp4-tp1-pp1-mb1-gb16 ran here"):
        profiles(8)
    assert "slice two does without dp2-tp1-pp1-mb1-gb16" in caplog.messages[0]


def test_memory_is_asked_of_a_device_of_this_process():
    class Device:
        def __init__(self, process_index, stats):
            self.process_index, self.stats = process_index, stats

        def memory_stats(self):
            if self.stats is None:
                raise jax.errors.JaxRuntimeError("of another process")
            return self.stats

    devices = Device(1, None), Device(0, {"bytes_limit": 7}), Device(0, {"bytes_limit": 8})
    assert profile_module._memory_limit(devices) == 7
    assert profile_module._memory_limit((Device(0, {}),)) is None


@pytest.mark.full
def test_the_optimizer_keeps_what_it_knows_over_a_change(
    config, injected, trainers, tmp_path, monkeypatch
):
    seen = []
    take_up = Worker.take_up

    def watching(self, work, chunk_steps, program):
        feedback = self.feedback
        before = jax.tree.map(np.array, self.program.host(self.state))
        take_up(self, work, chunk_steps, program)
        seen.append((before, self.program.host(self.state), feedback is self.feedback))

    monkeypatch.setattr(Worker, "take_up", watching)
    runs.start(config, tmp_path / "run", QUIET)
    assert len(seen) == 2
    for before, after, same_feedback in seen:
        assert same_feedback
        # Adam's second moment is scaled to a memory of other steps; all else stays as it was.
        for part in ("mu", "count"):
            parts = [optax.tree_utils.tree_get(s.opt_state, part) for s in (after, before)]
            assert bits(parts[0]) == bits(parts[1])
        assert bits(after.params) == bits(before.params)
        assert any(np.any(leaf) for leaf in jax.tree.leaves(after.opt_state))


@pytest.mark.full
def test_what_is_measured_here_makes_a_plan_that_fits_the_devices(config, trainers, tmp_path):
    # Nothing is injected: strategies by the timing model, seconds and noise as they are.
    short = replace(config, train=replace(config.train, total_tokens=300 * SEQ_LEN))
    assert runs.start(short, tmp_path / "run", QUIET)
    (trainer,) = trainers.made
    for s, profile in zip(config.slices, trainer._planner._profiles, strict=True):
        assert [o.batch for o in profile.options] == [4, 16]
        for o in profile.options:
            strategy = parse_strategy(o.strategy)
            assert strategy.devices == s.devices
            assert not problems(strategy, MODEL)
            assert strategy.micro_batch in config.cona.micro_batches
    last = records(tmp_path / "run", "round")[-1]
    assert last["noise"]["low"] >= 0
    assert last["noise"]["source"] == "whole gradient"


@pytest.mark.full
def test_gpus_that_are_modelled_choose_by_the_timing_model(config, trainers, tmp_path):
    gpus = (
        SliceConfig("h", "eastus", devices=2, gpu="h100", gpus=8),
        SliceConfig("a", "westus2", gpu="a100-40gb", gpus=4),
    )
    modelled = replace(
        config,
        slices=gpus,
        train=replace(config.train, compute_dtype="bfloat16"),
        cona=ConaConfig((4, 16)),
        clock=ClockConfig("modelled", model="llama-150m", wan="geomesh-azure", switch_seconds=0.5),
    )
    for name in ("run", "again"):
        assert runs.start(modelled, tmp_path / name, QUIET)
    check_accounting(load_run(tmp_path / "run"))
    run, again = ([r["hash"] for r in records(tmp_path / n, "round")] for n in ("run", "again"))
    assert run == again
    work = trainers.made[0].plan.work
    assert [parse_strategy(w.strategy).devices for w in work] == [8, 4]
    # What runs here is the batch on the slice's own devices, in parts that tell the noise apart.
    for worker, s in zip(trainers.made[0].workers, gpus, strict=True):
        assert worker.program.strategy.devices == s.devices
        assert worker.program.strategy.global_batch == worker.work.batch
        assert worker.program.parts >= 2


@pytest.mark.full
def test_a_checkpoint_goes_on_with_cona_only_if_it_was_made_with_it(
    config, injected, trainers, tmp_path
):
    trainers.hooks = [stop_at(2, 1)]
    assert not runs.start(config, tmp_path / "run", QUIET)
    trainers.hooks = []
    plain = replace(
        config,
        cona=None,
        scaling=None,
        noise=None,
        balance=BalanceConfig(inner_steps=4, batch_sizes=(4, 16)),
    )
    runs.save_config(plain, tmp_path / "run" / "config.json")
    with pytest.raises(
        ConfigError, match=r"of a run with cona, and config\.json has none; put it back"
    ):
        runs.resume(tmp_path / "run", QUIET)


BALANCE, CONA = BalanceConfig(inner_steps=4), ConaConfig((4, 16))


def small_plan():
    return make_plan(PROFILES, BALANCE, 0.5, lambda batch: batch / (batch + SMALL))


def situation(**changes) -> Situation:
    now = Situation(
        round=9,
        samples=1000,
        total_samples=10**6,
        rounds_here=9,
        plan=small_plan(),
        profiles=PROFILES,
        exchange_seconds=0.5,
        noise=(LARGE, LARGE / 2, LARGE * 2),
        change_seconds=5.0,
    )
    return replace(now, **changes)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "change"),
        ({"noise": None}, "keep"),
        ({"noise": (SMALL, 1.0, 4.0)}, "keep"),
        ({"rounds_here": 1}, "keep"),
        ({"noise": (None, LARGE, None)}, "change"),  # at least that
        ({"noise": (LARGE, 0.0, None)}, "keep"),  # at its lower end large batches would lose
        ({"samples": 10**6 - 48}, "keep"),  # a round is left, of less time than the change
        ({"change_seconds": 10**6}, "keep"),
    ],
)
def test_a_plan_changes_where_it_pays_at_both_ends_of_the_noise(changes, kind):
    decision = decide(situation(**changes), BALANCE, CONA, None)
    assert decision.kind == kind
    assert batches(decision.plan) == ([16, 16] if kind == "change" else [4, 4])


def test_a_change_within_the_margin_is_left():
    now = situation(noise=(20.0, 15.0, 25.0))
    gain_low = decide(now, BALANCE, CONA, None).gain_low
    assert gain_low > 1.1
    for margin, kind in ((gain_low - 1.01, "change"), (gain_low - 0.99, "keep")):
        assert decide(now, BALANCE, replace(CONA, margin=margin), None).kind == kind


def test_a_change_back_pays_where_noise_falls():
    large = make_plan(PROFILES, BALANCE, 0.5, lambda batch: batch / (batch + LARGE))
    now = situation(plan=large, noise=(0.5, 0.4, 0.6))
    assert batches(decide(now, BALANCE, CONA, None).plan) == [4, 4]


@pytest.mark.parametrize("mode", ["adaptive", "equal"])
@pytest.mark.parametrize("noise", [0.0, 1.0, 10.0, 1e3, 1e18])
def test_plans_by_worth_are_about_as_good_as_any_single_choice_of_options(mode, noise):
    def worth(batch):
        return batch / (batch + noise)

    balance = replace(BALANCE, mode=mode, sync_share=0.02, inner_steps=None)
    plan = make_plan(PROFILES, balance, 0.5, worth)
    rate = progress_rate(plan, worth, 0.5)
    for a in PROFILES[0].options:
        for b in PROFILES[1].options:
            if mode == "equal" and a.batch != b.batch:
                continue
            one = [replace(p, options=(o,)) for p, o in zip(PROFILES, (a, b), strict=True)]
            other = progress_rate(make_plan(one, balance, 0.5, worth), worth, 0.5)
            # Within throughput_slack, and the idle that a plan may have.
            assert rate >= 0.92 * other
