# SPDX-License-Identifier: Apache-2.0
"""A user's own calibration of the step-time model, as a JSON file.

Invariant: a file holds the measured rows beside the coefficients that were fitted to them, so that
it can be checked, and fitted again. Importable without JAX.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from geojax.meshes.hardware import Cluster, Gpu
from geojax.meshes.strategy import parse_strategy
from geojax.meshes.timing import Coefficients, ShapeFactor, ShapeKey, StepCase, TimingModel
from geojax.models.config import RopeScaling, TransformerConfig

FORMAT = 1


def calibration_json(
    model: TimingModel | None,
    cases: Sequence[StepCase],
    seconds: Sequence[float],
    made: dict[str, Any],
    measured: dict[str, Any] | None = None,
) -> str:
    """`model` with the rows behind it, None where there are none yet; `made`: machine, date,
    versions; `measured`: what else was found on the way, for people."""
    rows = [step_row(case, value) for case, value in zip(cases, seconds, strict=True)]
    content = {"format": FORMAT, "made": made}
    if model:
        factors = [[*key, *factor] for key, factor in sorted(model.factors.items())]
        content |= {"coefficients": asdict(model.coefficients), "factors": factors}
    content |= {"rows": rows} | ({"measured": measured} if measured is not None else {})
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def step_row(case: StepCase, seconds: float) -> dict[str, Any]:
    """A timed step, for JSON."""
    return {
        "strategy": str(case.strategy),
        "seq_len": case.seq_len,
        "model": asdict(case.model),
        "gpu": asdict(case.cluster.gpu),
        "seconds": seconds,
    }


def read_step_row(row: Mapping[str, Any]) -> tuple[StepCase, float]:
    """What `step_row` wrote, of GPUs of one node."""
    strategy, model = parse_strategy(row["strategy"]), dict(row["model"])
    if model["rope_scaling"]:
        model["rope_scaling"] = RopeScaling(**model["rope_scaling"])
    cluster = Cluster(Gpu(**row["gpu"]), 1, strategy.devices)
    case = StepCase(TransformerConfig(**model), row["seq_len"], strategy, cluster)
    return case, row["seconds"]


def read_calibration(path: Path) -> TimingModel:
    """The model in a file of `calibration_json`; ValueError where it is none."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, not {FORMAT}")
        if not content["rows"]:
            raise ValueError("it holds no timed step")
        factors = {ShapeKey(*row[:3]): ShapeFactor(*row[3:]) for row in content["factors"]}
        return TimingModel(Coefficients(**content["coefficients"]), factors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"calibration {path} cannot be read ({error}); make one with `geojax profile "
            "strategies --out FILE` or benchmarks/gpu.py of the repository"
        ) from error
