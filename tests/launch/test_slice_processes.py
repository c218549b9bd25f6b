# SPDX-License-Identifier: Apache-2.0
"""Slices of two processes beside slices of one, as `geojax launch` starts them."""

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from launched import PATIENCE_SECONDS, Launch, hashes
from made_text import write_words

from geojax.config import (
    BalanceConfig,
    ClusterConfig,
    ConfigError,
    ExchangeConfig,
    PlatformConfig,
    RunConfig,
    SliceConfig,
    TrainConfig,
)
from geojax.launch import joining, local, processes
from geojax.models.config import TransformerConfig
from geojax.track.summary import check_accounting, load_run

BATCH, SEQ_LEN = 4, 16
SETTINGS = """
from geojax.config import *
from geojax.models.config import TransformerConfig

def config():
    outer = OptimizerConfig(name="sgd", learning_rate=0.7, momentum=0.6, nesterov=True)
    return RunConfig(
        name="launched",
        model=TransformerConfig(257, dim=16, layers=1, heads=2, kv_heads=2, mlp_dim=24),
        data=DataConfig(
            source=SourceConfig(kind="files", paths=("words.txt",)),
            tokenizer=TokenizerConfig(vocab_size=257),
            seq_len={seq_len},
            valid_fraction=0.2,
        ),
        train=TrainConfig(
            total_tokens={tokens},
            optimizer=OptimizerConfig(name="lion", learning_rate=1e-3),
            compute_dtype="float32",
        ),
        slices=(
            SliceConfig("east", devices=2, sharding="all"{two}{fast}),
            *(SliceConfig(name{slow}) for name in {others}),
        ),
        balance=BalanceConfig(inner_steps=4, batch_sizes=({batch},)),
        exchange=ExchangeConfig(schedule="gather", engine="{engine}", overlap={overlap}),
        outer=OuterConfig(outer),
        clock=ClockConfig({clock}),
        eval=EvalConfig(every_tokens={tokens} // 3, sequences=16, batch=8),
        checkpoint=CheckpointConfig(every_rounds=4),
    )
"""


MODELLED = {
    "clock": f"'modelled', wan='geomesh-azure', base_step_seconds=1.0, base_batch={BATCH}",
    "fast": ", region='eastus', speed=2.0",
    "slow": ", region='westus2', speed=1.0",
    "overlap": 0.0,
}
MEASURED = {"clock": "", "fast": "", "slow": "", "overlap": 0.5}


def write_settings(folder: Path, rounds: int, others=("west",), clock=MODELLED) -> None:
    """`apart.py` and `together.py`: the same run in processes, and in one."""
    steps = 8 + 4 * len(others)
    facts = {
        "tokens": rounds * steps * BATCH * SEQ_LEN,
        "batch": BATCH,
        "seq_len": SEQ_LEN,
        "others": others,
        **clock,
    }
    for name, engine, two in (("apart", "grpc", ", processes=2"), ("together", "mesh", "")):
        text = SETTINGS.format(engine=engine, two=two, **facts)
        (folder / f"{name}.py").write_text(text)


@pytest.fixture
def place(tmp_path):
    write_words(tmp_path, 500)
    return tmp_path


def launch(place: Path, slices: int) -> Launch:
    # Long deadlines: a slow machine is not to leave a slice out.
    args = ("--grpc.lease-seconds", "8", "--grpc.deadline-floor-seconds", "300")
    command = ("launch", "--local", str(slices), "apart.py", "--out", "apart", *args)
    return Launch(place / "apart", *command, devices=2)


def together(place: Path) -> list[str]:
    """Hashes of the run in one process."""
    run = Launch(place / "together", "train", "together.py", "--out", "together", devices=2)
    run.finish()
    return hashes(place / "together")


@pytest.mark.runs
def test_two_processes_and_one_share_the_bits_of_one_process(place):
    """Two devices' sums have one order, wherever they are; more would differ by rounding."""
    write_settings(place, rounds=6)
    with launch(place, 2) as run:
        expected = together(place)
        run.finish()
    assert len(expected) == 6
    assert hashes(place / "apart") == expected, run.said()
    check_accounting(load_run(place / "apart"))


