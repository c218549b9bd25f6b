# SPDX-License-Identifier: Apache-2.0
"""A run whose slices know each other by gRPC alone has the bits of one in one process.

Slices are threads here, which saves compiling; tests/launch has processes.
"""

import io
import random
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import jax
import pytest
from rich.console import Console

import geojax.geomesh.slice_trainer as slice_module
import geojax.geomesh.trainer as trainer_module
import geojax.train.checkpoint as checkpoint_module
from geojax import runs
from geojax.config import (
    BalanceConfig,
    CheckpointConfig,
    ClockConfig,
    ConaConfig,
    ConfigError,
    DataConfig,
    EvalConfig,
    ExchangeConfig,
    GrpcConfig,
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
from geojax.launch import processes
from geojax.models.config import TransformerConfig
from geojax.track.metrics import read_records
from geojax.track.summary import check_accounting, load_run
from geojax.train.checkpoint import read_params

SEQ_LEN, BATCH, VOCAB = 16, 4, 257
ROUND_SAMPLES = (10 + 6 + 4) * BATCH
REGIONS = ("eastus", "westus2", "koreacentral")
EXACT = ExchangeConfig(codec="fp32", error_feedback=False, schedule="gather")
SIGNS = ExchangeConfig(codec="sign", schedule="gather")
PATIENCE_SECONDS = 120


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    path = folder / "words.txt"
    path.write_text("\n\n".join(" ".join(rng.choices(words, k=500)) for _ in range(16)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEOJAX_CACHE", str(folder / "cache"))
        yield path


@pytest.fixture(scope="module", autouse=True)
def _one_device_and_one_compilation():
    found = jax.local_devices()[:1]
    program = cache(trainer_module.Program)
    lock = threading.RLock()

    def made_once(*args):
        with lock:
            return program(*args)

    class OneAtATime(checkpoint_module.Checkpoints):
        """Orbax takes threads of one process for one saver."""

        def save(self, *args):
            with lock:
                super().save(*args)
                super().wait()

        def restore(self, *args):
            with lock:
                return super().restore(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_module, "Checkpoints", OneAtATime)
        patch.setattr(jax, "local_devices", lambda backend=None: found)
        for module in (trainer_module, slice_module):
            patch.setattr(module, "Program", made_once)
            patch.setattr(module, "init_params", cache(trainer_module.init_params))
        yield


def make_config(text, exchange=SIGNS, rounds=5) -> RunConfig:
    slices = zip(REGIONS, (2.5, 1.5, 1.0), strict=True)
    outer = OptimizerConfig(name="sgd", learning_rate=0.7, momentum=0.6, nesterov=True)
    return RunConfig(
        name="apart",
        model=TransformerConfig(VOCAB, dim=16, layers=1, heads=2, kv_heads=2, mlp_dim=24),
        data=DataConfig(
            source=SourceConfig(kind="files", paths=(str(text),)),
            tokenizer=TokenizerConfig(vocab_size=VOCAB),
            seq_len=SEQ_LEN,
            valid_fraction=0.2,
        ),
        train=TrainConfig(
            total_tokens=rounds * ROUND_SAMPLES * SEQ_LEN,
            optimizer=OptimizerConfig(name="lion", learning_rate=1e-3),
            compute_dtype="float32",
        ),
        slices=tuple(SliceConfig(name, region=name, speed=speed) for name, speed in slices),
        balance=BalanceConfig(inner_steps=4, batch_sizes=(BATCH,)),
        exchange=exchange,
        outer=OuterConfig(outer),
        clock=ClockConfig(
            kind="modelled", wan="geomesh-azure", base_step_seconds=1.0, base_batch=BATCH
        ),
        eval=EvalConfig(every_tokens=2 * ROUND_SAMPLES * SEQ_LEN, sequences=16, batch=8),
        checkpoint=CheckpointConfig(every_rounds=2),
    )


class Apart:
    """The processes of one run, as threads."""

    def __init__(self, config, folder, monkeypatch):
        self.config = replace(
            processes.with_grpc(config),
            grpc=GrpcConfig(lease_seconds=30, deadline_floor_seconds=30, call_seconds=30),
        )
        self.folder, self.outputs, self.results = folder, {}, {}
        self.names = [s.name for s in config.slices]
        self.stops: dict[str, threading.Event] = {}
        mine = self.stops

        @contextmanager
        def stop():
            yield mine[threading.current_thread().name]

        monkeypatch.setattr(processes, "_stop", stop)
        if not folder.exists():
            runs.begin_folder(self.config, folder)

    def go(self) -> None:
        """All of them, to the end or until they are stopped."""
        (self.folder / processes.ADDRESS_FILE).unlink(missing_ok=True)
        threads = [self._thread("coordinator", self._coordinate)]
        while not (self.folder / processes.ADDRESS_FILE).exists():
            assert threads[0].is_alive(), self.results
            threading.Event().wait(0.01)
        address = (self.folder / processes.ADDRESS_FILE).read_text().split('"')[3]
        for name in self.names:
            threads.append(self._thread(name, self._take_part, name, address))
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive(), (self.results, self.said())
        for name, result in self.results.items():
            assert isinstance(result, bool), (name, result, self.said())

    def stop(self) -> None:
        for name in ("coordinator", *self.names):
            self.stops[name].set()

    def said(self) -> str:
        return "\n".join(f"{n}: {o.getvalue()}" for n, o in self.outputs.items())

    def hashes(self) -> list[str]:
        return [r["hash"] for r in self.records("round")]

    def records(self, kind):
        return [r for r in read_records(self.folder / "metrics.jsonl") if r["kind"] == kind]

    def _thread(self, name, function, *args) -> threading.Thread:
        self.stops[name] = threading.Event()
        self.outputs[name] = io.StringIO()
        console = Console(file=self.outputs[name], width=200)

        def run():
            try:
                self.results[name] = function(console, *args)
            except BaseException as error:
                self.results[name] = error
                self.stop()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _coordinate(self, console):
        return processes.coordinate(self.config, self.folder, console)

    def _take_part(self, console, name, address):
        folder = self.folder / "slices" / name
        return processes.take_part(self.config, folder, name, address, console)


def together(config, folder):
    runs.start(config, folder, Console(file=io.StringIO()))
    return [r for r in read_records(folder / "metrics.jsonl") if r["kind"] == "round"]


@pytest.mark.parametrize("exchange", [SIGNS, EXACT], ids=["signs", "fp32"])
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
    params, _ = read_params(apart.folder)
    whole, _ = read_params(tmp_path / "one")
    same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), params, whole)
    assert all(jax.tree.leaves(same))


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
