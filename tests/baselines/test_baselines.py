# SPDX-License-Identifier: Apache-2.0
"""HALoS and Streaming DiLoCo: their times add up, their steps are what the papers say, and runs are
the same however often they are stopped."""

import io
import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from made_text import write_words
from rich.console import Console

from geojax import runs
from geojax.baselines import setup as beginning
from geojax.baselines.fragments import put, take
from geojax.baselines.halos import HalosTrainer
from geojax.baselines.halos_events import halos_events
from geojax.baselines.ledger import Ledger
from geojax.baselines.nesterov import delayed_nesterov
from geojax.baselines.streaming import StreamingTrainer
from geojax.baselines.streaming_times import StreamClock, parts
from geojax.bench.geomesh import run_bench
from geojax.config import (
    BalanceConfig,
    CheckpointConfig,
    ClockConfig,
    ConfigError,
    DataConfig,
    EvalConfig,
    ExchangeConfig,
    HalosConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    ServerConfig,
    SliceConfig,
    SourceConfig,
    StreamingConfig,
    TokenizerConfig,
    TrainConfig,
)
from geojax.configs import BASELINES, demo
from geojax.geomesh import trainer as geomesh_trainer
from geojax.geomesh.balance import SliceWork
from geojax.models.config import TransformerConfig
from geojax.simulate.baselines import baseline_outcome
from geojax.simulate.setting import make_setting
from geojax.track.metrics import read_records
from geojax.track.summary import check_accounting, load_run

