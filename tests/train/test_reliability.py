# SPDX-License-Identifier: Apache-2.0
"""A run that is damaged, whose clock jumps, or that goes on as another: the same losses, or one
line that says which field to put back."""

import io
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tiny_run import LLAMA, records, tiny_run

from geojax import runs
from geojax.config import (
    BalanceConfig,
    ConfigError,
    DataConfig,
    ExchangeConfig,
    RunConfig,
    SliceConfig,
    TokenizerConfig,
    TrainConfig,
)
from geojax.track.metrics import read_records
from geojax.train.origin import check_origin, origin
from geojax.train.trainer import Trainer

QUIET = Console(file=io.StringIO())
TIMES = ("seconds", "per_second", "mfu", "versions", "machine")


def convergence(folder: Path) -> list[dict]:
    """Records without what a clock made of them."""
    return [
        {k: v for k, v in record.items() if not any(t in k for t in TIMES)}
        for record in read_records(folder / "metrics.jsonl")
    ]


def seconds_in(record: dict) -> list[float]:
    return [v for k, v in record.items() if k.endswith("seconds") and v is not None]


@pytest.fixture
def jumping_clock(monkeypatch):
    """The time of day goes a day back, or ten minutes on, with every round."""
    real, offset, one_round = time.time, [0], Trainer._round

    def jump_after(trainer, console):
        one_round(trainer, console)
        offset[0] += 600 if trainer.position.round % 2 else -86_400

    monkeypatch.setattr(Trainer, "_round", jump_after)
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + offset[0]) * 1e9))


@pytest.mark.runs
def test_a_run_goes_on_from_the_last_whole_checkpoint_whatever_the_time_of_day(
    text, cache, tmp_path, jumping_clock, capsys
):
    folder = tmp_path / "run"
    assert runs.start(tiny_run(text), folder, QUIET)
    before = convergence(folder)
    newest = max((folder / "checkpoints").iterdir(), key=lambda p: int(p.name))
    data = max(newest.rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(bytes(content))
    assert runs.resume(folder, QUIET)
    assert f"checkpoint {newest} is damaged" in capsys.readouterr().err
    assert convergence(folder) == before
    found = [x for r in read_records(folder / "metrics.jsonl") for x in seconds_in(r)]
    assert found
    assert all(x >= 0 and math.isfinite(x) for x in found)
    assert records(folder, "end")[0]["seconds"] < 600


SLICED = RunConfig(
    name="sliced",
    model=LLAMA,
    train=TrainConfig(total_tokens=1000, compute_dtype="float32"),
    data=DataConfig(tokenizer=TokenizerConfig(vocab_size=257), seq_len=16),
    slices=(SliceConfig("a"), SliceConfig("b")),
    balance=BalanceConfig(inner_steps=2, batch_sizes=(4,)),
)
CLUSTER = replace(
    SLICED,
    slices=(),
    strategy="dp1-tp1-pp1-mb4-gb8",
    balance=RunConfig.balance,
)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            SLICED,
            {"slices": tuple(SliceConfig(n, devices=4, tp=2, pp=2) for n in "abc")},
            r"slices in config\.json are \['a', 'b', 'c'\], but \['a', 'b'\] in the checkpoint.* "
            r"put them back, or take the weights with `geojax convert` .* --init",
        ),
        (
            SLICED,
            {"slices": (), "strategy": "dp2-tp2-pp2-mb1-gb8", "balance": RunConfig.balance},
            r"slices in config\.json are \[\], but \['a', 'b'\]",
        ),
        (
            CLUSTER,
            {"slices": SLICED.slices, "strategy": "", "balance": SLICED.balance},
            r"slices in config\.json are \['a', 'b'\], but \[\]",
        ),
        (
            SLICED,
            {"exchange": ExchangeConfig(codec="int8", scales="row")},
            r"exchange\.codec in config\.json is int8, but sign in the checkpoint; put it back",
        ),
        (
            CLUSTER,
            {"strategy": "dp2-tp2-pp2-mb1-gb16", "model": replace(LLAMA, norm_eps=1e-3)},
            r"model\.norm_eps in config\.json is 0\.001, but 1e-05 in the checkpoint; put it back",
        ),
    ],
)
def test_what_a_run_cannot_become_is_refused_by_field_with_the_fix(before, after, message):
    corpus = SimpleNamespace(folder=Path("c"), tokenizer_fingerprint="t")
    meta = origin(before, corpus)
    check_origin(meta, before, corpus)
    after = replace(before, **after)
    with pytest.raises(ConfigError, match=message):
        check_origin(meta, after, corpus)
    if before.slices and after.slices and before.slices != after.slices:
        check_origin(meta, after, corpus, any_slices=True)
    else:
        with pytest.raises(ConfigError, match=message):
            check_origin(meta, after, corpus, any_slices=True)


def test_another_strategy_and_batch_on_other_devices_are_no_other_run():
    corpus = SimpleNamespace(folder=Path("c"), tokenizer_fingerprint="t")
    after = replace(CLUSTER, strategy="dp2-tp2-pp2-mb1-gb16-fsdp-full")
    check_origin(origin(CLUSTER, corpus), after, corpus)
    wide = tuple(SliceConfig(n, devices=4, tp=2, pp=2, sharding="none") for n in "ab")
    check_origin(origin(SLICED, corpus), replace(SLICED, slices=wide), corpus)


@pytest.mark.full
def test_slices_go_on_with_other_devices_and_layouts_and_learn_the_same(text, cache, tmp_path):
    base = tiny_run(text)
    base = replace(
        base,
        strategy="",
        slices=SLICED.slices,
        balance=BalanceConfig(mode="equal", inner_steps=4, batch_sizes=(8,)),
        exchange=ExchangeConfig(codec="fp32", error_feedback=False),
    )
    finals = []
    for name, devices in (("same", {}), ("other", {"devices": 2, "tp": 2})):
        folder = tmp_path / name
        half = replace(base.train, total_tokens=base.train.total_tokens // 3)
        runs.start(replace(base, train=half), folder, QUIET)
        slices = tuple(replace(s, **devices) for s in base.slices)
        runs.save_config(replace(base, slices=slices), folder / "config.json")
        assert runs.resume(folder, QUIET)
        finals.append(records(folder, "eval")[-1]["loss"])
    assert finals[1] == pytest.approx(finals[0], rel=1e-3)  # order of sums differs
