# SPDX-License-Identifier: Apache-2.0
"""A plan names what fits, says what it does not know, and why the rest is out."""

import json
import math
from dataclasses import replace

import jax
import pytest
from matplotlib.figure import Figure

from geojax.cli import main
from geojax.config import ConfigError
from geojax.meshes.aot import AotUnavailableError
from geojax.meshes.calibration import calibration_json, read_calibration
from geojax.meshes.candidates import Job, frontier, make_plan
from geojax.meshes.hardware import Cluster, get_gpu
from geojax.meshes.strategy import parse_strategy, problems
from geojax.meshes.timing import StepCase
from geojax.meshes.timing_a100 import A100
from geojax.meshes.timing_fit import recalibrate
from geojax.models.config import get_model
from geojax.plan import command
from geojax.plan.command import PlanOptions, run_plan
from geojax.plan.plot import plot_plan

QUICK = PlanOptions("gpt-2", gpus_per_node=4, global_batches=(16, 64), exact=False)


def job(**changes):
    values = {
        "model": get_model("gpt-3-1.3b"),
        "seq_len": 2048,
        "cluster": Cluster(get_gpu("h100"), 1, 8),
        "optimizer": "adamw",
        "global_batches": (16, 64),
        "micro_batches": (1, 2),
    }
    return Job(**(values | changes))


@pytest.fixture(scope="module")
def plan():
    return make_plan(job(), A100, lambda case: None)


def test_candidates_are_legal_fit_and_are_sorted_by_speed(plan):
    speeds = [c.samples_per_second for c in plan.candidates]
    assert speeds == sorted(speeds, reverse=True)
    for candidate in plan.candidates:
        assert problems(candidate.strategy, job().model) == []
        assert candidate.strategy.devices == 8
        assert candidate.memory_bytes <= job().usable_bytes
        assert 0 < candidate.mfu < 1
    assert len({str(c.strategy) for c in plan.candidates}) == len(plan.candidates)


