# SPDX-License-Identifier: Apache-2.0
"""A run whose slices are threads in place of processes, which saves compiling, and the same run in
one process."""

import io
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
    DataConfig,
    EvalConfig,
    ExchangeConfig,
    GrpcConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    SliceConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
)
from geojax.launch import processes
from geojax.models.config import TransformerConfig
from geojax.track.metrics import read_records
from geojax.train import initial

SEQ_LEN, BATCH, VOCAB = 16, 4, 257
ROUND_SAMPLES = (10 + 6 + 4) * BATCH
REGIONS = ("eastus", "westus2", "koreacentral")
EXACT = ExchangeConfig(codec="fp32", error_feedback=False, schedule="gather")
SIGNS = ExchangeConfig(codec="sign", schedule="gather")
PATIENCE_SECONDS = 120


@contextmanager
def one_program():
    """All slices find one device, and compile once."""
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
        patch.setattr(jax, "local_devices", lambda *_, **__: found)
        for module in (trainer_module, slice_module):
            patch.setattr(module, "Program", made_once)
        patch.setattr(initial, "init_params", cache(initial.init_params))
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
