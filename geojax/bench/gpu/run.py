# SPDX-License-Identifier: Apache-2.0
"""All stages in time, and the file that they leave.

Invariant: the file is whole after every stage, and `geojax plan --calibration` reads it as soon as
a step was timed. Nothing here starts JAX's backends: the GPU belongs to the stages.
"""

import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from geojax.bench.gpu.stages import Content, run_child, run_stages
from geojax.bench.gpu.words import header, outcome, summary
from geojax.config import require
from geojax.meshes.calibration import calibration_json, read_step_row
from geojax.meshes.timing import StepCase, TimingModel
from geojax.meshes.timing_a100 import A100
from geojax.meshes.timing_fit import recalibrate
from geojax.track.environment import machine, versions
from geojax.track.metrics import require_file, write_atomically

SHARES = {"kernels": 0.12, "train": 0.26, "steps": 0.24, "engine": 0.28, "attention": 0.10}
"""Of the time, by stage."""
DEVICE_SECONDS = 60.0
"""That finding the device and its two rates may take."""
IN_TIME = 0.92
"""Share of the time in which stages should be over: one that is compiling is late."""
LATE = 1.4
"""A stage that takes more than this many times its share is ended."""


def measure(minutes: float, out: Path, tiny: bool) -> bool:
    """Measure the GPU that is here, and write `out`; whether nothing failed.

    SystemExit where there is no GPU and `tiny` was not asked for.
    """
    require(minutes > 0, f"minutes {minutes} must be above 0; 10 is enough for all of it")
    require_file(out, f"--out {out}", "name a file in a folder that can")
    started = time.monotonic()
    ends = started + 60 * minutes
    run = partial(_run, tiny, ends)
    device = run("device", min(DEVICE_SECONDS, 60 * minutes))
    kind = device["result"].get("kind")
    if not kind:
        raise SystemExit(f"JAX found no device: {'; '.join(device['errors'].values())}")
    if not tiny and not device["result"]["gpu"]:
        raise SystemExit(
            f"this measures a GPU, and JAX found {kind}; install geojax[cuda13] on a machine with "
            "one, or pass --tiny to run all of it in small shapes on this CPU"
        )
    made = {
        "machine": machine(),
        "device": kind,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
    }
    stages: dict[str, Content] = {}
    measured: dict[str, Any] = {**made, "tiny": tiny, "minutes": minutes, "stages": stages}
    print("\n".join(header(measured, device)), flush=True)

    def done(name: str, content: Content) -> None:
        stages[name] = content
        measured["seconds"] = round(time.monotonic() - started, 1)
        write_atomically(out, content_json(made, measured))
        print("\n".join(outcome(name, content)), flush=True)

    done("device", device)
    run_stages(SHARES, started + IN_TIME * 60 * minutes, run, done)
    print("\n".join(summary(measured, out)), flush=True)
    return not any(content["errors"] for content in stages.values())


def content_json(made: dict[str, Any], measured: dict[str, Any]) -> str:
    """The file: the timing model fitted to all steps that the stages timed, those steps, and
    `measured`, to which the fit's errors are added."""
    stages = measured["stages"]
    pairs = [
        read_step_row(row)
        for content in stages.values()
        for row in content["result"].get("rows", [])
    ]
    without = {
        name: content | {"result": {k: v for k, v in content["result"].items() if k != "rows"}}
        for name, content in stages.items()
    }
    if not pairs:
        return calibration_json(None, [], [], made, measured | {"stages": without})
    cases, seconds = [case for case, _ in pairs], [value for _, value in pairs]
    model = recalibrate(A100, cases, seconds)
    measured["fit"] = {"rows": len(pairs), **errors_of(model, cases, seconds)}
    return calibration_json(model, cases, seconds, made, measured | {"stages": without})


def errors_of(
    model: TimingModel, cases: Sequence[StepCase], seconds: Sequence[float]
) -> dict[str, float | None]:
    """Median relative errors: of the A100 rows' model; of `model` on the steps that it was fitted
    to; and of each step by a model fitted to the others, None for a single step."""
    rows = list(zip(cases, seconds, strict=True))

    def off(by: TimingModel, case: StepCase, value: float) -> float:
        return abs(by.seconds(case) / value - 1)

    others = [
        off(recalibrate(A100, *zip(*(rows[:i] + rows[i + 1 :]), strict=True)), *rows[i])
        for i in range(len(rows))
        if len(rows) > 1
    ]
    return {
        "median_error_before": median(off(A100, *row) for row in rows),
        "median_error": median(off(model, *row) for row in rows),
        "median_error_left_out": median(others) if others else None,
    }


def _run(tiny: bool, ends: float, name: str, seconds: float) -> Content:
    """A stage in a process of its own."""
    size = "tiny" if tiny else "real"
    env = os.environ | ({"JAX_PLATFORMS": "cpu"} if tiny else {})
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    command = [sys.executable, "-m", "geojax.bench.gpu", name, f"{seconds:.1f}", size]
    left = ends - time.monotonic()
    return run_child(command, env, max(min(LATE * seconds, left), 1.0))