def test_every_layout_is_a_candidate_or_has_a_reason(plan):
    named = {c.strategy for c in plan.candidates} | {s for s, _ in plan.excluded}
    layouts = {(s.dp, s.tp, s.pp, s.micro_batch, s.global_batch) for s in named}
    every = {
        (8 // (tp * pp), tp, pp, micro, batch)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8)
        if 8 % (tp * pp) == 0
        for micro in (1, 2)
        for batch in (16, 64)
    }
    assert layouts == every
    assert all(reason for _, reason in plan.excluded)


def test_frontier_is_the_fastest_of_each_batch(plan):
    best = frontier(plan.candidates)
    assert [c.strategy.global_batch for c in best] == [16, 64]
    for candidate in plan.candidates:
        leader = next(c for c in best if c.strategy.global_batch == candidate.strategy.global_batch)
        assert leader.step_seconds <= candidate.step_seconds


def test_tensor_parallelism_stays_inside_a_node():
    found = make_plan(
        job(cluster=Cluster(get_gpu("h100"), 4, 2), micro_batches=(1,)), A100, lambda case: None
    )
    assert {c.strategy.tp for c in found.candidates} <= {1, 2}
    assert any("leaves the node of 2 GPUs" in reason for _, reason in found.excluded)


def test_what_cannot_fit_says_how_many_gpus_the_state_alone_takes():
    small = Cluster(replace(get_gpu("h100"), memory_bytes=4 * 10**9), 1, 2)
    with pytest.raises(ValueError, match=r"no strategy fits 2 GPUs .* 21.1 GB, \d+ GPUs or more"):
        make_plan(job(cluster=small), A100, lambda case: None)


def test_the_table_says_which_clock_and_what_is_estimated(capsys):
    run_plan(replace(QUICK, excluded=True))
    text = " ".join(capsys.readouterr().out.split())
    for part in ("modelled clock", "estimated", "Usable:", "extrapolations", "micro-batches are"):
        assert part in text


def test_json_and_picture_hold_all_candidates(tmp_path):
    run_plan(replace(QUICK, json=tmp_path / "plan.json", out=tmp_path))
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["clock"] == "modelled"
    for row in content["candidates"]:
        strategy = parse_strategy(row["strategy"])
        assert row["samples_per_second"] == pytest.approx(
            strategy.global_batch / row["step_seconds"]
        )
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_a_picture_of_one_batch_shows_it(plan, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    one = [c for c in plan.candidates if c.strategy.global_batch == 16]
    plot_plan(one, job(), "one", tmp_path / "plan.png")
    left, right = drawn[0].axes[0].get_xlim()
    assert left < 16 < right < 64


def test_without_the_compiler_the_plan_says_so_and_goes_on(monkeypatch, capsys):
    def missing(*_):
        raise AotUnavailableError("the compiler for GPUs is not installed")

    monkeypatch.setattr(command, "exact_bytes", missing)
    run_plan(replace(QUICK, exact=True))
    assert "is not installed" in " ".join(capsys.readouterr().out.split())


def test_a_leader_that_does_not_fit_drops_out_and_the_next_is_counted(monkeypatch, tmp_path):
    counted = []

    def exact(job, gpu, strategy):
        counted.append(str(strategy))
        return job.usable_bytes + 1 if len(counted) == 1 else 10**9

    monkeypatch.setattr(command, "exact_bytes", exact)
    run_plan(replace(QUICK, exact=True, top=2, json=tmp_path / "plan.json"))
    content = json.loads((tmp_path / "plan.json").read_text())
    names = [row["strategy"] for row in content["candidates"] if row["exact"]]
    assert len(counted) == 3
    assert sorted(names) == sorted(counted[1:])
    reasons = dict(content["excluded"])
    assert reasons[counted[0]].startswith("needs")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt-33"}, "no model named 'gpt-33'; did you mean 'gpt-3"),
        ({"gpu": "h101"}, "no GPU named 'h101'; did you mean 'h100'"),
        ({"gpu_flops": 1e15}, "needs all of --gpu-flops, --gpu-memory"),
        ({"gpu_flops": 0.0}, "needs all of --gpu-flops, --gpu-memory"),
        (
            {"gpu_flops": 1e15, "gpu_memory": math.inf, "gpu_bandwidth": 1e12, "gpu_link": 1e11},
            "each finite and above 0",
        ),
        ({"network": math.inf}, "network inf must be a finite number of bytes a second"),
        ({"seq_len": 0}, "seq_len 0 must be at least 1"),
        ({"nodes": 10**11}, "100,000,000,000 nodes of .* up to 4,096"),
        ({"seq_len": 4096}, "seq_len 4096 exceeds the model's context 1024"),
        ({"nodes": 0}, "nodes 0 must be at least 1"),
        ({"global_batches": (0,)}, "must each be at least 1"),
    ],
)
def test_bad_options_are_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        run_plan(replace(QUICK, **changes))


def test_a_gpu_of_ones_own_is_four_numbers(capsys):
    own = {"gpu_flops": 5e14, "gpu_memory": 6e10, "gpu_bandwidth": 2e12, "gpu_link": 1e11}
    run_plan(replace(QUICK, gpu="mine", **own))
    assert "56.0 GB of 60" in " ".join(capsys.readouterr().out.split())


def test_a_calibration_is_read_back_as_it_was_and_corrects_the_times(tmp_path):
    cluster = Cluster(get_gpu("a100-80gb"), 1, 8)
    texts = ("dp8-tp1-pp1-mb1-gb8", "dp4-tp2-pp1-mb1-gb8", "dp2-tp2-pp2-mb1-gb8")
    cases = [StepCase(get_model("gpt-2"), 1024, parse_strategy(text), cluster) for text in texts]
    slower = [2 * A100.seconds(case) for case in cases]
    model = recalibrate(A100, cases, slower)
    path = tmp_path / "calibration.json"
    path.write_text(calibration_json(model, cases, slower, {}))
    read = read_calibration(path)
    for case, want in zip(cases, slower, strict=True):
        assert read.seconds(case) == model.seconds(case)
        assert read.seconds(case) == pytest.approx(want, rel=0.1)
    path.write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        read_calibration(path)


def test_the_command_runs_and_starts_no_gpu_backend(capsys):
    assert main(["plan", "gpt-2", "--gpus-per-node", "2", "--no-exact"]) == 0
    assert "Fastest" in capsys.readouterr().out
    assert main(["plan", "gpt-2", "--gpu", "h10"]) == 2
    assert {d.platform for d in jax.devices()} == {"cpu"}
