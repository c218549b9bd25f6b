# SPDX-License-Identifier: Apache-2.0
"""Runs whose strategy changes: nothing of the training is lost or seen twice, whatever happens."""

import os
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console
from tiny_run import BATCH, SEQ_LEN, records, tiny_run

from geojax import runs
from geojax.cli import main
from geojax.config import (
    ChainLeg,
    CheckpointConfig,
    ClockConfig,
    ConaConfig,
    ConfigError,
    NoiseConfig,
    RunError,
    ScalingConfig,
)
from geojax.config.files import read_config
from geojax.meshes.reshard import bring_back, keep_copy
from geojax.meshes.strategy import parse_strategy
from geojax.track.chain import chain_notes, stays
from geojax.track.report import report
from geojax.track.summary import check_accounting, load_run
from geojax.train import engine
from geojax.train.agree import FAILED, NO_MEMORY
from geojax.train.checkpoint import Checkpoints
from geojax.train.program import Program, Task
from geojax.train.programs import Programs

pytestmark = pytest.mark.usefixtures("cache")
QUIET = Console(quiet=True)
STEP = BATCH * SEQ_LEN
# Over dp, tp and pp, schedules and shardings; all of the same batch.
TEXTS = (
    "dp8-tp1-pp1-mb1-gb8-zero",
    "dp2-tp2-pp2x2-mb1-gb8",
    "dp1-tp2-pp4-mb2-gb8",
    "dp4-tp1-pp2-mb1-gb8-fsdp",
)
BEGINS = tuple(STEP * step for step in (0, 4, 12, 20))


def legs(*pairs):
    return tuple(ChainLeg(tokens, text) for tokens, text in pairs)


@pytest.fixture
def seen(monkeypatch):
    """Numbers of the sequences that steps were run on, in order."""
    found, run = [], Program.run

    def watch(self, state, chunk, count, *rest, **options):
        found.extend(np.asarray(chunk.samples)[:count].reshape(-1).tolist())
        return run(self, state, chunk, count, *rest, **options)

    monkeypatch.setattr(Program, "run", watch)
    return found


@pytest.fixture
def progress(monkeypatch):
    """(first sequence, share of the run that is over by the schedule) of each step."""
    found, run = [], Program.run

    def watch(self, state, chunk, count, begin, stride, done, *rest, **options):
        firsts = [int(step.min()) for step in np.asarray(chunk.samples)[:count]]
        found.extend((n, begin + stride * (done + i)) for i, n in enumerate(firsts))
        return run(self, state, chunk, count, begin, stride, done, *rest, **options)

    monkeypatch.setattr(Program, "run", watch)
    return found


@pytest.fixture
def chained(config):
    """Four strategies of one batch, one after another."""
    return replace(config, strategy="", chain=legs(*zip(BEGINS, TEXTS, strict=True)))


def cona_run(text):
    """CONA on a modelled cluster, whose switches cost little beside so short a run."""
    base = tiny_run(text)
    train = replace(base.train, total_tokens=1000 * SEQ_LEN, micro_batch=4, round_steps=10)
    return replace(
        base,
        strategy="",
        train=train,
        cona=ConaConfig(global_batches=(4, 8, 16, 32), dwell_rounds=1, trial_share=0.05),
        scaling=ScalingConfig(base_batch=8, rule="sqrt", cap=True),
        noise=NoiseConfig(window_samples=100, first_steps=4),
        clock=ClockConfig(
            kind="modelled", model="gpt-3-1.3b", gpu="a100-80gb", seq_len=1024, switch_seconds=1e-3
        ),
        checkpoint=CheckpointConfig(every_rounds=3),
        eval=replace(base.eval, every_tokens=0),
    )


