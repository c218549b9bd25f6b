# SPDX-License-Identifier: Apache-2.0
"""A user's own calibration of the step-time model, as a JSON file.

Invariant: a file holds the measured rows beside the coefficients that were fitted to them, so that
it can be checked, and fitted again. Importable without JAX.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from geojax.meshes.timing import Coefficients, ShapeFactor, ShapeKey, StepCase, TimingModel

FORMAT = 1


def calibration_json(
    model: TimingModel, cases: Sequence[StepCase], seconds: Sequence[float], made: dict[str, Any]
) -> str:
    """`model` with the rows behind it; `made`: machine, date, versions."""
    rows = [
        {
            "strategy": str(case.strategy),
            "seq_len": case.seq_len,
            "model": asdict(case.model),
            "gpu": asdict(case.cluster.gpu),
            "seconds": value,
        }
        for case, value in zip(cases, seconds, strict=True)
    ]
    factors = [[*key, *factor] for key, factor in sorted(model.factors.items())]
    content = {
        "format": FORMAT,
        "made": made,
        "coefficients": asdict(model.coefficients),
        "factors": factors,
        "rows": rows,
    }
    return json.dumps(content, indent=2) + "\n"


def read_calibration(path: Path) -> TimingModel:
    """The model in a file of `calibration_json`; ValueError where it is none."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, not {FORMAT}")
        factors = {ShapeKey(*row[:3]): ShapeFactor(*row[3:]) for row in content["factors"]}
        return TimingModel(Coefficients(**content["coefficients"]), factors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"calibration {path} cannot be read ({error}); make one with `geojax profile "
            "strategies --out FILE`"
        ) from error
