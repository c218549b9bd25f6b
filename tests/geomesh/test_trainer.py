# SPDX-License-Identifier: Apache-2.0
"""Whole runs of a tiny model: what slices share, what each sees, and what survives a stop."""

import copy
import io
import json
from collections import defaultdict
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from made_text import words_and_cache
from rich.console import Console

import geojax.geomesh.trainer as trainer_module
from geojax import runs
from geojax.config import (
    AnomalyConfig,
    BalanceConfig,
    CheckpointConfig,
    ClockConfig,
    ConfigError,
    DataConfig,
    EvalConfig,
    ExchangeConfig,
    LostRunError,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
    SliceConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
)
from geojax.configs import METHODS
from geojax.data import TrainSequences, ValidSequences, prepare
from geojax.geomesh import parts
from geojax.geomesh.outer import DesyncError
from geojax.geomesh.worker import Worker
from geojax.meshes.gradient import LossSums
from geojax.models.config import TransformerConfig
from geojax.models.transformer import init_params, make_apply
from geojax.track.metrics import read_records
from geojax.train import initial
from geojax.train.step import init_state, make_loop, make_train_step

SEQ_LEN, BATCH = 16, 4
VOCAB = 257  # bytes and end-of-text
MODEL = TransformerConfig(vocab_size=VOCAB, dim=16, layers=1, heads=2, kv_heads=2, mlp_dim=24)
REGIONS = ("eastus", "westus2", "westeurope", "koreacentral")
SPEEDS = (2.5, 1.5, 1.0)
CONSTANT = ScheduleConfig(decay="constant", warmup_fraction=0.0, final_fraction=1.0)
PLAIN_OUTER = OuterConfig(OptimizerConfig(name="sgd", learning_rate=1.0))
MOMENTUM_OUTER = OuterConfig(
    OptimizerConfig(name="sgd", learning_rate=0.7, momentum=0.6, nesterov=True)
)
EXACT = ExchangeConfig(codec="fp32", error_feedback=False)
WALL = {"wall_seconds"}
"""The one field of a modelled run that differs from run to run."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text file of made-up words, and a cache of its own."""
    with words_and_cache(tmp_path_factory.mktemp("text"), 12, lines=40) as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def _equal_runs_compile_once():
    """Makers of compiled programs are pure: runs of one config may share what they made."""
    exchange = cache(trainer_module.MeshExchange)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "Program", cache(trainer_module.Program))
        patch.setattr(initial, "init_params", cache(initial.init_params))
        patch.setattr(trainer_module, "MeshExchange", lambda leaders: exchange(tuple(leaders)))
        yield


@pytest.fixture
def base(text) -> RunConfig:
    """Three slices of unequal speed, GeoMesh, five rounds; every part of a round is modelled."""
    slices = tuple(
        SliceConfig(region, region=region, speed=speed)
        for region, speed in zip(REGIONS, SPEEDS, strict=False)
    )
    return RunConfig(
        name="tiny",
        model=MODEL,
        data=DataConfig(
            source=SourceConfig(kind="files", paths=(str(text),)),
            tokenizer=TokenizerConfig(vocab_size=VOCAB),
            seq_len=SEQ_LEN,
            valid_fraction=0.2,
        ),
        train=TrainConfig(
            total_tokens=5 * (10 + 6 + 4) * BATCH * SEQ_LEN,
            optimizer=OptimizerConfig(name="lion", learning_rate=1e-3),
            compute_dtype="float32",
        ),
        slices=slices,
        balance=BalanceConfig(inner_steps=4, batch_sizes=(BATCH,)),
        clock=ClockConfig(
            kind="modelled", wan="geomesh-azure", base_step_seconds=1.0, base_batch=BATCH
        ),
        eval=EvalConfig(every_tokens=2 * 20 * BATCH * SEQ_LEN, sequences=16, batch=8),
        checkpoint=CheckpointConfig(every_rounds=2),
    )