@pytest.mark.full
def test_a_signal_to_one_process_saves_its_slice_which_goes_on_exactly(place):
    write_settings(place, rounds=20)
    with launch(place, 2) as run:
        run.until_round(3)
        pids = [run.pid(f"east/{number}") for number in range(2)]
        os.kill(pids[1], signal.SIGTERM)
        until(lambda: not any(map(alive, pids)), run)
        assert "slice east: stopped and saved" in run.said()
        stopped = run.round
        time.sleep(2)
        assert run.round == stopped < 20  # two slices are no quorum without one of them
        run.process.send_signal(signal.SIGTERM)
        run.finish(os.EX_TEMPFAIL)
    with Launch(place / "apart", "launch", "--resume", "apart", devices=2) as again:
        again.finish()
    assert "slice east: goes on from its checkpoint" in again.said()
    assert hashes(place / "apart") == together(place)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_its_slice_which_comes_back_while_others_go_on(place, victim):
    write_settings(place, rounds=100_000, others=("west", "south"), clock=MEASURED)
    with launch(place, 3) as run:
        run.until_round(random.randint(3, 6))
        pids = [run.pid(f"east/{number}") for number in range(2)]
        os.kill(pids[victim], signal.SIGKILL)
        began = time.monotonic()
        until(lambda: not any(map(alive, pids)), run)
        assert time.monotonic() - began < 20
        until(lambda: merged(place, 0)[-4:] == [False] * 4, run)  # they go on without it
        until(lambda: merged(place, 0)[-4:] == [True] * 4, run)  # it is one of them again
        run.process.send_signal(signal.SIGTERM)
        run.finish(os.EX_TEMPFAIL)
    # JAX may end the other one first, and then says by itself that a task died.
    assert f"process {victim} of the slice has ended" in run.said() or "task died" in run.said()
    check_accounting(load_run(place / "apart"))


def merged(place: Path, index: int) -> list[bool]:
    """Whether each round that is over merged that slice."""
    lines = (place / "apart" / "journal.jsonl").read_bytes().split(b"\n")[:-1]
    entries = map(json.loads, lines)
    return [index in e["merged"] for e in entries if e["kind"] == "round"]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def until(reached, run: Launch) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < deadline, run.said()
        time.sleep(0.05)


def make_config(**slice_) -> RunConfig:
    return RunConfig(
        name="two",
        model=TransformerConfig(512, dim=16, layers=1, heads=2, kv_heads=2, mlp_dim=24),
        train=TrainConfig(total_tokens=1),
        slices=(SliceConfig("east", **slice_), SliceConfig("west")),
        balance=BalanceConfig(inner_steps=4, batch_sizes=(BATCH,)),
        exchange=ExchangeConfig(engine="grpc"),
    )


def test_what_is_no_slice_of_several_processes_is_refused():
    with pytest.raises(ConfigError, match="processes 0 must be at least 1"):
        SliceConfig("east", processes=0)
    with pytest.raises(ConfigError, match="devices 3 do not divide by processes 2; use a multiple"):
        SliceConfig("east", devices=3, processes=2)
    config = make_config(devices=2, processes=2)
    with pytest.raises(
        ConfigError, match=r"slice east: processes 2, and exchange\.engine is 'mesh'"
    ):
        replace(config, exchange=ExchangeConfig())


@pytest.mark.parametrize(
    ("processes_", "cluster", "says"),
    [
        (2, ClusterConfig(), "there are 1; start each with --platform.cluster.coordinator"),
        (2, ClusterConfig("node0:1", 3, 0), "there are 3; set processes of slice east to 3"),
        (1, ClusterConfig("node0:1", 2, 1), "there are 2; set processes of slice east to 2"),
    ],
)
def test_a_slice_is_of_as_many_processes_as_its_config_says(processes_, cluster, says):
    slice_ = SliceConfig("east", devices=2, processes=processes_)
    with pytest.raises(ConfigError, match=says):
        joining.join(PlatformConfig(cluster=cluster), slice_)


def test_in_how_many_processes_a_slice_is_may_change_between_starts():
    two = make_config(devices=2, processes=2)
    assert processes.fingerprint(two) == processes.fingerprint(make_config(devices=2))
    assert processes.fingerprint(two) != processes.fingerprint(make_config(devices=4))


def test_the_launcher_starts_each_process_of_a_slice_with_its_devices(monkeypatch, tmp_path):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    config = make_config(devices=4, processes=2)
    east0, east1, west = local._slices(config, tmp_path, "127.0.0.1:7000")
    assert [c.name for c in (east0, east1, west)] == ["east/0", "east/1", "west"]
    assert east0.command[:-1] == east1.command[:-1]
    assert [c.command[-2:] for c in (east0, east1)] == [
        ["--cluster.process-id", str(number)] for number in range(2)
    ]
    assert "--cluster.coordinator" not in west.command
    counts = [c.variables["JAX_NUM_CPU_DEVICES"] for c in (east0, east1, west)]
    assert counts == ["2", "2", "1"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert not next(local._slices(config, tmp_path, "127.0.0.1:7000")).variables  # the user's stays


def test_the_launcher_does_not_share_gpus_among_processes(monkeypatch, tmp_path):
    monkeypatch.setattr("geojax.platform.why_no_gpu", lambda: "")
    with pytest.raises(ConfigError, match=r"\(east\) on CPUs only"):
        local.launch_local(make_config(devices=2, processes=2), tmp_path / "run", 2, 0)
    assert not any(tmp_path.iterdir())
