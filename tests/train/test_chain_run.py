# SPDX-License-Identifier: Apache-2.0
"""Runs whose strategy changes: nothing of the training is lost or seen twice, whatever happens."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console
from tiny_run import BATCH, SEQ_LEN, records

from geojax import runs
from geojax.cli import main
from geojax.config import (
    ChainLeg,
    CheckpointConfig,
    ClockConfig,
    ConaConfig,
    NoiseConfig,
    RunError,
    ScalingConfig,
)
from geojax.meshes.reshard import bring_back, keep_copy
from geojax.meshes.strategy import parse_strategy
from geojax.track.chain import chain_notes, stays
from geojax.track.summary import check_accounting, load_run
from geojax.train.checkpoint import Checkpoints
from geojax.train.program import Program, Programs, Task

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

    def watch(self, state, chunk, count, *rest):
        found.extend(np.asarray(chunk.samples)[:count].reshape(-1).tolist())
        return run(self, state, chunk, count, *rest)

    monkeypatch.setattr(Program, "run", watch)
    return found


@pytest.fixture
def chained(config):
    """Four strategies of one batch, one after another."""
    return replace(config, strategy="", chain=legs(*zip(BEGINS, TEXTS, strict=True)))


@pytest.fixture
def cona(config):
    """CONA on a modelled cluster, whose switches cost little beside so short a run."""
    return replace(
        config,
        strategy="",
        train=replace(config.train, total_tokens=1200 * SEQ_LEN, micro_batch=4),
        cona=ConaConfig(global_batches=(4, 8, 16, 32), dwell_rounds=1, trial_share=0.05),
        scaling=ScalingConfig(base_batch=8, rule="sqrt", cap=True),
        noise=NoiseConfig(window_samples=100, first_steps=4),
        clock=ClockConfig(
            kind="modelled", model="gpt-3-1.3b", gpu="a100-80gb", seq_len=1024, switch_seconds=1e-3
        ),
        checkpoint=replace(config.checkpoint, every_rounds=3),
    )


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


def test_a_chain_of_batches_sees_every_sequence_once_and_the_rate_follows(config, tmp_path, seen):
    """Up and down, with legs that no round or batch divides."""
    texts = ("dp2-tp2-pp1-mb2-gb8", "dp2-tp1-pp2-mb4-gb32", "dp1-tp1-pp4-mb1-gb4")
    begins = (0, 43 * SEQ_LEN, 150 * SEQ_LEN)
    scaling = ScalingConfig(base_batch=8, rule="linear")
    chain = legs(*zip(begins, texts, strict=True))
    config = replace(config, strategy="", chain=chain, scaling=scaling)
    assert runs.start(config, tmp_path / "run", QUIET)
    assert seen == list(range(len(seen)))
    assert len(seen) * SEQ_LEN >= config.train.total_tokens
    rounds = records(tmp_path / "run", "round")
    for record in rounds:
        batch = parse_strategy(record["strategy"]).global_batch
        assert record["rate_scale"] == pytest.approx(batch / 8)
    firsts = [next(r for r in rounds if r["strategy"] == text) for text in texts]
    assert [r["strategy"] for r in firsts] == list(texts)
    switches = records(tmp_path / "run", "switch")
    assert [r["tokens"] for r in switches] == [48 * SEQ_LEN, 176 * SEQ_LEN]
    assert firsts[1]["round"] == switches[0]["round"] + 1


def test_cona_takes_the_same_chain_when_it_is_stopped_or_killed(cona, tmp_path, monkeypatch, seen):
    whole = tmp_path / "whole"
    assert runs.start(cona, whole, QUIET)
    assert seen == list(range(len(seen)))
    switches = records(whole, "switch")
    assert len(switches) >= 3
    assert len({parse_strategy(r["to"]).global_batch for r in switches}) >= 2
    run = load_run(whole)
    check_accounting(run)
    assert "all the same" in chain_notes(run)[-1]

    # It dies twice while the state moves; what was not saved is done again.
    folder, move, moves = tmp_path / "killed", Program.move, []

    def die(self, *args):
        moves.append(self)
        if len(moves) in (2, 5):
            raise SystemExit("killed")
        return move(self, *args)

    monkeypatch.setattr(Program, "move", die)
    with pytest.raises(SystemExit, match="killed"):
        runs.start(cona, folder, QUIET)
    with pytest.raises(SystemExit, match="killed"):
        runs.resume(folder, QUIET)
    assert runs.resume(folder, QUIET)
    assert decisions(folder) == decisions(whole)
    same_end(folder, whole)


def test_sigkill_inside_a_switch_loses_nothing(chained, tmp_path):
    """A real one, in a process of its own."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    checkpoint = CheckpointConfig(every_rounds=1)
    chained = replace(chained, chain=chained.chain[:2], checkpoint=checkpoint)
    assert runs.start(chained, whole, QUIET)
    folder.mkdir()
    runs.save_config(chained, folder / "config.json")
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from geojax import runs\n"
        "from geojax.train.program import Program\n"
        "Program.move = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "runs.resume(Path(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, folder], env=os.environ, capture_output=True, timeout=300
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert [r["strategy"] for r in records(folder, "round")] == [TEXTS[0]]
    assert runs.resume(folder, QUIET)
    same_end(folder, whole)


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
        train=replace(config.train, total_tokens=100 * STEP, round_steps=2),
        cona=ConaConfig(
            global_batches=(8,),
            micro_batches=(1, 2, 4),
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


def test_out_of_memory_costs_no_step(cona, tmp_path, monkeypatch, seen):
    rehearse, calls = Program.rehearse, []

    def full(self, state, steps):
        calls.append(self.strategy)
        if len(calls) == 2:  # the first is of the strategy that the run begins with
            jax.tree.map(lambda x: x.delete(), state)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte")
        return rehearse(self, state, steps)

    monkeypatch.setattr(Program, "rehearse", full)
    folder = tmp_path / "run"
    assert runs.start(cona, folder, QUIET)
    refused = records(folder, "refused")
    assert refused[0]["why"].startswith("out of memory")
    left_out = {r["strategy"] for r in refused}
    assert not left_out & {r["to"] for r in records(folder, "switch")}
    assert seen == list(range(len(seen)))
    assert all(np.isfinite(r["loss"]) for r in records(folder, "slice"))


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


def test_adams_count_goes_by_samples(config):
    task = Task(config.model, config.train, SEQ_LEN, base_batch=8)
    small, large = (
        Program(task, parse_strategy(f"dp1-tp1-pp1-mb4-gb{batch}"), jax.devices()[:1])
        for batch in (8, 32)
    )
    assert task.optimizer(32).b2 == pytest.approx(0.95**4)
    state = large.init(0)
    counted = replace(state, opt_state=state.opt_state._replace(count=np.int32(7)))
    assert small.recount(large.put_state(counted), large).opt_state.count == 28
    assert large.recount(small.put_state(counted), small).opt_state.count == 7


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
