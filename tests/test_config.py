# SPDX-License-Identifier: Apache-2.0
"""A config that exists can run: every contradiction is refused with the value and the fix."""

import ast
import math
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

import geojax.config
import geojax.meshes
from geojax.config import (
    AnomalyConfig,
    BalanceConfig,
    ChainLeg,
    CheckpointConfig,
    ClockConfig,
    ConaConfig,
    ConfigError,
    DataConfig,
    EvalConfig,
    ExchangeConfig,
    MaskingConfig,
    NoiseConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    ScheduleConfig,
    SliceConfig,
    SourceConfig,
    TokenizerConfig,
    TrainConfig,
    slice_strategy,
    with_chain,
    with_strategy,
)
from geojax.configs import load_config
from geojax.meshes.strategy import parse_strategy
from geojax.models.config import get_model

WAN = "geomesh-azure"

BAD_PARTS = [
    (SourceConfig, {"kind": "files"}, r"paths \[\] goes with .*'files'.*set both or neither"),
    (SourceConfig, {"paths": ("a.txt",)}, r"paths \['a.txt'\] goes .*kind is 'wiki'.*set both"),
    (SourceConfig, {"kind": "huggingface"}, "dataset '' goes with .*'huggingface'.*set both"),
    (SourceConfig, {"dataset": "c4"}, "dataset 'c4' goes with .*kind is 'wiki'.*set both"),
    (TokenizerConfig, {"vocab_size": 256}, "vocab_size 256 must lie in 257..1048576"),
    (TokenizerConfig, {"vocab_size": 2**20 + 1}, "vocab_size 1048577 must lie in 257..1048576"),
    (TokenizerConfig, {"kind": "file"}, "path '' goes with .*'file'.*set both or neither"),
    (TokenizerConfig, {"path": "t.json"}, "path 't.json' goes with .*kind is 'bpe'.*set both"),
    (DataConfig, {"seq_len": 0}, "seq_len 0 must be at least 1"),
    (DataConfig, {"valid_fraction": 0.0}, "valid_fraction 0.0 must lie between 0 and 1; use 0.02"),
    (DataConfig, {"valid_fraction": 1.0}, "valid_fraction 1.0 must lie between 0 and 1; use 0.02"),
    (DataConfig, {"seed": -1}, "data.seed -1 must lie in 0..4294967295"),
    (SourceConfig, {"subset": "en"}, "subset 'en' goes with .*kind is 'wiki'.*leave it unset"),
    (ExchangeConfig, {"codec": "fp16", "scales": "row"}, "scales 'row' means nothing under .*fp16"),
    (
        BalanceConfig,
        {"inner_steps": 1, "batch_sizes": (4, 4)},
        "names a batch twice; name each once",
    ),
    (OptimizerConfig, {"learning_rate": math.inf}, "learning_rate inf must be above 0 and finite"),
    (OptimizerConfig, {"weight_decay": math.inf}, "weight_decay inf must be at least 0 and finite"),
    (
        ClockConfig,
        {"kind": "modelled", "wan": WAN, "seq_len": 0},
        "clock.seq_len 0 must be at least 1",
    ),
    (SliceConfig, {"name": ""}, "slices: a name is empty; name each slice"),
    (SliceConfig, {"name": "a", "devices": 0}, "slice a: devices 0 must be at least 1"),
    (SliceConfig, {"name": "a", "tp": 0}, "slice a: tp 0 must be at least 1"),
    (
        SliceConfig,
        {"name": "a", "devices": 6, "tp": 4},
        "slice a: devices 6 do not divide by tp 4 x pp 1; use a multiple of 4 devices, or smaller",
    ),
    (
        SliceConfig,
        {"name": "a", "devices": 2, "tp": 2, "pp": 2},
        "slice a: devices 2 do not divide by tp 2 x pp 2; use a multiple of 4 devices",
    ),
    (SliceConfig, {"name": "a", "gpus": 0}, "slice a: gpus 0 must be at least 1"),
    (SliceConfig, {"name": "a", "speed": 0.0}, "slice a: speed 0.0 must be above 0"),
    (SliceConfig, {"name": "a", "speed": math.nan}, "slice a: speed nan must be above 0"),
    (BalanceConfig, {}, "inner_steps None and balance.sync_share None: set exactly one"),
    (
        BalanceConfig,
        {"inner_steps": 3, "sync_share": 0.1},
        "inner_steps 3 and balance.sync_share 0.1: set exactly one",
    ),
    (BalanceConfig, {"inner_steps": 0}, "inner_steps 0 must be at least 1"),
    (BalanceConfig, {"sync_share": 0.0}, "sync_share 0.0 must lie between 0 and 1; use 0.1"),
    (BalanceConfig, {"sync_share": 1.0}, "sync_share 1.0 must lie between 0 and 1; use 0.1"),
    (BalanceConfig, {"inner_steps": 3, "batch_sizes": ()}, r"batch_sizes \(\) needs at least one"),
    (
        BalanceConfig,
        {"inner_steps": 3, "batch_sizes": (8, 0)},
        r"batch_sizes \(8, 0\) needs .* each at least 1",
    ),
    (BalanceConfig, {"inner_steps": 3, "max_steps_ratio": 0.5}, "ratio 0.5 must be at least 1"),
    (BalanceConfig, {"inner_steps": 3, "throughput_slack": 1.0}, r"slack 1.0 must lie in \[0, 1\)"),
    (BalanceConfig, {"inner_steps": 3, "throughput_slack": -0.1}, r"slack -0.1 must lie in"),
    (ExchangeConfig, {"codec": "fp32"}, "error_feedback has nothing .* fp32; set it to False"),
    (ClockConfig, {"kind": "modelled"}, r"'modelled': .* wants either a wan \(''\), .* gpu \(''\)"),
    (ClockConfig, {"wan": WAN}, f"'measured': .* no other, wants either a wan \\('{WAN}'\\)"),
    (ClockConfig, {"gpu": "h100"}, r"'measured': .* no other, wants .* gpu \('h100'\)"),
    (ClockConfig, {"kind": "modelled", "gpu": "h1"}, "no GPU named 'h1'"),
    (
        ClockConfig,
        {"kind": "modelled", "gpu": "h100", "switch_seconds": -1.0},
        "switch_seconds -1.0 must be at least 0",
    ),
    (ClockConfig, {"nodes": 2}, "clock.nodes 2 is of a modelled cluster.*leave it at 1"),
    (ClockConfig, {"switch_seconds": 1.0}, "clock.switch_seconds 1.0 is of a modelled cluster"),
    (ScalingConfig, {"base_batch": 0}, "base_batch 0 must be at least 1"),
    (ScalingConfig, {"base_batch": 8, "rule": "table"}, r"has table \(\); give"),
    (ScalingConfig, {"base_batch": 8, "cap": True}, "cap has no meaning under rate rule"),
    (ConaConfig, {"global_batches": ()}, r"global_batches \(\) needs at least one number"),
    (ConaConfig, {"global_batches": (8, 8)}, r"global_batches \(8, 8\) needs .*, each once"),
    (ConaConfig, {"global_batches": (8,), "dwell_rounds": 0}, "dwell_rounds 0 must be at least 1"),
    (ConaConfig, {"global_batches": (8,), "margin": 1.0}, r"margin 1.0 must lie in \[0, 1\)"),
    (
        ConaConfig,
        {"global_batches": (8,), "timing_error": 0.0},
        "timing_error 0.0 must lie between",
    ),
    (NoiseConfig, {"first_steps": 1}, "first_steps 1 must be at least 2"),
    (NoiseConfig, {"window_samples": 0}, "window_samples 0 must be at least 1"),
    (NoiseConfig, {"window_fraction": 1.0}, r"window_fraction 1.0 must lie in \[0, 1\)"),
    (ClockConfig, {"model": "llama-tiny", "seq_len": 9}, "clock.model/seq_len would be ignored"),
    (
        ClockConfig,
        {"kind": "modelled", "wan": WAN, "base_batch": 4},
        "base_step_seconds None and clock.base_batch 4 go together; set both or neither",
    ),
    (
        ClockConfig,
        {"kind": "modelled", "wan": WAN, "base_batch": 4, "base_step_seconds": 0.0},
        "base_step_seconds 0.0 must be above 0",
    ),
    (OptimizerConfig, {"learning_rate": 0.0}, "learning_rate 0.0 must be above 0"),
    (OptimizerConfig, {"learning_rate": math.nan}, "learning_rate nan must be above 0"),
    (OptimizerConfig, {"b1": 1.0}, r"b1 1.0 must lie in \[0, 1\)"),
    (OptimizerConfig, {"b2": -0.1}, r"b2 -0.1 must lie in \[0, 1\)"),
    (OptimizerConfig, {"name": "sgd", "b1": 0.9}, "b1 0.9 .* goes with lion or adamw, not sgd"),
    (OptimizerConfig, {"momentum": 0.9}, "momentum 0.9 .* sgd, not lion; set b1 instead"),
    (OptimizerConfig, {"name": "sgd", "momentum": 1.0}, r"momentum 1.0 must lie in \[0, 1\)"),
    (OptimizerConfig, {"name": "sgd", "nesterov": True}, "nesterov needs momentum above 0"),
    (OptimizerConfig, {"weight_decay": -0.1}, "weight_decay -0.1 must be at least 0"),
    (ScheduleConfig, {"warmup_fraction": 1.0}, r"warmup_fraction 1.0 must lie in \[0, 1\)"),
    (ScheduleConfig, {"warmup_fraction": -0.1}, "warmup_fraction -0.1 must lie"),
    (ScheduleConfig, {"final_fraction": 1.1}, r"final_fraction 1.1 must lie in \[0, 1\]"),
    (ScheduleConfig, {"decay": "constant"}, "final_fraction 0.1 contradicts .*set it to 1"),
    (AnomalyConfig, {"spike_factor": 1.0}, "spike_factor 1.0 must be above 1; use 2"),
    (AnomalyConfig, {"max_skipped_fraction": 1.5}, r"fraction 1.5 must lie in \[0, 1\]"),
    (AnomalyConfig, {"max_lost_rounds": 0}, "max_lost_rounds 0 must be at least 1"),
    (TrainConfig, {"total_tokens": 0}, "total_tokens 0 must be at least 1"),
    (TrainConfig, {"total_tokens": 1, "clip_norm": 0.0}, "clip_norm 0.0 must be above 0, or unset"),
    (TrainConfig, {"total_tokens": 1, "micro_batch": 0}, "micro_batch 0 must be .* or unset"),
    (TrainConfig, {"total_tokens": 1, "round_steps": 0}, "round_steps 0 must be at least 1"),
    (EvalConfig, {"every_tokens": -1}, "every_tokens -1 must be at least 0"),
    (EvalConfig, {"sequences": 0}, "sequences 0 must be at least 1"),
    (EvalConfig, {"first": -1}, "first -1 must be at least 0"),
    (EvalConfig, {"batch": 0}, "eval.batch 0 must be at least 1"),
    (CheckpointConfig, {"every_rounds": -1}, "every_rounds -1 must be at least 0"),
    (CheckpointConfig, {"keep": 0}, "keep 0 must be at least 1"),
    (CheckpointConfig, {"folder": "s3://b/runs"}, "s3:// is not known; .* use gs://BUCKET/PATH"),
    (CheckpointConfig, {"folder": "gs:/b/runs"}, "must be gs://BUCKET/PATH or an absolute path"),
    (CheckpointConfig, {"folder": "elsewhere"}, "must be gs://BUCKET/PATH or an absolute path"),
]


