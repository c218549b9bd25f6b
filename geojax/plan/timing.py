# SPDX-License-Identifier: Apache-2.0
"""Where plans take step times from: rows of A100s, or a user's own measured profile."""

from pathlib import Path

from geojax.config import ConfigError
from geojax.meshes.calibration import read_calibration
from geojax.meshes.candidates import Far
from geojax.meshes.timing import TimingModel
from geojax.meshes.timing_a100 import A100, extrapolated


def read_timing(calibration: Path | None) -> tuple[TimingModel, Far]:
    """The timing model, and what says of a step how far it is from those behind the model.

    `calibration`: a file of `geojax profile strategies --out`; ConfigError where it is none.
    """
    if calibration is None:
        return A100, extrapolated
    try:
        return read_calibration(calibration), lambda case: None
    except ValueError as error:
        raise ConfigError(str(error)) from error


def timing_source(calibration: Path | None) -> str:
    """What a table says of its times."""
    return f"modelled clock, calibrated on {calibration or "rows of A100s, vTrain's"}"