@pytest.fixture
def cona(text):
    return cona_run(text)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """Such a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEOJAX_CACHE", str(text.parent / "cache"))
        assert runs.start(cona_run(text), folder, QUIET)
    return folder


def same_end(a, b):
    """Evaluations and the last state."""
    losses = [[r["loss"] for r in records(folder, "eval")] for folder in (a, b)]
    assert losses[0] == losses[1]
    states = []
    for folder in (a, b):
        with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
            states.append(checkpoints.restore(None)[0])
    jax.tree.map(np.testing.assert_array_equal, *states)


def decisions(folder):
    return [(r["round"], r["decision"]) for r in records(folder, "decision")]


@pytest.mark.full
def test_a_chain_over_all_axes_is_the_run_that_never_changed(config, chained, tmp_path, seen):
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert runs.start(config, whole, QUIET)
    plain = seen.copy()
    seen.clear()
    assert runs.start(chained, moved, QUIET)
    assert seen == plain == list(range(24 * BATCH))
    ours, theirs = ([r["loss"] for r in records(f, "eval")] for f in (moved, whole))
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)
    run = load_run(moved)
    check_accounting(run)
    assert [s.strategy for s in stays(run)] == list(TEXTS)
    assert [s.begin_tokens for s in stays(run)] == list(BEGINS)
    ours, theirs = ([r["loss"] for r in records(f, "slice")] for f in (moved, whole))
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)


@pytest.mark.full
def test_a_chain_of_batches_sees_every_sequence_once_and_the_rate_follows(
    config, tmp_path, seen, progress
):
    """Up and down, with legs that no round or batch divides; the schedule goes by tokens."""
    texts = ("dp2-tp2-pp1-mb2-gb8", "dp2-tp1-pp2-mb4-gb32", "dp1-tp1-pp4-mb1-gb4")
    begins = (0, 43 * SEQ_LEN, 150 * SEQ_LEN)
    scaling = ScalingConfig(base_batch=8, rule="linear")
    chain = legs(*zip(begins, texts, strict=True))
    config = replace(config, strategy="", chain=chain, scaling=scaling)
    assert runs.start(config, tmp_path / "run", QUIET)
    assert seen == list(range(len(seen)))
    assert len(seen) * SEQ_LEN >= config.train.total_tokens
    samples, shares = map(np.array, zip(*progress, strict=True))
    np.testing.assert_allclose(shares * config.train.total_tokens, samples * SEQ_LEN, rtol=1e-9)
    rounds = records(tmp_path / "run", "round")
    for record in rounds:
        batch = parse_strategy(record["strategy"]).global_batch
        assert record["rate_scale"] == pytest.approx(batch / 8)
    firsts = [next(r for r in rounds if r["strategy"] == text) for text in texts]
    assert [r["strategy"] for r in firsts] == list(texts)
    switches = records(tmp_path / "run", "switch")
    assert [r["tokens"] for r in switches] == [48 * SEQ_LEN, 176 * SEQ_LEN]
    assert firsts[1]["round"] == switches[0]["round"] + 1


@pytest.mark.runs
def test_nothing_waits_for_a_compiler_but_the_start(config, tmp_path, monkeypatch):
    """Steps, probes, evaluations and what another batch needs are compiled beside the rounds."""
    begin, threads = engine.Engine.begin, []

    def compiling(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            threads.append(threading.current_thread().name)

    def beginning(self, *args):
        result = begin(self, *args)
        threads.clear()
        return result

    monkeypatch.setattr(engine.Engine, "begin", beginning)
    chain = legs((0, TEXTS[0]), (4 * STEP, "dp8-tp1-pp1-mb2-gb16"))
    config = replace(
        config,
        strategy="",
        chain=chain,
        train=replace(config.train, total_tokens=12 * STEP, round_steps=2),
        noise=NoiseConfig(first_steps=2, probe_steps=2),
        eval=replace(config.eval, every_tokens=2 * STEP),
        scaling=ScalingConfig(base_batch=8, rule="sqrt"),
    )
    folder = tmp_path / "run"
    jax.monitoring.register_event_duration_secs_listener(compiling)
    try:
        assert runs.start(config, folder, QUIET)
    finally:
        jax.monitoring.unregister_event_duration_listener(compiling)
    assert len(records(folder, "switch")) == 1
    assert len(records(folder, "eval")) == 5
    assert len(threads) >= 2  # steps and evaluation
    assert all(name.startswith("compile") for name in threads)


@pytest.mark.runs
def test_a_run_stopped_before_its_first_step_goes_on_by_another_strategy(
    cona, tmp_path, monkeypatch
):
    first, second = "dp8-tp1-pp1-mb1-gb8-zero", "dp8-tp1-pp1-mb2-gb16-zero"
    config = replace(cona, cona=None, noise=None, strategy=first)
    folder, evaluate = tmp_path / "run", Program.evaluate

    def stop(self, *args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "evaluate", stop)
        assert not runs.start(config, folder, QUIET)
    assert not records(folder, "round")
    assert runs.resume(folder, QUIET, strategy=second)
    run = load_run(folder)
    check_accounting(run)
    assert {r["strategy"] for r in run.rounds} == {second}


@pytest.mark.runs
@pytest.mark.xdist_group("one whole run")
def test_cona_climbs_and_accounts_for_it(whole):
    switches = records(whole, "switch")
    assert len(switches) >= 3
    assert len({parse_strategy(r["to"]).global_batch for r in switches}) >= 2
    run = load_run(whole)
    check_accounting(run)
    assert "all the same" in chain_notes(run)[-1]


@pytest.mark.full
@pytest.mark.xdist_group("one whole run")
def test_cona_killed_while_the_state_moves_takes_the_same_chain(cona, whole, tmp_path):
    """Twice; what was not saved is done again."""
    folder = tmp_path / "killed"
    runs.begin_folder(cona, folder)
    for moves in (1, 2):
        go_on_until_killed_in(folder, moves)
    assert runs.resume(folder, QUIET)
    assert decisions(folder) == decisions(whole)
    same_end(folder, whole)


@pytest.mark.runs
@pytest.mark.xdist_group("one whole run")
def test_cona_stopped_anywhere_takes_the_same_chain(cona, whole, tmp_path, monkeypatch, seen):
    """At the first chunk of a round, at its last, and where the next round has another batch."""
    folder, run, calls = tmp_path / "stopped", Program.run, []

    def stop(self, state, chunk, count, *rest, **options):
        if count:
            calls.append(count)
            if len(calls) % 13 == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return run(self, state, chunk, count, *rest, **options)

    monkeypatch.setattr(Program, "run", stop)
    finished = runs.start(cona, folder, QUIET)
    times = 1
    while not finished:
        finished = runs.resume(folder, QUIET)
        times += 1
    assert times > 2
    assert seen == list(range(len(seen)))
    assert decisions(folder) == decisions(whole)
    check_accounting(load_run(folder))
    same_end(folder, whole)


@pytest.mark.runs
def test_a_stopped_round_ends_where_another_strategy_goes_on(config, tmp_path, monkeypatch, seen):
    folder, run = tmp_path / "run", Program.run

    def stop(self, state, chunk, count, *rest, **options):
        if count:
            os.kill(os.getpid(), signal.SIGTERM)
        return run(self, state, chunk, count, *rest, **options)

    long_rounds = replace(config, train=replace(config.train, round_steps=12))
    with monkeypatch.context() as patch:
        patch.setattr(Program, "run", stop)
        assert not runs.start(long_rounds, folder, QUIET)
    assert not records(folder, "round")
    with pytest.raises(ConfigError, match="there are 8"):
        runs.resume(folder, QUIET, strategy="dp16-tp1-pp1-mb1-gb16")
    assert read_config(folder / "config.json") == long_rounds  # nothing was lost
    assert runs.resume(folder, QUIET, strategy="dp1-tp1-pp1-mb8-gb16")
    assert seen == list(range(len(seen)))
    rounds = records(folder, "round")
    assert [r["step"] for r in rounds][:2] == [8, 16]
    assert [r["strategy"][-4:] for r in rounds] == ["-gb8"] + ["gb16"] * (len(rounds) - 1)
    run = load_run(folder)
    check_accounting(run)
    assert [s.strategy for s in stays(run)] == [config.strategy, "dp1-tp1-pp1-mb8-gb16"]
    report([folder], None, None, None)


@pytest.mark.full
def test_a_cona_run_goes_on_by_one_strategy_and_is_reported(cona, tmp_path, capsys, monkeypatch):
    folder, run, calls = tmp_path / "run", Program.run, []

    def stop(self, state, chunk, count, *rest, **options):
        calls.append(count)
        if len(calls) == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return run(self, state, chunk, count, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "run", stop)
        assert not runs.start(cona, folder, QUIET)
    assert runs.resume(folder, QUIET, strategy="dp8-tp1-pp1-mb2-gb16-zero")
    assert read_config(folder / "config.json").cona is None
    report([folder], tmp_path / "pictures", None, None)
    text = " ".join(capsys.readouterr().out.split())
    assert "1 resume" in text
    assert "all the same" in text
    assert (tmp_path / "pictures" / "chain-strategy.png").exists()


def go_on_until_killed_in(folder, move):
    """A process of its own that a SIGKILL ends where it would move the state, for the move-th
    time."""
    script = f"""