@pytest.mark.parametrize(("part", "settings", "message"), BAD_PARTS)
def test_a_part_that_contradicts_itself_is_refused(part, settings, message):
    with pytest.raises(ConfigError, match=message):
        part(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "lama-tiny"}, "no model named 'lama-tiny'; did you mean 'llama-tiny'"),
        ({"wan": "geomesh-azur"}, "no WAN named 'geomesh-azur'; did you mean 'geomesh-azure'"),
    ],
)
def test_a_modelled_clock_names_what_is_nearest(settings, message):
    with pytest.raises(ValueError, match=message):
        ClockConfig(**{"kind": "modelled", "wan": WAN} | settings)


MEASURED = RunConfig(
    name="run",
    model=get_model("llama-tiny"),
    train=TrainConfig(total_tokens=1000),
    slices=(SliceConfig("a"), SliceConfig("b", devices=2)),
    balance=BalanceConfig(inner_steps=2, batch_sizes=(4, 8)),
)
BY_SPEED = replace(
    MEASURED,
    slices=(SliceConfig("a", "eastus", speed=1.0), SliceConfig("b", "westus2", speed=2.0)),
    clock=ClockConfig("modelled", wan=WAN, base_step_seconds=1.0, base_batch=4),
)
BY_GPU = replace(
    MEASURED,
    slices=(SliceConfig("a", "eastus", gpu="h100"), SliceConfig("b", "westus2", gpu="l40s")),
    clock=ClockConfig("modelled", wan=WAN),
)
BERT = replace(
    MEASURED,
    model=get_model("bert-tiny"),
    data=DataConfig(
        tokenizer=TokenizerConfig(vocab_size=511), seq_len=256, masking=MaskingConfig()
    ),
)
CLUSTER = RunConfig(
    name="run",
    model=get_model("llama-tiny"),
    train=TrainConfig(total_tokens=1000),
    strategy="dp2-tp2-pp2-mb1-gb16",
)

