# SPDX-License-Identifier: Apache-2.0
"""Estimated memory: exact where it can be, and right in which way it moves."""

from dataclasses import fields, replace

import jax
import numpy as np
import pytest

from geojax.config import OptimizerConfig, TrainConfig
from geojax.meshes.memory import step_memory
from geojax.meshes.strategy import Strategy, parse_strategy
from geojax.models.config import TransformerConfig, get_model
from geojax.train.program import Program, Task

SMALL = TransformerConfig(
    300, dim=64, layers=8, heads=8, kv_heads=4, mlp_dim=128, tied=False, family="llama"
)
GPT = get_model("gpt-3-1.3b")
BASE = Strategy(2, 2, 2, 2, 32)


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize(
    "text",
    [
        "dp1-tp1-pp1-mb1-gb8",
        "dp8-tp1-pp1-mb1-gb8-zero",
        "dp8-tp1-pp1-mb1-gb8-fsdp",
        "dp2-tp2-pp2-mb1-gb8-fsdp",
        "dp2-tp2-pp2x2-mb1-gb8-zero",
        "dp1-tp4-pp2-mb1-gb8",
    ],
)
def test_state_is_what_a_program_keeps_on_a_device(text, optimizer):
    strategy = parse_strategy(text)
    train = TrainConfig(total_tokens=1, optimizer=OptimizerConfig(name=optimizer))
    program = Program(Task(SMALL, train, 16), strategy, jax.devices()[: strategy.devices])
    kept = sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for x in jax.tree.leaves((program.abstract_state.params, program.abstract_state.opt_state))
        if x.ndim  # counters aside
    )
    slots = {"adamw": 2, "lion": 1}[optimizer]
    assert step_memory(SMALL, 16, strategy, slots).state_bytes == kept


def test_parts_are_not_negative_and_sum_to_the_total():
    memory = step_memory(GPT, 2048, BASE)
    parts = [getattr(memory, field.name) for field in fields(memory)]
    assert min(parts) >= 0
    assert sum(parts) == memory.total_bytes


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"micro_batch": 2}, {"micro_batch": 1}),
        ({"remat": "none"}, {"remat": "matmuls"}),
        ({"remat": "matmuls"}, {"remat": "full"}),
        ({"sharding": "none"}, {"sharding": "optimizer"}),
        ({"sharding": "optimizer"}, {"sharding": "all"}),
        ({"tp": 1}, {"tp": 2}),
        ({"tp": 2}, {"tp": 4}),
    ],
)
def test_memory_moves_as_it_must(more, less):
    large, small = (
        step_memory(GPT, 2048, replace(BASE, **changes)).total_bytes for changes in (more, less)
    )
    assert large > small


def test_probabilities_that_are_dropped_are_written_out():
    bert = get_model("bert-large")
    plain = replace(bert, attention_dropout=0.0)
    sizes = [step_memory(m, 512, BASE).total_bytes for m in (bert, plain)]
    assert sizes[0] > sizes[1]


@pytest.mark.aot
def test_estimate_is_near_what_the_compiler_counts(tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra aot")
    from geojax.meshes.candidates import Job
    from geojax.meshes.hardware import Cluster, get_gpu
    from geojax.plan.exact import exact_bytes

    strategy = parse_strategy("dp4-tp2-pp1-mb2-gb16-zero")
    model = get_model("gpt-2")
    job = Job(model, 1024, Cluster(get_gpu("h100"), 1, 8), "adamw", (16,), (2,))
    exact = exact_bytes(job, "h100", strategy, tmp_path)
    assert step_memory(model, 1024, strategy).total_bytes == pytest.approx(exact, rel=0.15)
    assert exact_bytes(job, "h100", strategy, tmp_path) == exact
    assert len(list(tmp_path.iterdir())) == 1