import os, signal, sys
from pathlib import Path
from geojax import runs
from geojax.train.program import Program

moves, move = [], Program.move

def killed(self, *args):
    moves.append(self)
    if len(moves) == {move}:
        os.kill(os.getpid(), signal.SIGKILL)
    return move(self, *args)

Program.move = killed
runs.resume(Path(sys.argv[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, folder], env=os.environ, capture_output=True, timeout=600
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


@pytest.mark.full
def test_sigkill_inside_a_switch_loses_nothing(chained, tmp_path):
    """A real one, in a process of its own."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    checkpoint = CheckpointConfig(every_rounds=1)
    chained = replace(chained, chain=chained.chain[:2], checkpoint=checkpoint)
    assert runs.start(chained, whole, QUIET)
    runs.begin_folder(chained, folder)
    go_on_until_killed_in(folder, 1)
    assert [r["strategy"] for r in records(folder, "round")] == [TEXTS[0]]
    assert runs.resume(folder, QUIET)
    same_end(folder, whole)


@pytest.mark.full
def test_cona_on_devices_goes_over_all_axes_and_waits_for_no_compiler(
    config, tmp_path, seen, monkeypatch
):
    """Measured clock, eight devices; trials of every family are allowed.

    That compiling goes on beside the steps is taken out, or a busy machine would end the run first.
    """
    prefetch = Programs.prefetch

    def at_once(self, strategy):
        future = prefetch(self, strategy)
        future.exception()
        return future

    monkeypatch.setattr(Programs, "prefetch", at_once)
    config = replace(
        config,
        strategy="",
        train=replace(config.train, total_tokens=48 * STEP, round_steps=2),
        cona=ConaConfig(
            global_batches=(8,),
            micro_batches=(1, 2),
            dwell_rounds=1,
            trial_share=0.9,
            timing_error=1.0,
        ),
        noise=NoiseConfig(window_samples=50, first_steps=2, probe_steps=10),
        eval=replace(config.eval, every_tokens=0),
    )
    folder = tmp_path / "run"
    assert runs.start(config, folder, QUIET)
    assert seen == list(range(len(seen)))
    taken = [parse_strategy(r["to"]) for r in records(folder, "switch")]
    assert len(taken) >= 3
    assert all(len({getattr(s, axis) for s in taken}) > 1 for axis in ("dp", "tp", "pp"))
    waiting = {r["round"]: r["inputs"]["options"] for r in records(folder, "decision")}
    for record in records(folder, "switch"):
        ready = {name for name, *_, is_ready in waiting[record["round"]] if is_ready}
        assert record["to"] in ready
    # The loss is that of a run that never changed, whatever the strategy was.
    plain = tmp_path / "plain"
    fixed = replace(config, strategy="dp1-tp1-pp1-mb8-gb8", cona=None, noise=None)
    assert runs.start(fixed, plain, QUIET)
    ours, theirs = ([r["loss"] for r in records(f, "slice")] for f in (folder, plain))
    np.testing.assert_allclose(ours, theirs, rtol=2e-3)
    assert "all the same" in chain_notes(load_run(folder))[-1]


@pytest.mark.full
def test_out_of_memory_costs_no_step(cona, tmp_path, monkeypatch, seen):
    rehearse, calls, alive = Program.rehearse, [], []

    def back(kept):
        assert alive
        assert not [x for x in alive if x() is not None]  # what failed has left the devices
        return bring_back(kept)

    monkeypatch.setattr(engine, "bring_back", back)

    def full(self, state, steps):
        calls.append(self.strategy)
        if len(calls) == 2:  # the first is of the strategy that the run begins with
            alive.extend(map(weakref.ref, jax.tree.leaves(state)))
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte")
        return rehearse(self, state, steps)

    monkeypatch.setattr(Program, "rehearse", full)
    folder = tmp_path / "run"
    assert runs.start(cona, folder, QUIET)
    refused = records(folder, "refused")
    assert refused[0]["why"].startswith("RESOURCE_EXHAUSTED")
    left_out = {r["strategy"] for r in refused}
    assert not left_out & {r["to"] for r in records(folder, "switch")}
    assert seen == list(range(len(seen)))
    assert all(np.isfinite(r["loss"]) for r in records(folder, "slice"))
    check_accounting(load_run(folder))


@pytest.mark.parametrize("strategy", TEXTS)
def test_a_copy_brings_a_state_back_bit_for_bit(config, strategy):
    task = Task(config.model, config.train, SEQ_LEN)
    program = Program(task, parse_strategy(strategy), jax.devices())
    state = program.init(3)
    expected, kept = program.host(state), keep_copy(state)
    jax.tree.map(lambda x: x.delete(), state)
    back = bring_back(kept)
    jax.tree.map(np.testing.assert_array_equal, program.host(back), expected)
    assert jax.tree.map(lambda x: x.sharding, back) == program.state_shardings


def test_memory_that_a_compiler_lacks_is_told_from_other_failures(config, monkeypatch):
    """So that what needs as much is left out too."""
    said = {
        TEXTS[0]: "RESOURCE_EXHAUSTED: 9 GB of 8",
        TEXTS[1]: "INTERNAL: no such instruction",
    }

    def fail(self, strategy):
        raise jax.errors.JaxRuntimeError(said[str(strategy)])

    monkeypatch.setattr(Programs, "_compile", fail)
    task = Task(config.model, config.train, SEQ_LEN)
    found = engine.Engine(task, jax.devices(), 1)
    for text in said:
        assert found.programs.prefetch(parse_strategy(text)).exception(60)
    stands = {str(strategy): (code, why) for strategy, code, why in found.standing()}
    assert stands == {
        TEXTS[0]: (NO_MEMORY, said[TEXTS[0]]),
        TEXTS[1]: (FAILED, said[TEXTS[1]]),
    }
    assert not found.programs.found()


@pytest.mark.full
def test_a_strategy_that_does_not_compile_is_left_out(cona, tmp_path, monkeypatch):
    compile_, broken = Programs._compile, []

    def fail(self, strategy):
        if strategy.global_batch == 16:
            broken.append(strategy)
            raise RuntimeError("the compiler gave up")
        return compile_(self, strategy)

    monkeypatch.setattr(Programs, "_compile", fail)
    folder = tmp_path / "run"
    assert runs.start(cona, folder, QUIET)
    assert broken
    assert {r["why"] for r in records(folder, "refused")} == {"the compiler gave up"}
    batches = {parse_strategy(r["strategy"]).global_batch for r in records(folder, "round")}
    assert 16 not in batches
    assert len(batches) > 1


@pytest.mark.full
def test_a_fixed_chain_that_cannot_run_ends_saved(chained, tmp_path, monkeypatch):
    compile_ = Programs._compile

    def fail(self, strategy):
        if str(strategy) == TEXTS[2]:
            raise RuntimeError("the compiler gave up")
        return compile_(self, strategy)

    monkeypatch.setattr(Programs, "_compile", fail)
    folder = tmp_path / "run"
    with pytest.raises(RunError, match=f"{TEXTS[2]} cannot run here: the compiler gave up"):
        runs.start(chained, folder, QUIET)
    monkeypatch.undo()
    steps = records(folder, "round")[-1]["step"]
    assert runs.resume(folder, QUIET, strategy=TEXTS[0])  # another way from where it stood
    rounds = records(folder, "round")
    assert rounds[-1]["step"] == 24
    assert all(r["strategy"] == TEXTS[0] for r in rounds if r["step"] > steps)


@pytest.mark.parametrize(("before", "after"), [(8, 32), (32, 8)])
def test_what_adam_makes_of_its_second_moment_stays(config, before, after):
    """Its memory is as long in samples at every batch, and so is the weight it divides by."""
    task = Task(config.model, config.train, SEQ_LEN, base_batch=8)
    program = Program(task, parse_strategy(f"dp1-tp1-pp1-mb4-gb{after}"), jax.devices()[:1])
    assert task.optimizer(32).b2 == pytest.approx(0.95**4)
    fresh = program.init(0)
    adam = fresh.opt_state._replace(
        count=np.int32(7), nu=jax.tree.map(lambda x: np.full(x.shape, 0.3, x.dtype), fresh.params)
    )
    state = program.put_state(replace(fresh, opt_state=adam))
    carried = program.carry_over(state, before)
    seen = [1 - task.optimizer(batch).b2 ** 7 for batch in (before, after)]
    assert carried.opt_state.count == 7
    for leaf in jax.tree.leaves(carried.opt_state.nu):
        np.testing.assert_allclose(leaf, 0.3 * seen[1] / seen[0], rtol=1e-6)
    again = program.carry_over(program.put_state(fresh), before)  # nothing seen yet
    jax.tree.map(np.testing.assert_array_equal, again.opt_state, fresh.opt_state)


def test_chain_files_and_strategies_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "chain.json"
    for text, message in (
        ("[]", "has no leg"),
        ('[{"tokens": 0}]', "strategy"),
        ("{", "a chain is a list like"),
        ('[{"tokens": 0, "strategy": "dp2"}]', "'dp2' is no strategy"),
        ('[{"tokens": 9, "strategy": "dp1-tp1-pp1-mb1-gb8"}]', "the first must begin at 0"),
    ):
        path.write_text(text)
        assert main(["train", "gpt-tiny", "--chain", str(path)]) == 2
        assert message in capsys.readouterr().err
    assert main(["train", "gpt-tiny", "--chain", str(tmp_path / "none.json")]) == 2
    assert "cannot read the chain" in capsys.readouterr().err
    assert main(["train", "gpt-tiny", "--chain"]) == 2
    assert "--chain wants a value" in capsys.readouterr().err
    assert main(["train", "cona-gpt-tiny", "--strategy=dp3-tp1-pp1-mb1-gb3"]) == 2
    assert "there are 8" in capsys.readouterr().err