def see_one_device(patch: pytest.MonkeyPatch) -> None:
    """Slices find one device, which all share."""
    found = jax.local_devices()[:1]
    patch.setattr(jax, "local_devices", lambda backend=None: found)


@pytest.fixture
def one_device(monkeypatch):
    see_one_device(monkeypatch)


def quiet() -> Console:
    return Console(file=io.StringIO())


def start(config: RunConfig, folder) -> bool:
    return runs.start(config, folder, quiet())


def resume(folder) -> bool:
    return runs.resume(folder, quiet())


def records(folder, kind: str | None = None) -> list[dict]:
    """Records without what two equal runs may differ in."""
    found = read_records(folder / "metrics.jsonl")
    return [
        {k: v for k, v in r.items() if k not in WALL}
        for r in found
        if kind is None or r["kind"] == kind
    ]


def replace_loop(worker: Worker, make) -> None:
    """This worker's compiled loop becomes `make(loop)`; runs that share its program keep theirs."""
    worker.program = copy.copy(worker.program)
    worker.program.run = make(worker.program.run)


def stop_in(folder_round: int, chunks: int):
    """A hook that sets the stop event in that round, when so many chunks have run in it."""

    def hook(trainer):
        seen = []

        def counting(loop):
            def counted(*args):
                if trainer.position.round == folder_round - 1:
                    seen.append(1)
                    if len(seen) == chunks:
                        trainer._stop.set()
                return loop(*args)

            return counted

        for worker in trainer.workers:
            replace_loop(worker, counting)

    return hook


def model_loss(params, batch):
    """Sum of the losses of sequences [..., T] by the definition, and the tokens that bear one."""
    rows = jax.tree.map(lambda x: x.reshape(-1, SEQ_LEN), batch._replace(samples=None))
    logits = make_apply(MODEL)(params, rows.tokens, rows.positions, rows.segments)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, rows.targets)
    return jnp.sum(nats * rows.weights), jnp.sum(rows.weights)


