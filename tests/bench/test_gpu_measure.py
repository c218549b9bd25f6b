# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu.py: it ends in time, keeps what it found, and a plan reads its file."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from geojax.bench.attention import (
    SMALL,
    TRAINING_LIMIT,
    Case,
    largest_errors,
    make_arguments,
    training_errors,
)
from geojax.bench.gpu import run as running
from geojax.bench.gpu.run import SHARES, content_json, measure
from geojax.bench.gpu.stages import Stage, run_child, run_stage, run_stages
from geojax.bench.gpu.steps import FOLLOWS, KNOWN, OTHERS, TRAINING, entropy, structured_batch
from geojax.bench.gpu.words import outcome, summary
from geojax.bicache.kernels.reference import attend_xla
from geojax.cli import main
from geojax.config import ConfigError
from geojax.meshes.calibration import read_calibration, read_step_row, step_row
from geojax.meshes.hardware import Cluster, get_gpu
from geojax.meshes.strategy import parse_strategy, problems
from geojax.meshes.timing import StepCase
from geojax.meshes.timing_a100 import A100
from geojax.models.attention import attend
from geojax.models.config import get_model

ROOT = Path(__file__).parents[2]


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def stage(seconds, clock, saved=None):
    return Stage(seconds, (saved if saved is not None else []).append, clock)


def test_pieces_that_would_outlast_the_stage_are_left_out_by_name():
    clock = FakeClock()
    one = stage(10, clock)
    for piece in one.each(["a", "b", "c", "d", ("e", 1)]):
        clock.now += {"a": 2.0, "b": 4.0}.get(piece, 1.0)
    # After a and b, 4 seconds are left, and the longest took 4: c may be as long. Then 3 are left.
    assert one.left_out == ["d", "e, 1"]
    assert clock.now <= 110


def test_a_share_of_the_time_is_of_what_is_left():
    clock = FakeClock()
    one = stage(20, clock)
    clock.now += 10
    for _ in one.each(range(10), 0.5):
        clock.now += 1
    assert clock.now == 115
    assert one.left_out == ["5", "6", "7", "8", "9"]


def test_a_piece_that_fails_is_recorded_and_the_rest_goes_on():
    saved = []
    one = stage(10, FakeClock(), saved)

    def work(one):
        for piece in one.each("abc"):
            with one.trying(piece):
                one.result[piece] = 1
                if piece == "b":
                    raise ValueError("b is odd")
        raise RuntimeError("at the end")

    run_stage(one, work)
    assert one.result == {"a": 1, "b": 1, "c": 1}
    assert one.errors == {
        "b": "ValueError: b is odd",
        "the stage as a whole": "RuntimeError: at the end",
    }
    assert saved[-1]["doing"] == ""
    assert len(saved) > 3


def test_stages_share_the_time_that_is_there():
    clock, given, found = FakeClock(), {}, {}
    took = {"a": 10.0, "b": 80.0, "c": 20.0, "d": 1.0}

    def run(name, seconds):
        given[name] = seconds
        clock.now += took[name]
        if name == "a":
            raise OSError("no such program")
        return stage(0, clock).content()

    run_stages(dict.fromkeys(took, 1.0), 200.0, run, found.__setitem__, clock)
    # What a leaves the others have; what b takes beyond its share they lack; d has nothing.
    assert given == {"a": 25.0, "b": 30.0, "c": 5.0}
    assert found["a"]["errors"] == {"the stage as a whole": "OSError: no such program"}
    assert found["d"]["skipped"] == "no time was left"
    assert [bool(content["errors"]) for content in found.values()] == [True, False, False, False]


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ("", None),
        ("import os; os.abort()", "the process ended with -6"),
        ("import sys; sys.exit('the driver is gone')", "the driver is gone"),
        ("import time; time.sleep(60)", "ended after 1 s, its stage's limit"),
    ],
)
def test_what_a_process_found_is_kept_however_it_ends(ending, error):
    saved = stage(0, FakeClock()).content() | {
        "result": {"speed": 3},
        "doing": "a matrix product" if ending else "",
    }
    code = f"import sys; open(sys.argv[1], 'w').write({json.dumps(saved)!r}); {ending}"
    content = run_child([sys.executable, "-S", "-c", code], {}, 1.0 if "sleep" in ending else 30.0)
    assert content["result"] == {"speed": 3}
    assert content["seconds"] < 30
    if error is None:
        assert content["errors"] == {}
    else:
        assert error in content["errors"]["a matrix product"]


