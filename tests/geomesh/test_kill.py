# SPDX-License-Identifier: Apache-2.0
"""A run that is killed, at any moment, ends with the numbers of one that was not.

Real processes, killed by SIGKILL; each has one CPU and the same one, for XLA on CPU gives the same
bits from run to run but not under another affinity.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from made_text import write_words

from geojax import runs
from geojax.config import (
    BalanceConfig,
    CheckpointConfig,
    ClockConfig,
    DataConfig,
    EvalConfig,
    ExchangeConfig,
    OptimizerConfig,
    OuterConfig,
    RunConfig,
    SliceConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
)
from geojax.models.config import TransformerConfig
from geojax.track.metrics import read_records

VOCAB, SEQ_LEN, BATCH = 257, 16, 4
ROUNDS = 80
STEPS = 10 + 6 + 4  # of the three slices, a round
PATIENCE_SECONDS = 120
LAUNCH = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.execv(sys.executable, [sys.executable, "-m", "geojax", "train", "--resume", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_words(tmp_path_factory.mktemp("text"), 500)


@pytest.fixture(scope="module")
def config(text) -> RunConfig:
    """GeoMesh with both error feedbacks, outer momentum and steps ahead, saved every round."""
    slices = zip(("eastus", "westus2", "koreacentral"), (2.5, 1.5, 1.0), strict=True)
    outer = OptimizerConfig(name="sgd", learning_rate=0.7, momentum=0.6, nesterov=True)
    return RunConfig(
        name="killed",
        model=TransformerConfig(VOCAB, dim=16, layers=1, heads=2, kv_heads=2, mlp_dim=24),
        data=DataConfig(
            source=SourceConfig(kind="files", paths=(str(text),)),
            tokenizer=TokenizerConfig(vocab_size=VOCAB),
            seq_len=SEQ_LEN,
            valid_fraction=0.2,
        ),
        train=TrainConfig(
            total_tokens=ROUNDS * STEPS * BATCH * SEQ_LEN,
            optimizer=OptimizerConfig(name="lion", learning_rate=1e-3),
            compute_dtype="float32",
        ),
        slices=tuple(SliceConfig(name, region=name, speed=speed) for name, speed in slices),
        balance=BalanceConfig(inner_steps=4, batch_sizes=(BATCH,)),
        exchange=ExchangeConfig(schedule="two_phase", overlap=0.5),
        outer=OuterConfig(outer),
        clock=ClockConfig(
            kind="modelled", wan="geomesh-azure", base_step_seconds=1.0, base_batch=BATCH
        ),
        eval=EvalConfig(every_tokens=10 * STEPS * BATCH * SEQ_LEN, sequences=16, batch=8),
        checkpoint=CheckpointConfig(every_rounds=1),
    )


def launch(folder: Path, text: Path) -> subprocess.Popen:
    environment = os.environ | {
        "GEOJAX_CACHE": str(text.parent / "cache"),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    }
    log = (folder / "log.txt").open("ab")
    with log:
        return subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(folder)],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
        )


def prepare_run(folder: Path, config: RunConfig) -> Path:
    folder.mkdir()
    runs.save_config(config, folder / "config.json")
    return folder


def rounds(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count('"kind": "round"') if path.exists() else 0


def figures(folder: Path) -> list[dict]:
    """All that was recorded, but for wall time."""
    found = read_records(folder / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k != "wall_seconds"} for r in found]


def wait_until(process: subprocess.Popen, folder: Path, reached: Callable[[], object]) -> bool:
    """Whether it was reached before the process ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, (folder / "log.txt").read_text()
        time.sleep(0.001)
    return True


def finish(process: subprocess.Popen, folder: Path, code: int = 0) -> None:
    assert process.wait(PATIENCE_SECONDS) == code, (folder / "log.txt").read_text()


def checkpoint_being_written(folder: Path) -> bool:
    return any(folder.glob("checkpoints/*.orbax-checkpoint-tmp*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, config, text) -> list[dict]:
    """The figures of a run that nothing happened to."""
    folder = prepare_run(tmp_path_factory.mktemp("whole") / "run", config)
    finish(launch(folder, text), folder)
    found = figures(folder)
    assert [r["round"] for r in found if r["kind"] == "round"] == list(range(1, ROUNDS + 1))
    assert len({r["hash"] for r in found if r["kind"] == "round"}) == ROUNDS
    return found


@pytest.mark.runs
@pytest.mark.full  # two minutes; make test kills slices of their own (test_wan_kill)
def test_five_kills_and_a_sigterm_change_no_number(tmp_path, config, text, whole):
    folder = prepare_run(tmp_path / "run", config)
    rng = random.Random()  # random moments are the point; what failed is in the message
    moments = []
    for how in ("kill", "kill", "kill in a checkpoint", "SIGTERM", "kill", "kill"):
        goal = rounds(folder) + rng.randint(0, ROUNDS // 10)

        def reached(how=how, goal=goal):
            if how == "kill in a checkpoint":
                return checkpoint_being_written(folder)
            return rounds(folder) > goal

        process = launch(folder, text)
        assert wait_until(process, folder, reached), (folder / "log.txt").read_text()
        if how == "kill":
            time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
        if how == "SIGTERM":
            finish(process, folder, os.EX_TEMPFAIL)
            assert "stopped and saved" in (folder / "log.txt").read_text()
        else:
            assert process.wait() == -signal.SIGKILL
        if how == "kill in a checkpoint":
            assert checkpoint_being_written(folder)
        moments.append((how, rounds(folder)))
    assert moments[-1][1] < ROUNDS
    finish(launch(folder, text), folder)
    assert figures(folder) == whole, f"interrupted after rounds {moments}"