def plain_step(train: TrainConfig):
    """A step of the model on one device, without any program."""

    def gradient(params, batch, step):
        (nats, tokens), grads = jax.value_and_grad(model_loss, has_aux=True)(params, batch)
        return LossSums(nats, tokens), grads

    return make_train_step(gradient, train)


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def assert_close(got, wanted, **tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.parametrize("schedule", ["gather", "two_phase"])
def test_shared_parameters_learn_and_are_equal_on_all_slices(base, trainers, tmp_path, schedule):
    config = replace(base, exchange=ExchangeConfig(schedule=schedule), outer=MOMENTUM_OUTER)
    assert start(config, tmp_path / "run")
    (trainer,) = trainers.made
    copies = [bits((w.outer.params, w.outer.opt_state)) for w in trainer.workers]
    assert len(copies) == 3
    assert copies[0] == copies[1] == copies[2]
    before = bits(init_params(config.model, config.seed))
    after = bits(trainer.workers[0].outer.params)
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert len({id(leaf) for w in trainer.workers for leaf in jax.tree.leaves(w.outer.params)}) == (
        3 * len(before)
    )
    losses = [r["loss"] for r in records(tmp_path / "run", "eval")]
    assert losses[-1] < losses[0]
    hashes = [r["hash"] for r in records(tmp_path / "run", "round")]
    assert len(set(hashes)) == len(hashes) == 5


def test_the_parts_of_every_slice_sum_to_the_round(base, one_device, tmp_path):
    for clock in (base.clock, ClockConfig()):
        measured = clock.kind == "measured"
        slices = tuple(SliceConfig(s.name) for s in base.slices) if measured else base.slices
        folder = tmp_path / clock.kind
        config = replace(base, clock=clock, slices=slices)
        # Few tokens: measured plans have any number of steps.
        start(replace(config, train=replace(base.train, total_tokens=2000)), folder)
        seconds = {r["round"]: r["round_seconds"] for r in records(folder, "round")}
        for r in records(folder, "slice"):
            parts = [r[f"{part}_seconds"] for part in ("compute", "straggler", "wan", "outer")]
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(seconds[r["round"]])


def test_no_sample_is_missed_or_repeated_by_unequal_slices(base, trainers, tmp_path, monkeypatch):
    # Counted where sequences are read, over three slices of unlike (b, H), a stop and a resume.
    monkeypatch.setattr(parts, "CHUNK_STEPS", 2)
    taken = defaultdict(list)
    chunks = TrainSequences.chunks

    def spying(self, first, steps, batch, chunk_steps, **more):
        for i, (chunk, real) in enumerate(chunks(self, first, steps, batch, chunk_steps, **more)):
            begin = first + i * chunk_steps * batch
            taken[batch].append(range(begin, begin + real * batch))
            yield chunk, real

    monkeypatch.setattr(TrainSequences, "chunks", spying)
    balance = BalanceConfig(inner_steps=3, batch_sizes=(2, 4, 6))
    config = replace(base, balance=balance)
    # Dearer small batches make slices choose different ones.
    option = trainer_module.modelled_profiles

    def profiles(config):
        found = option(config)
        kept = [{2}, {4}, {6}]
        return [
            replace(p, options=tuple(o for o in p.options if o.batch in batches))
            for p, batches in zip(found, kept, strict=True)
        ]

    monkeypatch.setattr(trainer_module, "modelled_profiles", profiles)
    trainers.hooks = [stop_in(2, 3)]
    assert not start(config, tmp_path / "run")
    trainers.hooks = []
    done = sum(w.progress.done * w.work.batch for w in trainers.made[0].workers)
    assert 0 < done < trainers.made[0].plan.sequences
    assert resume(tmp_path / "run")
    work = trainers.made[1].plan.work
    assert {w.batch for w in work} == {2, 4, 6}
    assert len({w.inner_steps for w in work}) > 1
    samples = sorted(n for rows in taken.values() for r in rows for n in r)
    last = records(tmp_path / "run", "round")[-1]
    assert samples == list(range(last["tokens"] // SEQ_LEN))
    # And these global samples are distinct sequences of the text, epoch by epoch.
    data = config.data
    corpus = prepare(data, VOCAB)
    sequences = TrainSequences(corpus, SEQ_LEN, data.seed)
    ids = sequences.ids(0, len(samples))
    assert len(set(ids)) == len(ids)


def test_every_slice_follows_one_schedule_in_tokens(base, trainers, tmp_path, monkeypatch):
    # The rate depends on the tokens of all slices: with unlike H, all end a round at one progress.
    spans = defaultdict(list)
    run = Worker.run

    def spying(self, sequences, share, progress, stopped):
        spans[progress].append(self.work.inner_steps)
        return run(self, sequences, share, progress, stopped)

    monkeypatch.setattr(Worker, "run", spying)
    start(base, tmp_path / "run")
    ends = list(spans)
    assert ends == [pytest.approx((i / 5, (i + 1) / 5)) for i in range(5)]
    assert all(sorted(steps) == [4, 6, 10] for steps in spans.values())


def one_slice(base: RunConfig, **changes) -> RunConfig:
    return replace(base, slices=base.slices[-1:], **changes)


def test_one_slice_without_outer_momentum_is_plain_training(base, trainers, tmp_path):
    adamw = OptimizerConfig(name="adamw", learning_rate=3e-3, weight_decay=0.1)
    train = replace(base.train, optimizer=adamw, total_tokens=4 * 4 * BATCH * SEQ_LEN)
    config = one_slice(base, train=train, exchange=EXACT, outer=PLAIN_OUTER)
    start(config, tmp_path / "run")
    (trainer,) = trainers.made
    corpus = prepare(config.data, VOCAB)
    loop = jax.jit(make_loop(plain_step(train)))
    chunk = TrainSequences(corpus, SEQ_LEN, config.data.seed).chunk(0, 16, BATCH)
    state, _ = loop(init_state(init_params(MODEL, config.seed), train), chunk, 16, 0.0, 1 / 16, 0)
    # Each of the 4 rounds rounds shared - (shared - local); AdamW may stretch that a little.
    got = trainer.workers[0].outer.params
    assert_close(got, state.params, rtol=0, atol=2e-5)
    moved = jax.tree.map(np.subtract, state.params, init_params(MODEL, config.seed))
    assert min(np.abs(x).max() for x in jax.tree.leaves(moved)) > 1e-2


def test_a_step_a_round_is_data_parallel_adamw(base, trainers, tmp_path):
    steps, slices = 10, 3
    config = replace(
        METHODS["data-parallel"](base),
        train=replace(
            METHODS["data-parallel"](base).train,
            total_tokens=steps * slices * BATCH * SEQ_LEN,
        ),
    )
    start(config, tmp_path / "run")
    (trainer,) = trainers.made
    corpus = prepare(config.data, VOCAB)
    sequences = TrainSequences(corpus, SEQ_LEN, config.data.seed)
    outer = config.outer
    train = replace(
        config.train, optimizer=outer.optimizer, schedule=outer.schedule, clip_norm=None
    )
    step = jax.jit(plain_step(train))
    state = init_state(init_params(MODEL, config.seed), train)
    for i in range(steps):
        batch = sequences.chunk(i * slices * BATCH, 1, slices * BATCH)
        state, _ = step(state, jax.tree.map(lambda x: x[0], batch), i / steps)
    # shared - (shared - gradient) keeps a gradient to 6e-8 where parameters are near 1, and AdamW
    # divides by its size: gradients of 1e-5 come out right to 1 %, of a movement of some 2e-2.
    assert_close(trainer.workers[0].outer.params, state.params, rtol=0, atol=3e-4)
    moved = jax.tree.map(np.subtract, state.params, init_params(MODEL, config.seed))
    assert min(np.abs(x).max() for x in jax.tree.leaves(moved)) > 5e-3


@pytest.mark.full
def test_slices_on_devices_of_their_own_compute_the_same(base, tmp_path, monkeypatch):
    adamw = OptimizerConfig(name="adamw", learning_rate=3e-3)
    config = replace(
        base,
        model=replace(MODEL, layers=2),
        exchange=EXACT,
        train=replace(base.train, optimizer=adamw, total_tokens=3000),
    )
    layouts = (
        {"devices": 2, "pp": 2, "remat": "full"},
        {"devices": 2, "sharding": "all"},
        {"devices": 4, "tp": 2, "sharding": "optimizer"},
    )
    apart = replace(
        config, slices=tuple(replace(s, **x) for s, x in zip(config.slices, layouts, strict=True))
    )
    start(apart, tmp_path / "apart")
    see_one_device(monkeypatch)
    start(config, tmp_path / "shared")  # more slices than devices
    for kind, fields in (("slice", ("loss", "grad_norm", "tokens")), ("eval", ("loss",))):
        rows = zip(
            records(tmp_path / "apart", kind), records(tmp_path / "shared", kind), strict=True
        )
        for a, b in rows:
            for field in fields:
                # Sums over a batch in another order; float32, some 20 steps.
                assert a[field] == pytest.approx(b[field], rel=1e-4)


def poison_gradient(rounds: range, victims: set[int]):
    """A hook: in these rounds, the pseudo-gradients of these slices hold a NaN."""

    def hook(trainer):
        for worker in trainer.workers:
            if worker.index in victims:
                clean = worker.pseudo_gradient

                def dirty(clean=clean):
                    leaves = clean()
                    if trainer.position.round in rounds:
                        leaves[0].reshape(-1)[5] = np.nan
                    return leaves

                worker.pseudo_gradient = dirty

    return hook


def poison_steps(rounds: range, victims: set[int]):
    """A hook: in these rounds, the losses of these slices are NaN."""

    def hook(trainer):
        for worker in trainer.workers:
            if worker.index in victims:
                replace_loop(worker, dirtying(trainer))

    def dirtying(trainer):
        def make(loop):
            def dirty(state, chunk, *rest):
                if trainer.position.round + 1 in rounds:
                    chunk = chunk._replace(weights=chunk.weights * np.nan)
                return loop(state, chunk, *rest)

            return dirty

        return make

    return hook


@pytest.mark.parametrize("poison", [poison_gradient, poison_steps])
@pytest.mark.parametrize("schedule", ["gather", "two_phase"])
def test_a_slice_with_nan_is_left_out_and_the_run_goes_on(
    base, trainers, tmp_path, schedule, poison
):
    kept = {}

    def watch_feedback(trainer):
        end_round = trainer._end_round

        def watched(cursor, console):
            before = [bits(w.feedback.own) for w in trainer.workers]
            end_round(cursor, console)
            after = [bits(w.feedback.own) for w in trainer.workers]
            kept[trainer.position.round] = [a == b for a, b in zip(before, after, strict=True)]

        trainer._end_round = watched

    trainers.hooks = [poison(range(2, 3), {1}), watch_feedback]
    config = replace(base, exchange=ExchangeConfig(schedule=schedule))
    assert start(config, tmp_path / "run")
    rounds = records(tmp_path / "run", "round")
    name = base.slices[1].name
    assert [r["left_out"] for r in rounds] == [[], [name], [], [], []]
    merged = {(r["round"], r["slice"]): r["merged"] for r in records(tmp_path / "run", "slice")}
    assert [key for key, value in merged.items() if not value] == [(2, name)]
    # Only what was left out keeps its error feedback as it was.
    assert {key: value.count(True) for key, value in kept.items()} == {1: 0, 2: 1, 3: 0, 4: 0, 5: 0}
    assert kept[2][1]
    losses = [r["loss"] for r in records(tmp_path / "run", "eval")]
    assert losses[-1] < losses[0]
    skipped = [r["skipped"] for r in records(tmp_path / "run", "slice") if r["skipped"]]
    assert skipped == ([] if poison is poison_gradient else [6])


@pytest.mark.parametrize("schedule", ["gather", "two_phase"])
def test_rounds_that_nobody_joins_end_the_run(base, trainers, one_device, tmp_path, schedule):
    anomalies = AnomalyConfig(max_lost_rounds=2)
    config = replace(
        base,
        exchange=ExchangeConfig(schedule=schedule),
        train=replace(base.train, anomalies=anomalies),
    )
    trainers.hooks = [poison_gradient(range(2, 9), {0, 1, 2})]
    with pytest.raises(LostRunError, match="last 2 rounds"):
        start(config, tmp_path / "run")
    rounds = records(tmp_path / "run", "round")
    assert [len(r["left_out"]) for r in rounds] == [0, 3, 3]
    # A round that nobody joins changes nothing that is shared.
    assert rounds[0]["hash"] == rounds[1]["hash"] == rounds[2]["hash"]


def test_one_lost_round_is_survived(base, trainers, one_device, tmp_path):
    anomalies = AnomalyConfig(max_lost_rounds=2)
    config = replace(base, train=replace(base.train, anomalies=anomalies))
    trainers.hooks = [poison_gradient(range(2, 9, 2), {0, 1, 2})]
    assert start(config, tmp_path / "run")
    assert [len(r["left_out"]) for r in records(tmp_path / "run", "round")] == [0, 3, 0, 3, 0]


@pytest.mark.parametrize("part", ["params", "opt_state"])
def test_one_flipped_bit_in_one_copy_is_found_and_named(base, trainers, tmp_path, part):
    def flip(trainer):
        check = trainer._check_copies

        def flipping():
            if trainer.position.round == 2:
                outer = trainer.workers[2].outer
                leaves, structure = jax.tree.flatten(getattr(outer, part))
                leaves[0] = np.array(leaves[0])
                leaves[0].reshape(-1).view(np.uint32)[3] ^= 1
                setattr(outer, part, jax.tree.unflatten(structure, leaves))
            return check()

        trainer._check_copies = flipping

    trainers.hooks = [flip]
    with pytest.raises(DesyncError, match=f"round 2: .* of {base.slices[2].name} differ"):
        start(replace(base, outer=MOMENTUM_OUTER), tmp_path / "run")
    assert len(records(tmp_path / "run", "round")) == 1


@pytest.mark.parametrize("schedule", ["gather", "two_phase"])
def test_a_stopped_run_goes_on_as_if_it_had_not(base, trainers, tmp_path, monkeypatch, schedule):
    # In the middle of round 2, then of round 4: Lion's and the outer momentum, both error
    # feedbacks, the data position and the clock must all come back, or some number differs.
    monkeypatch.setattr(parts, "CHUNK_STEPS", 2)
    config = replace(base, exchange=ExchangeConfig(schedule=schedule), outer=MOMENTUM_OUTER)
    assert start(config, tmp_path / "whole")
    trainers.hooks = [stop_in(2, 3)]
    assert not start(config, tmp_path / "stopped")
    stopped = trainers.made[-1]
    assert 0 < sum(w.progress.done for w in stopped.workers) < 20
    trainers.hooks = [stop_in(4, 1)]
    assert not resume(tmp_path / "stopped")
    trainers.hooks = []
    assert resume(tmp_path / "stopped")
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")
    whole, *_, last = trainers.made
    for a, b in zip(whole.workers, last.workers, strict=True):
        assert bits((a.outer.params, a.outer.opt_state)) == bits(
            (b.outer.params, b.outer.opt_state)
        )
        assert bits((a.feedback.own, a.feedback.shard)) == bits((b.feedback.own, b.feedback.shard))
        assert bits(a.state) == bits(b.state)
        assert any(x.any() for x in a.feedback.own)
        assert a.feedback.shard.any() == (schedule == "two_phase")


def test_a_stop_at_a_round_border_loses_nothing(base, trainers, tmp_path):
    # After a restart outer momentum and error feedback are those of before, leaf for leaf.
    config = replace(base, exchange=ExchangeConfig(schedule="two_phase"), outer=MOMENTUM_OUTER)

    def stop_after_round_3(trainer):
        end_round = trainer._end_round

        def ending(cursor, console):
            end_round(cursor, console)
            if trainer.position.round == 3:
                trainer._stop.set()

        trainer._end_round = ending

    restored = []
    start(config, tmp_path / "whole")
    trainers.hooks = [stop_after_round_3]
    assert not start(config, tmp_path / "stopped")

    def keep(trainer):
        restored.extend(
            bits((w.outer.opt_state, w.feedback.own, w.feedback.shard, w.state.opt_state))
            for w in trainer.workers
        )

    trainers.hooks = [keep]
    assert resume(tmp_path / "stopped")
    saved = [
        bits((w.outer.opt_state, w.feedback.own, w.feedback.shard, w.state.opt_state))
        for w in trainers.made[1].workers
    ]
    assert restored == saved
    assert any(any(leaf) for leaf in saved[0])
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")


def test_a_stop_before_the_first_step_loses_nothing(base, trainers, tmp_path):
    start(base, tmp_path / "whole")
    trainers.hooks = [lambda trainer: trainer._stop.set()]
    assert not start(base, tmp_path / "stopped")
    trainers.hooks = []
    assert resume(tmp_path / "stopped")
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")


def test_a_run_that_died_before_its_first_checkpoint_is_recorded_once(base, trainers, tmp_path):
    start(base, tmp_path / "whole")

    def die(trainer):
        def dying(cursor, console):
            raise KeyboardInterrupt

        trainer._end_round = dying

    trainers.hooks = [die]
    with pytest.raises(KeyboardInterrupt):
        start(base, tmp_path / "died")
    trainers.hooks = []
    assert resume(tmp_path / "died")
    assert records(tmp_path / "died") == records(tmp_path / "whole")


def test_a_finished_run_has_nothing_left_to_do(base, tmp_path):
    start(base, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert resume(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(("tied", "scales"), [(False, "tensor"), (False, "row"), (True, "row")])
def test_rows_of_unused_vocabulary_never_move(base, trainers, one_device, tmp_path, tied, scales):
    unused = 15
    model = replace(MODEL, vocab_size=VOCAB + unused, tied=tied)
    config = replace(base, model=model, exchange=ExchangeConfig(scales=scales))
    start(config, tmp_path / "run")
    (trainer,) = trainers.made
    before, after = init_params(model, config.seed), trainer.workers[0].outer.params
    moved = (np.asarray(before["embed"]) != after["embed"]).any(axis=1)
    assert moved.any()
    # A tied head gives every row a gradient: the model learns that these tokens do not come.
    assert moved[VOCAB : VOCAB + unused].all() if tied else not moved[VOCAB:].any()
    # Rows that only fill up the table are never predicted: they are zeros, and stay so.
    for name in ("embed",) if tied else ("embed", "head"):
        assert after[name].shape[0] > VOCAB + unused
        assert not after[name][VOCAB + unused :].any()


def test_tied_weights_are_exchanged_once(base, trainers, one_device, tmp_path):
    model = replace(MODEL, tied=True)
    one_round = replace(base.train, total_tokens=1)
    start(replace(base, model=model, exchange=EXACT, train=one_round), tmp_path / "run")
    (trainer,) = trainers.made
    leaves = trainer.workers[0].pseudo_gradient()
    padding = (model.padded_vocab - model.vocab_size) * model.dim
    assert sum(x.size for x in leaves) == model.num_params + padding
    assert "head" not in trainer.workers[0].outer.params
    assert trainer.traffic.params == model.num_params
    sent = 4 * (model.num_params + padding)
    assert trainer.traffic.payload_bytes == pytest.approx(sent, abs=100)


@pytest.mark.parametrize("change", [{"mlp_dim": 32}, {"layers": 2}, {"tied": True}])
def test_a_checkpoint_of_another_model_is_refused_in_one_line(base, trainers, tmp_path, change):
    folder = tmp_path / "run"
    trainers.hooks = [stop_in(2, 1)]
    assert not start(base, folder)
    trainers.hooks = []
    before = (folder / "metrics.jsonl").read_text()
    config = json.loads((folder / "config.json").read_text())
    config["model"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    name = f"model.{next(iter(change))}"
    with pytest.raises(ConfigError, match=f"{name} in config.json .* in the checkpoint") as caught:
        resume(folder)
    assert "\n" not in str(caught.value)
    assert (folder / "metrics.jsonl").read_text() == before


def test_evaluation_looks_at_the_shared_parameters(base, trainers, tmp_path):
    start(base, tmp_path / "run")
    (trainer,) = trainers.made
    corpus = prepare(base.data, VOCAB)
    loss = jax.jit(model_loss)
    nats = tokens = 0.0
    for batch in ValidSequences(corpus, SEQ_LEN).batches(5, base.eval.sequences):
        part = loss(trainer.workers[1].outer.params, batch)
        nats, tokens = nats + float(part[0]), tokens + float(part[1])
    last = records(tmp_path / "run", "eval")[-1]
    assert last["loss"] == pytest.approx(nats / tokens, rel=1e-5)  # float32 sums, other batches
    assert last["perplexity"] == pytest.approx(np.exp(nats / tokens), rel=1e-4)