def test_a_process_that_never_says_anything_is_a_failure():
    content = run_child([sys.executable, "-S", "-c", "raise SystemExit(3)"], {}, 30.0)
    assert "the process ended with 3" in content["errors"]["starting"]


CASES = [
    StepCase(get_model(model), 1024, parse_strategy(f"dp1-tp1-pp1-{rest}"), Cluster(gpu, 1, 1))
    for gpu in [get_gpu("h200")]
    for model, rest in [("gpt-2", "mb1-gb4"), ("gpt-2", "mb4-gb4"), ("llama-3.2-1b", "mb2-gb4")]
]


def content_of(result=None, **changes):
    found = {"skipped": None, "errors": {}, "left_out": [], "result": result or {}, "seconds": 7.0}
    return found | changes


def test_a_row_is_read_back_as_it_was():
    for case in CASES:
        assert read_step_row(json.loads(json.dumps(step_row(case, 0.5)))) == (case, 0.5)


def test_a_plan_reads_the_file_as_soon_as_a_step_was_timed(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    measured = {"device": "made up", "stages": {"kernels": content_of({"checked": []})}}
    path.write_text(content_json({"device": "made up"}, measured))
    with pytest.raises(ValueError, match="holds no timed step"):
        read_calibration(path)
    seconds = [0.2 * A100.seconds(case) for case in CASES]
    rows = [step_row(case, s) for case, s in zip(CASES, seconds, strict=True)]
    measured["stages"]["train"] = content_of({"rows": rows[:2], "training": None})
    measured["stages"]["steps"] = content_of({"rows": rows[2:]})
    path.write_text(content_json({"device": "made up"}, measured))
    model = read_calibration(path)
    for case, wanted in zip(CASES, seconds, strict=True):
        assert model.seconds(case) == pytest.approx(wanted, rel=0.1)
    content = json.loads(path.read_text())
    assert content["rows"] == rows
    assert content["measured"]["device"] == "made up"
    assert content["measured"]["stages"]["train"]["result"] == {"training": None}
    fit = content["measured"]["fit"]
    assert fit["rows"] == 3
    assert fit["median_error_before"] == pytest.approx(4)
    assert fit["median_error"] < fit["median_error_left_out"] < 1
    where = ["--gpu", "h200", "--gpus-per-node", "1", "--global-batches", "4", "--no-exact"]
    assert main(["plan", "gpt-2", *where, "--calibration", str(path)]) == 0
    assert "calibrated on" in capsys.readouterr().out


def faked(monkeypatch, stages):
    """`measure` without processes."""
    asked = []

    def run(tiny, ends, name, seconds):
        asked.append(name)
        return stages[name]

    monkeypatch.setattr(running, "_run", run)
    return asked


def test_every_stage_runs_is_written_and_one_that_failed_says_so(monkeypatch, tmp_path, capsys):
    device = content_of({"kind": "NVIDIA H200", "gpu": True, "known_as": "h200"})
    rows = [step_row(case, A100.seconds(case)) for case in CASES]
    stages = {"device": device} | {name: content_of() for name in SHARES}
    stages["kernels"] = content_of(errors={"xla": "XlaRuntimeError: out of memory"})
    stages["steps"] = content_of({"rows": rows}, left_out=["gpt-3-1.3b, mb64"])
    stages["engine"] = content_of(skipped="wants about 40.0 GB, and 20.0 GB are there")
    asked, path = faked(monkeypatch, stages), tmp_path / "gpu.json"
    written = []
    write = running.write_atomically
    monkeypatch.setattr(
        running, "write_atomically", lambda *args: (written.append(args), write(*args))
    )
    assert not measure(10, path, False)
    assert asked == list(stages)
    assert [list(json.loads(text)["measured"]["stages"]) for _, text in written] == [
        asked[: n + 1] for n in range(len(asked))
    ]
    said = capsys.readouterr().out
    for words in (
        "kernels: failed in part",
        "failed: xla: XlaRuntimeError: out of memory",
        "left out: gpt-3-1.3b, mb64",
        "skipped: wants about 40.0 GB",
        "3 steps timed",
    ):
        assert words in said
    assert all(len(line) <= 160 for line in said.splitlines() if "wrote" not in line)
    stages["kernels"] = content_of()
    assert measure(10, path, False)


def test_a_machine_without_a_gpu_is_refused_before_anything_is_written(monkeypatch, tmp_path):
    asked = faked(monkeypatch, {"device": content_of({"kind": "cpu", "gpu": False})})
    with pytest.raises(SystemExit, match=r"JAX found cpu; install .* or pass --tiny"):
        measure(10, tmp_path / "gpu.json", False)
    assert asked == ["device"]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="minutes 0 must be above 0"):
        measure(0, tmp_path / "gpu.json", False)