VOCAB, SEQ_LEN, BATCH = 257, 16, 4
MODEL = TransformerConfig(vocab_size=VOCAB, dim=16, layers=2, heads=2, kv_heads=2, mlp_dim=24)
EXACT = ExchangeConfig(codec="fp32", error_feedback=False)
WALL = {"wall_seconds"}
HALOS = HalosConfig(
    local_server=ServerConfig(1.0, 0.5, 2),
    global_server=ServerConfig(0.5, 0.5),
    updates_per_push=2,
)
STREAMING = StreamingConfig(fragments=2, lag_steps=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text file of made-up words, and a cache of its own."""
    folder = tmp_path_factory.mktemp("text")
    path = write_words(folder, 12, lines=40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEOJAX_CACHE", str(folder / "cache"))
        # Makers of compiled programs are pure: runs of one task on one device may share them.
        program = cache(beginning.Program)
        for module in (beginning, geomesh_trainer):
            patch.setattr(module, "Program", program)
            patch.setattr(
                module, "assign_devices", lambda wanted, all_: [tuple(all_[:1])] * len(wanted)
            )
        yield path


@pytest.fixture
def base(text) -> RunConfig:
    """Three slices in two regions; batches are equal, so that one program serves all."""
    places = {"a": ("eastus", 2.5), "b": ("eastus", 1.5), "c": ("koreacentral", 1.0)}
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
            total_tokens=4 * 3 * 4 * BATCH * SEQ_LEN,
            optimizer=OptimizerConfig(name="adamw", learning_rate=1e-2),
            compute_dtype="float32",
        ),
        slices=tuple(SliceConfig(n, region=r, speed=s) for n, (r, s) in places.items()),
        balance=BalanceConfig(mode="equal", inner_steps=4, batch_sizes=(BATCH,)),
        exchange=EXACT,
        clock=ClockConfig(
            kind="modelled", wan="geomesh-azure", base_step_seconds=1.0, base_batch=BATCH
        ),
        eval=EvalConfig(every_tokens=2 * 3 * 4 * BATCH * SEQ_LEN, sequences=16, batch=8),
        checkpoint=CheckpointConfig(every_rounds=2),
    )


def by(base: RunConfig, method: str) -> RunConfig:
    if method == "halos":
        return replace(base, name=method, halos=HALOS)
    exchange = ExchangeConfig(codec="int8", schedule="two_phase")
    return replace(base, name=method, exchange=exchange, streaming=STREAMING)


def start(config: RunConfig, folder) -> bool:
    return runs.start(config, folder, Console(file=io.StringIO()))


def records(folder) -> list[dict]:
    return [
        {k: v for k, v in r.items() if k not in WALL}
        for r in read_records(folder / "metrics.jsonl")
    ]


@pytest.mark.runs
@pytest.mark.parametrize("method", ["halos", "streaming-diloco"])
def test_a_run_learns_accounts_for_its_time_and_goes_on_where_it_stopped(
    method, base, tmp_path, monkeypatch
):
    config, folder = by(base, method), tmp_path / "whole"
    trainer = HalosTrainer if method == "halos" else StreamingTrainer
    seen = Counter()
    run_steps = beginning.run_steps

    def counted(worker, setup, first, steps, *rest):
        seen.update(range(first, first + steps * worker.work.batch))
        return run_steps(worker, setup, first, steps, *rest)

    monkeypatch.setattr(f"{trainer.__module__}.run_steps", counted)
    assert start(config, folder)
    run = load_run(folder)
    check_accounting(run)
    assert run.end
    assert run.final_perplexity < 0.8 * run.evals[0]["perplexity"]
    # Every sample once, and as many as the run says.
    assert set(seen.values()) == {1}
    assert sorted(seen) == list(range(run.rounds[-1]["samples"]))
    assert sum(s["tokens"] for s in run.slices) == run.rounds[-1]["tokens"]
    # What is simulated takes the same time and sends the same.
    modelled = baseline_outcome(make_setting(config))
    assert 3600 * modelled.hours == pytest.approx(run.seconds, rel=1e-9)
    assert modelled.wan_idle == pytest.approx(
        max(p["wan"] for p in run.shares().values()), rel=1e-6
    )

    # Stopped after the first round, and again after the third, whose checkpoint is lost.
    monkeypatch.undo()
    pieces = tmp_path / "pieces"
    make, stops = trainer._round, itertools.count(1)

    def stopping(self, console):
        number = next(stops)
        if number in (1, 3):
            self._stop.set()
        if number == 3:
            self._save = lambda: None
        return make(self, console)

    monkeypatch.setattr(trainer, "_round", stopping)
    finished = start(config, pieces)
    while not finished:
        finished = runs.resume(pieces, Console(file=io.StringIO()))
    assert records(pieces) == records(folder)


def test_events_of_halos_are_in_order_and_nobody_waits_for_another():
    work = [SliceWork("fast", 2, 4, 1.0), SliceWork("slow", 2, 2, 3.0), SliceWork("far", 2, 3, 2.0)]
    far = {(2, 0): 5.0, (0, 2): 5.0}
    events = list(
        halos_events(
            work,
            [0, 0, 2],
            2,
            200,
            lambda i, begin, seconds: begin + seconds,
            lambda src, dst, n: far.get((src, dst), 0.25),
        )
    )
    times = [event.seconds for event in events]
    assert times == sorted(times)
    samples = [s for e in events if e.kind == "update" for s in e.samples]
    assert len(set(samples)) == len(samples) >= 200
    assert set(range(200)) <= set(samples)
    for index, w in enumerate(work):
        begins = [e.seconds for e in events if e.kind == "begin" and e.who == index]
        period = w.compute_seconds + 0.5  # to its region's server and back
        assert np.diff(begins) == pytest.approx(period)
    # A region sends after two updates, one exchange at a time, and each comes back.
    of_far = [e for e in events if e.who == 2 and (e.kind != "begin")]
    kinds = "".join(
        {"update": "U" if e.sends else "u", "push": "p", "pull": "l"}[e.kind] for e in of_far
    )
    assert kinds.startswith("uU")
    assert kinds.count("U") == kinds.count("p") == kinds.count("l")
    assert all(a != b for a, b in itertools.pairwise(k for k in kinds if k in "Ul"))
    pulls = [
        e.seconds - s.seconds
        for s, e in zip(
            [e for e in of_far if e.sends], [e for e in of_far if e.kind == "pull"], strict=True
        )
    ]
    assert pulls == pytest.approx([10.0] * len(pulls))


def test_without_what_makes_them_special_both_are_diloco(base, tmp_path):
    streaming = StreamingConfig(fragments=1, lag_steps=0, local_weight=0.0)
    # One slice, whose updates come back from both servers before it has the next.
    alone = replace(base, slices=base.slices[:1])
    halos = HalosConfig(ServerConfig(), ServerConfig(), updates_per_push=1, local_weight=0.0)
    for name, one, other in (
        ("streaming", base, replace(base, streaming=streaming)),
        ("halos", alone, replace(alone, halos=halos)),
    ):
        found = []
        for config in (one, other):
            folder = tmp_path / f"{name}{len(found)}"
            assert start(config, folder)
            found.append(load_run(folder))
        losses = [[r["loss"] for r in (*run.slices, run.evals[-1])] for run in found]
        # p - (p - q) is q, but for rounding.
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), name


@pytest.mark.parametrize("every", [1, 2, 3])
def test_delayed_nesterov_moves_at_once_and_gathers_for_its_momentum(every):
    optimizer = delayed_nesterov(0.5, every)
    state = optimizer.init({"x": np.zeros(2, np.float32)})
    updates = np.arange(1, 13, dtype=np.float32).reshape(6, 2)
    momentum, gathered = np.zeros(2), np.zeros(2)
    for number, update in enumerate(updates, 1):
        direction, state = optimizer.update({"x": update}, state)
        gathered = gathered + update
        expected = update
        if number % every == 0:
            momentum = 0.5 * momentum + gathered
            expected, gathered = update + 0.5 * momentum, np.zeros(2)
        np.testing.assert_allclose(direction["x"], expected, rtol=1e-6)


def test_fragments_hold_every_parameter_once_and_go_back_where_they_were():
    params = {
        "embed": np.arange(6.0).reshape(3, 2),
        "blocks": {"w": np.arange(20.0).reshape(5, 4), "norm": {"scale": np.arange(5.0)}},
        "norm": {"scale": np.ones(2)},
        "head": np.zeros((2, 3)),
    }
    found = [take(params, i, 2) for i in range(2)]
    sizes = [sum(x.size for x in jax.tree.leaves(f)) for f in found]
    assert sum(sizes) == sum(x.size for x in jax.tree.leaves(params))
    assert [sorted(f) for f in found] == [["blocks", "embed"], ["blocks", "head", "norm"]]
    rebuilt = jax.tree.map(np.zeros_like, params)
    for index, fragment in enumerate(found):
        rebuilt = put(rebuilt, jax.tree.map(lambda x: x + 1, fragment), index, 2)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b + 1), rebuilt, params)


def test_a_fragment_waits_only_for_what_its_steps_do_not_cover():
    def clock(exchange: float, lag: int) -> StreamClock:
        return StreamClock(
            [1.0, 2.0], parts(10, 2, lag), lambda i, begin, s: begin + s, lambda r, f: exchange
        )

    assert [tuple(p) for p in parts(10, 3, 2)] == [(1, 2), (1, 2), (2, 2)]
    hidden, shown = clock(4.0, 2), clock(5.0, 2)
    spans = [hidden.round(n) for n in range(3)]
    # The slow slice never waits; the fast one waits for it.
    assert [s.seconds for s in spans] == pytest.approx([20.0] * 3)
    assert [s.idle[1] for s in spans] == pytest.approx([0.0] * 3)
    assert shown.round(0).seconds == pytest.approx(20 + 2 * 1.0)
    blocking = clock(5.0, 0)
    assert blocking.round(0).seconds == pytest.approx(20 + 2 * 5.0)
    for span in spans:
        for i in range(2):
            assert span.compute[i] + span.transfer[i] + span.idle[i] == pytest.approx(span.seconds)


def test_a_ledger_cuts_what_reaches_past_a_round():
    ledger = Ledger(2)
    ledger.compute(0, 0.0, 3.0)
    ledger.transfer(0, 3.0, 7.0)
    ledger.compute(1, 0.0, 1.0)
    first, second = ledger.close(5.0), ledger.close(8.0, quiet_from=7.5)
    assert first == (5.0, [3.0, 1.0], [2.0, 0.0], [0.0, 4.0])
    assert second == (3.0, [0.0, 0.0], [2.5, 0.5], [0.5, 2.5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, streaming=STREAMING), "two methods; set one"),
        (lambda c: replace(c, exchange=ExchangeConfig()), "whole float32 updates"),
        (lambda c: replace(c, outer=OuterConfig(merge="fednova")), "optimizers of their own"),
    ],
)
def test_settings_that_halos_would_not_look_at_are_refused(change, message, base):
    with pytest.raises(ConfigError, match=message):
        change(by(base, "halos"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fragments": 3}, "exceed the model's 2 layers"),
        ({"lag_steps": 2}, "use at most 1"),
        ({"local_weight": 1.0}, "must lie in"),
    ],
)
def test_settings_that_streaming_cannot_keep_are_refused(settings, message, base):
    config = by(base, "streaming-diloco")
    with pytest.raises(ConfigError, match=message):
        replace(config, streaming=replace(STREAMING, **settings))
    adaptive = replace(base.balance, mode="adaptive")
    with pytest.raises(ConfigError, match=r"set balance\.mode to 'equal'"):
        replace(config, balance=adaptive)


def test_the_demos_of_the_baselines_share_all_but_the_method():
    for name, method in BASELINES.items():
        config, other = method(demo()), demo()
        for part in ("model", "data", "slices", "clock", "eval", "checkpoint", "seed"):
            assert getattr(config, part) == getattr(other, part), (name, part)
        assert config.name == name
        assert config.train.total_tokens == other.train.total_tokens


def test_the_benchmark_names_the_methods_that_it_knows(tmp_path):
    with pytest.raises(ConfigError, match="no method 'halo' to compare; use some of"):
        run_bench(tmp_path, 1, 1, None, ["halo"])
    assert not any(tmp_path.iterdir())