LEGS = (ChainLeg(0, "dp1-tp1-pp1-mb8-gb8"), ChainLeg(100, "dp1-tp1-pp1-mb8-gb16"))
LADDER = ConaConfig(global_batches=(8, 16))
SCALING = ScalingConfig(base_batch=8)
SLICED = replace(MEASURED, balance=BalanceConfig(inner_steps=2), cona=LADDER, scaling=SCALING)


def with_slice(config, **changes):
    """`config` with changes to its first slice."""
    first, *rest = config.slices
    return {"slices": (replace(first, **changes), *rest)}


BAD_RUNS = [
    (MEASURED, {"seed": -1}, "seed -1 must lie in 0..4294967295"),
    (MEASURED, {"name": "../up"}, "name '../up' becomes a folder; use letters"),
    (MEASURED, {"name": ""}, "name '' becomes a folder"),
    (MEASURED, {"slices": ()}, "exactly one of .* and this one has none; give"),
    (MEASURED, {"strategy": CLUSTER.strategy}, r"exactly one of .* has \['slices', 'strategy'\]"),
    (CLUSTER, {"strategy": ""}, "exactly one of .* and this one has none; give"),
    (CLUSTER, {"strategy": "dp2"}, "'dp2' is no strategy; write it like dp2-tp2-pp2-mb1-gb16"),
    (
        CLUSTER,
        {"strategy": "dp1-tp3-pp1-mb1-gb16"},
        "model heads 4 does not divide by tp 3; use tp 2 or 4",
    ),
    (
        CLUSTER,
        {"strategy": "dp1-tp1-pp1-mb3-gb16"},
        "global_batch 16 does not divide by dp 1 x micro_batch 3; use 15 or 18",
    ),
    (MEASURED, {"balance": RunConfig.balance}, "balance is unset, and slices need it"),
    (CLUSTER, {"chain": LEGS}, r"exactly one of .* has \['strategy', 'chain'\]"),
    (CLUSTER, {"strategy": "", "chain": LEGS[1:]}, r"legs begin at \[100\] tokens; the first"),
    (CLUSTER, {"strategy": "", "chain": LEGS}, r"batches \[8, 16\] change.*set scaling to"),
    (
        CLUSTER,
        {"strategy": "", "chain": (LEGS[0], ChainLeg(9, "dp2-tp1-pp1-mb1-gb8"))},
        r"of \[1, 2\] devices; all must use the same",
    ),
    (CLUSTER, {"strategy": "", "cona": LADDER}, "cona changes the batch.*set scaling"),
    (
        CLUSTER,
        {"strategy": "", "cona": replace(LADDER, start="dp3"), "scaling": SCALING},
        "'dp3' is no strategy",
    ),
    (
        CLUSTER,
        {
            "noise": NoiseConfig(metric="preconditioned"),
            "train": replace(CLUSTER.train, optimizer=OptimizerConfig("sgd", 0.1)),
        },
        "sgd knows nothing; use 'plain'",
    ),
    (
        MEASURED,
        {"noise": NoiseConfig()},
        "noise is of a run by strategies, and this one has slices",
    ),
    (MEASURED, {"scaling": SCALING}, "scaling is of a run by strategies, and this one has slices"),
    (SLICED, {"scaling": None}, "cona changes the batch.*set scaling"),
    (SLICED, {"strategy": CLUSTER.strategy}, r"exactly one of .* \['slices', 'strategy', 'cona'\]"),
    (SLICED, {"balance": MEASURED.balance}, r"batch_sizes \(4, 8\) means nothing .* leave it at"),
    (
        SLICED,
        {"train": replace(MEASURED.train, micro_batch=2)},
        "train.micro_batch 2 means nothing",
    ),
    (SLICED, {"cona": replace(LADDER, start=CLUSTER.strategy)}, "cona.start 'dp2-.* means nothing"),
    (SLICED, {"cona": replace(LADDER, trial_share=0.1)}, "cona.trial_share 0.1 means nothing"),
    (SLICED, with_slice(SLICED, devices=2, tp=2), "slice a: tp 2 means nothing .* leave it at 1"),
    (SLICED, with_slice(SLICED, sharding="all"), "slice a: sharding 'all' means nothing"),
    (
        SLICED,
        with_slice(SLICED, devices=7),
        r"slice a: its 7 devices can take none of .* \(8, 16\): global_batch 8 does not divide by",
    ),
    (
        SLICED,
        {"slices": BY_SPEED.slices, "clock": BY_SPEED.clock},
        "slice a: speed 1.0 makes .* the smallest batch is always best; .* give each slice its gpu",
    ),
    (
        SLICED,
        {"slices": with_slice(BY_GPU, gpus=12)["slices"], "clock": BY_GPU.clock},
        "slice a: gpus 12 are not whole nodes of .* 8; use 8 or 16",
    ),
    (
        SLICED,
        {"slices": with_slice(BY_GPU, devices=3)["slices"], "clock": BY_GPU.clock},
        "cona.global_batches has 8, which does not divide by 3",
    ),
    (CLUSTER, {"balance": MEASURED.balance}, "balance says how slices work .* leave it unset"),
    (CLUSTER, {"exchange": ExchangeConfig(codec="int8")}, "exchange says how slices work"),
    (
        CLUSTER,
        {"train": TrainConfig(total_tokens=1, micro_batch=2)},
        "train.micro_batch 2 is of slices; the strategy names its own",
    ),
    (MEASURED, with_slice(MEASURED, name="b"), r"slices share a name: \['b', 'b'\]; rename one"),
    (
        MEASURED,
        {"data": DataConfig(tokenizer=TokenizerConfig(vocab_size=513))},
        "tokenizer.vocab_size 513 exceeds model.vocab_size 512; raise the model's or lower",
    ),
    (
        MEASURED,
        {"balance": BalanceConfig(inner_steps=2, batch_sizes=(4, 7))},
        "has 7, which does not divide by 2, the 2 devices of slice b that .*; use 6 or 8",
    ),
    (
        MEASURED,
        {"train": replace(MEASURED.train, micro_batch=4)},
        "has 4, which .* 2 devices of slice b .* times train.micro_batch 4; use 8",
    ),
    (
        MEASURED,
        {"train": replace(MEASURED.train, micro_batch=3)},
        "has 4, which .* 1 devices of slice a .* times train.micro_batch 3; use 3 or 6",
    ),
    (
        MEASURED,
        with_slice(MEASURED, devices=3, tp=3),
        "slice a: .* model heads 4 does not divide by tp 3; use tp 2 or 4",
    ),
    (
        MEASURED,
        with_slice(MEASURED, devices=4, tp=1, pp=4),
        "slice a: .* model layers 2 does not divide by pp 4; use pp 2",
    ),
    (
        MEASURED,
        with_slice(MEASURED, devices=8, pp=2)
        | {"balance": BalanceConfig(inner_steps=2, batch_sizes=(4,))},
        "has 4, which does not divide by 8, the 8 devices of slice a that take sequences; use 8",
    ),
    (
        MEASURED,
        with_slice(MEASURED, devices=2, pp=2) | {"train": replace(MEASURED.train, micro_batch=4)},
        "1 micro-batches are fewer than pp 2 stages; use global_batch 8 .*or micro_batch 2",
    ),
    (
        MEASURED,
        with_slice(MEASURED, sharding="all"),
        "slice a: .* sharding 'all' needs dp above 1; use sharding 'none'",
    ),
    (
        BERT,
        {"data": replace(BERT.data, seq_len=257)},
        "data.seq_len 257 exceeds model.context 256, .*; use 256 or fewer",
    ),
    (
        MEASURED,
        {"model": get_model("gpt-tiny"), "data": replace(MEASURED.data, seq_len=300)},
        "data.seq_len 300 exceeds model.context 256, .*; use 256 or fewer",
    ),
    (
        BERT,
        {"data": replace(BERT.data, masking=None)},
        r"a bert .* sees the tokens it predicts .*; set data.masking to",
    ),
    (
        MEASURED,
        {"data": BERT.data},
        "data.masking hides tokens .* this llama sees one; set data.masking to None, choose a bert",
    ),
    (
        BERT,
        {"model": get_model("gpt-tiny")},
        "data.masking hides tokens .* this gpt sees one; set data.masking to None, choose a bert",
    ),
    (
        BERT,
        {"data": replace(BERT.data, tokenizer=TokenizerConfig(vocab_size=512))},
        "vocab_size 512 and its mask token exceeds model.vocab_size 512; raise",
    ),
    (
        MEASURED,
        with_slice(MEASURED, speed=2.0),
        r"slices \['a'\] set a speed, gpu or gpus, .*measured",
    ),
    (MEASURED, with_slice(MEASURED, gpu="h100"), r"slices \['a'\] set .*; leave them unset or"),
    (BY_SPEED, with_slice(BY_SPEED, region="mars"), "region 'mars' is not in WAN .*use one of"),
    (BY_SPEED, with_slice(BY_SPEED, region=""), "region '' is not in WAN .*use one of"),
    (BY_SPEED, with_slice(BY_SPEED, speed=None), r"either speed \(None\) or gpu \(''\), exactly"),
    (BY_SPEED, with_slice(BY_SPEED, gpu="h100"), r"either speed \(1.0\) or gpu \('h100'\), exact"),
    (BY_SPEED, with_slice(BY_SPEED, speed=None, gpu="h100"), "some slices give a speed and others"),
    (BY_SPEED, {"clock": BY_GPU.clock}, "slices given by speed need clock.base_step_seconds"),
    (BY_GPU, {"clock": BY_SPEED.clock}, "slices given by gpu must not have them"),
    (BY_GPU, with_slice(BY_GPU, gpu="h1000"), "no GPU named 'h1000'; did you mean 'h100'"),
]