def test_no_figure_is_printed_that_was_not_measured(tmp_path):
    for name in ("device", *SHARES):
        assert outcome(name, content_of()) == [f"{name}: done, 7 s"]
    words = summary({"stages": {"device": content_of()}}, tmp_path / "gpu.json")
    assert "no step was timed" in words[-1]


def test_what_is_measured_can_be_trained():
    shapes = [*TRAINING.shapes, *OTHERS]
    for shape in shapes:
        strategy = parse_strategy(shape.strategy)
        assert strategy.devices == 1
        assert problems(strategy, get_model(shape.model)) == []
        assert shape.estimate_bytes < 120e9
    assert len(set(map(str, shapes))) == len(shapes) >= 12
    assert any(f"gb{TRAINING.batch}" in shape.strategy for shape in TRAINING.shapes)


def test_the_text_holds_as_much_as_is_said():
    batch = structured_batch(np.random.default_rng(0), 32_000, 16, 512)
    tokens, targets = batch.tokens[0], batch.targets[0]
    assert (tokens[:, 1:] == targets[:, :-1]).all()
    assert targets.max() < KNOWN
    after = np.random.default_rng(1).permutation(KNOWN)
    certain = (after[tokens] == targets).mean()
    assert certain == pytest.approx(FOLLOWS + (1 - FOLLOWS) / KNOWN, abs=0.01)
    # Shannon: of -log p(target | token), the mean.
    other = (1 - FOLLOWS) / KNOWN
    nats = np.where(after[tokens] == targets, -np.log(FOLLOWS + other), -np.log(other)).mean()
    assert entropy(32_000) == pytest.approx(nats, rel=0.03)


def test_kernels_are_held_to_float64_and_a_number_that_is_none_is_no_small_error():
    args = make_arguments(SMALL, Case(2, 4, 100, 16, 0, page=64), "bfloat16")
    out, lse = attend_xla(*args)
    assert largest_errors((out, lse), args).fine
    assert not largest_errors((out, lse + 1e-3), args).fine
    assert not largest_errors((1.02 * out, lse), args).fine
    broken = largest_errors((out * jnp.nan, lse), args)
    assert broken.out == np.inf
    assert not broken.fine


def test_gradients_of_attention_are_held_to_float64():
    assert max(training_errors(attend, SMALL, 16)) < TRAINING_LIMIT
    # Not causal: another function, whose gradients are others too.
    wrong = training_errors(lambda q, k, v, *_: attend(q, k, v, None, False), SMALL, 16)
    assert min(wrong) > TRAINING_LIMIT


def test_a_stage_needs_few_packages():
    """A GPU's machine may have no index: of what geojax depends on, these have to be there."""
    present = {"flax", "jax", "jaxtyping", "ml_dtypes", "numpy", "optax", "rich", "scipy"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [*project["dependencies"], *project["optional-dependencies"]["serve"], "datasets"]
    names = {name.split(">")[0].strip().replace("-", "_") for name in names}
    blocked = names - present | {"grpc", "orbax", "torch"}
    assert {"matplotlib", "grpc", "fastapi", "datasets", "pydantic", "tyro"} <= blocked
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
import geojax.bench.gpu.run
assert "jax" not in sys.modules, "the GPU belongs to the stages"
import geojax.bench.gpu.__main__, geojax.bench.gpu.engine
import geojax.bench.gpu.kernels, geojax.bench.gpu.steps
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_all_stages_run_in_small_shapes_on_a_cpu(tmp_path):
    path = tmp_path / "gpu.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--tiny", "--out", str(path)]
    done = subprocess.run([*command, "--minutes", "60"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its times say nothing" in done.stdout
    stages = json.loads(path.read_text())["measured"]["stages"]
    assert list(stages) == ["device", *SHARES]
    for content in stages.values():
        assert (content["errors"], content["left_out"], content["skipped"]) == ({}, [], None)
    assert len(json.loads(path.read_text())["rows"]) >= 6
    training = stages["train"]["result"]["training"]
    assert training["loss_last_tenth"] < training["loss_first_tenth"]
    assert len(stages["engine"]["result"]["policies"]) == 4
    assert len(stages["kernels"]["result"]["checked"]) == 5
    read_calibration(path)


@pytest.mark.full
def test_the_command_refuses_a_machine_without_a_gpu(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "this measures a GPU, and JAX found cpu" in done.stderr
    assert list(tmp_path.iterdir()) == []
