# SPDX-License-Identifier: Apache-2.0
"""The step-time model obeys bounds that hold whatever the coefficients, and learns from rows."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from geojax.meshes.hardware import GPUS, Cluster
from geojax.meshes.strategy import Strategy
from geojax.meshes.timing import PARTS, StepCase
from geojax.meshes.timing_a100 import A100, CALIBRATED_REMAT, extrapolated
from geojax.meshes.timing_fit import PRIOR, fit, read_rows, recalibrate
from geojax.models.config import get_model

A100_NODE = Cluster(GPUS["a100-80gb"])
CASES, SECONDS = read_rows(Path(__file__).parent / "vtrain_rows.csv", A100_NODE, CALIBRATED_REMAT)
GPT = get_model("gpt-3-1.3b")
BASE = StepCase(GPT, 1024, Strategy(2, 2, 2, 2, 32), A100_NODE)


def with_strategy(case: StepCase = BASE, **fields) -> StepCase:
    return replace(case, strategy=replace(case.strategy, **fields))


def errors(model, cases, seconds) -> np.ndarray:
    return np.abs(model.seconds_of(cases) / np.asarray(seconds) - 1)


def test_the_constants_predict_the_rows_that_they_were_fitted_to():
    # 0.3 % over all rows, which the last digits of the constants do not move; the largest is 3 %.
    assert np.median(errors(A100, CASES, SECONDS)) < 0.006
    assert errors(A100, CASES, SECONDS).max() < 0.05


@pytest.mark.parametrize(("count", "median"), [(20, 0.08), (40, 0.04)])
def test_few_rows_predict_the_others(count, median):
    model = fit(CASES[:count], SECONDS[:count])
    error = np.median(errors(model, CASES[count:], SECONDS[count:]))
    assert error < median
    assert error < np.median(errors(PRIOR, CASES[count:], SECONDS[count:])) / 3


def test_one_row_moves_the_prior_towards_it():
    model = fit(CASES[:1], SECONDS[:1])
    assert errors(model, CASES[:1], SECONDS[:1]) < errors(PRIOR, CASES[:1], SECONDS[:1])
    assert all(value > 0 for value in vars(model.coefficients).values())


@pytest.mark.parametrize("model", [A100, PRIOR], ids=["a100", "prior"])
def test_parts_are_at_least_0_and_sum_to_the_step(model):
    for case in CASES:
        parts = model.breakdown(case)
        assert tuple(parts) == PARTS
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(model.seconds(case))
    together = model.seconds_of(CASES)
    np.testing.assert_allclose(together, [model.seconds(case) for case in CASES])


def test_parts_without_their_cause_are_0():
    alone = A100.breakdown(replace(BASE, strategy=Strategy(1, 1, 1, 2, 8)))
    assert {name for name, value in alone.items() if value == 0} == {"tp", "pp", "bubble", "dp"}
    assert min(A100.breakdown(BASE).values()) > 0


@pytest.mark.parametrize("slow", ["a100-80gb", "a100-40gb"])
@pytest.mark.parametrize("case", CASES[:10], ids=lambda case: str(case.strategy))
def test_a_faster_gpu_is_not_slower_but_launches_stay(slow, case):
    seconds = [
        A100.seconds(replace(case, cluster=Cluster(GPUS[name]))) for name in (slow, "h100", "b200")
    ]
    assert seconds == sorted(seconds, reverse=True)
    dreamt = replace(GPUS["b200"], bf16_flops_per_second=1e20, memory_bytes_per_second=1e20)
    launches = 3 * A100.coefficients.launch_seconds * 0.7 * case.model.layers / case.strategy.pp
    bound = launches * case.strategy.micro_batches
    assert A100.seconds(replace(case, cluster=Cluster(dreamt))) > bound


def test_more_layers_longer_sequences_and_larger_batches_take_longer():
    seconds = A100.seconds(BASE)
    assert A100.seconds(replace(BASE, model=replace(GPT, layers=48))) > 1.5 * seconds
    assert A100.seconds(replace(BASE, seq_len=2048)) > 1.5 * seconds
    assert A100.seconds(with_strategy(global_batch=64)) > 1.5 * seconds


def test_the_share_of_the_bubble_falls_with_micro_batches_and_chunks():
    def share(**fields) -> float:
        case = replace(BASE, strategy=replace(Strategy(1, 2, 4, 2, 32), **fields))
        return A100.breakdown(case)["bubble"] / A100.seconds(case)

    shares = [share(global_batch=batch) for batch in (16, 32, 64)]
    assert shares == sorted(shares, reverse=True)
    # 3 of 16 + 3 ticks with equal stages; the last one has the head, and waits less.
    assert 0.7 * 3 / 19 < shares[1] < 3 / 19
    assert share(interleave=3) < shares[1] / 2


def test_recomputation_costs_a_forward_pass_of_what_it_repeats():
    none, matmuls, full = (
        A100.breakdown(with_strategy(remat=remat, tp=1, dp=4))
        for remat in ("none", "matmuls", "full")
    )
    assert none["compute"] < matmuls["compute"] < full["compute"] < 4 / 3 * none["compute"]
    assert sum(none.values()) < sum(matmuls.values()) < sum(full.values())
    assert none["optimizer"] == full["optimizer"]


def test_sharding_keeps_or_raises_traffic_and_shares_the_update():
    none, zero, fsdp = (
        A100.breakdown(with_strategy(sharding=sharding))
        for sharding in ("none", "optimizer", "all")
    )
    assert zero["dp"] == none["dp"]
    assert fsdp["dp"] == pytest.approx(1.5 * none["dp"])
    assert zero["optimizer"] == fsdp["optimizer"] == pytest.approx(none["optimizer"] / 2)


def test_traffic_that_leaves_the_node_is_slower():
    node, nodes = (Cluster(GPUS["a100-80gb"], n, 8 // n) for n in (1, 4))
    # Rings over 4 GPUs, 2 in each node; one over 2 GPUs of two nodes; transfers between nodes.
    for part, strategy, ratio in (
        ("dp", Strategy(4, 1, 1, 2, 32), 300 / 50),
        ("tp", Strategy(1, 4, 1, 2, 32), 300 / 50),
        ("dp", Strategy(2, 2, 1, 2, 32), 300 / 25),
        ("pp", Strategy(1, 1, 4, 2, 32), 300 / 25),
    ):
        inside, across = (
            A100.breakdown(replace(BASE, strategy=strategy, cluster=cluster))[part]
            for cluster in (node, nodes)
        )
        assert across == pytest.approx(ratio * inside)
    # Two rings that pass through the same nodes share the adapters.
    assert nodes.ring_bytes_per_second(4, 2) == nodes.ring_bytes_per_second(8, 1) / 2


def test_fewer_kv_heads_and_a_narrower_mlp_take_less():
    llama = replace(BASE, model=get_model("llama-3.2-1b"))
    for less in (replace(llama.model, mlp_dim=4096), replace(llama.model, kv_heads=4)):
        assert PRIOR.seconds(replace(llama, model=less)) < PRIOR.seconds(llama)


@pytest.mark.parametrize("count", [3, 5])
def test_a_few_rows_of_a_slower_machine_correct_all_others_and_keep_the_ranking(count):
    slower = 1.5 * np.asarray(SECONDS)
    model = recalibrate(A100, CASES[:count], slower[:count])
    assert errors(model, CASES[count:], slower[count:]).max() < 0.06
    assert np.median(errors(model, CASES[count:], slower[count:])) < 0.02
    before, after = A100.seconds_of(CASES), model.seconds_of(CASES)
    pairs = [(i, j) for i in range(60) for j in range(60) if before[i] > 1.05 * before[j]]
    assert all(after[i] > after[j] for i, j in pairs)


def test_recalibration_learns_that_only_launches_are_cheaper():
    jitted = replace(A100, coefficients=replace(A100.coefficients, launch_seconds=0.3e-3))
    truth = jitted.seconds_of(CASES)
    model = recalibrate(A100, CASES[:20], truth[:20])
    assert np.median(errors(model, CASES[20:], truth[20:])) < 0.05
    assert np.median(errors(A100, CASES[20:], truth[20:])) > 0.15


def test_rows_like_the_calibrated_ones_are_not_extrapolated():
    assert [extrapolated(case) for case in CASES] == [None] * len(CASES)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(BASE, cluster=Cluster(GPUS["h100"])), "GPU"),
        (replace(BASE, cluster=replace(A100_NODE, nodes=2, gpus_per_node=4)), "several nodes"),
        (replace(BASE, model=get_model("bert-large")), "family bert"),
        (replace(BASE, model=replace(GPT, dim=4096)), "width 4096"),
        (replace(BASE, model=replace(GPT, layers=32)), "32 layers"),
        (replace(BASE, seq_len=2048), "sequences of 2048"),
        (with_strategy(remat="full"), "remat full"),
        (with_strategy(sharding="all"), "sharding all"),
        (with_strategy(interleave=2), "interleave 2"),
        (with_strategy(micro_batch=16), "micro-batches of 16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_lies_outside_the_rows_says_why(case, reason):
    assert reason in extrapolated(case)


def test_rows_that_cannot_be_fitted_are_refused():
    with pytest.raises(ValueError, match="no rows"):
        fit([], [])
    with pytest.raises(ValueError, match="2 cases and 1 seconds"):
        recalibrate(A100, CASES[:2], SECONDS[:1])
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="row 1 took"):
            fit(CASES[:2], [SECONDS[0], wrong])


def test_cases_that_cannot_run_are_refused():
    with pytest.raises(ValueError, match="wants 16 GPUs, and the cluster has 8; use 2 nodes"):
        with_strategy(dp=4)
    with pytest.raises(ValueError, match="global_batch 2 is less than dp x micro_batch 4"):
        with_strategy(global_batch=2)
    with pytest.raises(ValueError, match="seq_len 0"):
        replace(BASE, seq_len=0)
    with pytest.raises(ValueError, match="cluster nodes 0"):
        Cluster(GPUS["h100"], nodes=0)


def test_a_table_without_times_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("GPUs,layers\n8,12\n")
    with pytest.raises(ValueError, match="no column"):
        read_rows(tmp_path / "rows.csv", A100_NODE, "none")


def test_importing_does_not_import_jax():
    code = "import sys, geojax.meshes.timing_a100; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