@pytest.mark.parametrize(("config", "changes", "message"), BAD_RUNS)
def test_parts_that_contradict_each_other_are_refused(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(config, **changes)


@pytest.mark.parametrize(
    ("slice_", "micro_batch", "batch", "strategy"),
    [
        (SliceConfig("a"), None, 8, "dp1-tp1-pp1-mb8-gb8"),
        (SliceConfig("a", devices=4), None, 8, "dp4-tp1-pp1-mb2-gb8"),
        (SliceConfig("a", devices=4), 1, 8, "dp4-tp1-pp1-mb1-gb8"),
        # Devices that share a layer take no sequences of their own; stages want one each at once.
        (SliceConfig("a", devices=4, tp=4), None, 5, "dp1-tp4-pp1-mb5-gb5"),
        (SliceConfig("a", devices=8, tp=2, pp=2), None, 8, "dp2-tp2-pp2-mb2-gb8"),
        (
            SliceConfig("a", devices=2, remat="full", sharding="all"),
            None,
            4,
            "dp2-tp1-pp1-mb2-gb4-fsdp-full",
        ),
    ],
)
def test_a_slice_computes_a_batch_in_as_few_micro_batches_as_may_be(
    slice_, micro_batch, batch, strategy
):
    assert str(slice_strategy(slice_, micro_batch, batch)) == strategy
    train = replace(MEASURED.train, micro_batch=micro_batch)
    balance = BalanceConfig(inner_steps=2, batch_sizes=(batch,))
    replace(MEASURED, slices=(slice_,), train=train, balance=balance)  # is a run


def test_links_of_unknown_round_trip_are_refused_before_the_run(tmp_path):
    links = tmp_path / "links.csv"
    links.write_text("src,dst,gbit_per_second,rtt_ms\neastus,westus2,1,\n")
    with pytest.raises(ConfigError, match="eastus -> westus2 has no rtt_ms in either direction"):
        replace(BY_GPU, clock=ClockConfig("modelled", wan=str(links)))


def test_the_clocked_model_is_the_trained_one_unless_another_is_named():
    assert BY_GPU.clocked_model() == BY_GPU.model
    other = replace(BY_GPU, clock=replace(BY_GPU.clock, model="llama-150m"))
    assert other.clocked_model() == get_model("llama-150m")


@pytest.mark.parametrize(
    ("codec", "slices", "schedule"),
    [
        ("sign", 4, "gather"),
        ("sign", 5, "two_phase"),
        ("int8", 2, "gather"),
        ("int8", 4, "two_phase"),
        ("fp32", 2, "two_phase"),
        ("fp16", 2, "two_phase"),
    ],
)
def test_auto_takes_the_schedule_that_sends_less(codec, slices, schedule):
    config = ExchangeConfig(codec=codec, error_feedback=codec != "fp32")
    assert config.resolve_schedule(slices) == schedule
    assert replace(config, schedule="gather").resolve_schedule(slices) == "gather"


def test_every_field_is_read_by_what_runs():
    """A knob that nothing but the config itself looks at does nothing."""
    config = Path(geojax.config.__file__).parent
    folders = (config.parent, Path(geojax.meshes.__file__).parent)
    read = set()
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        if path.parent != config:
            nodes = ast.walk(ast.parse(path.read_text()))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    parts = {part for part in vars(geojax.config).values() if is_dataclass(part)}
    assert RunConfig in parts
    unread = [f"{p.__name__}.{f.name}" for p in parts for f in fields(p) if f.name not in read]
    assert not unread


def test_another_batch_brings_a_rule_for_the_rate_unless_there_is_one():
    """The rate counts as tuned at the batch that the config had."""
    config = load_config("gpt-tiny")
    batch = parse_strategy(config.strategy).global_batch
    same, other = f"dp1-tp1-pp1-mb1-gb{batch}", f"dp1-tp1-pp1-mb1-gb{2 * batch}"
    assert with_strategy(config, same).scaling is None
    assert with_strategy(config, other).scaling == ScalingConfig(batch)
    chained = with_chain(config, (ChainLeg(0, same), ChainLeg(1000, other)))
    assert chained.scaling == ScalingConfig(batch)
    # And not at the batches that came after.
    assert with_strategy(with_strategy(config, other), same).scaling == ScalingConfig(batch)
    given = replace(config, scaling=ScalingConfig(4, "linear"))
    assert with_strategy(given, other).scaling == given.scaling
    assert with_strategy(replace(config, strategy="", chain=(ChainLeg(0, same),)), other).scaling
    with pytest.raises(ConfigError, match="'dp0'"):
        with_strategy(config, "dp0")
    with pytest.raises(ConfigError, match="'x'"):
        with_chain(config, (ChainLeg(0, "x"),))
