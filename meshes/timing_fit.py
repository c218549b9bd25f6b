# SPDX-License-Identifier: Apache-2.0
"""Calibration of the step-time model to measured steps.

Invariant: what is fitted starts from a prior and leaves it only as far as the rows pull, so any
number of rows gives a usable model: none would give the prior. That of a first fit is round figures
from data sheets and counts of kernels, never coefficients fitted to other rows.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from geojax.meshes.hardware import Cluster
from geojax.meshes.strategy import Remat, Strategy
from geojax.meshes.timing import (
    Coefficients,
    ShapeFactor,
    StepCase,
    TimingModel,
    ideal_seconds,
    shape_key,
    step_parts,
)
from geojax.models.config import TransformerConfig

GPT2_VOCAB = 50_257
PRIOR = TimingModel(
    Coefficients(
        matmul=1.6,  # 62 % of the peak
        replicated=15.0,
        sharded=4.0,
        launch_seconds=0.5e-3,  # 50 kernels of 10 us, launched one by one
        tp_launch_seconds=0.03e-3,
        tp_link=1.4,  # 70 % of the links' rate
        head_matmul=1.6,
        logits=6.0,
        ends_seconds=0.5e-3,
        link=1.4,
        optimizer=30.0,  # Adam in float32: three values read and written, and copies in 16 bits
    )
)
"""What is known before anything is measured."""
_RATE, _PASSES, _LAUNCH = 0.3, 0.7, 1.0
SPREAD = Coefficients(
    matmul=_RATE,
    replicated=_PASSES,
    sharded=_PASSES,
    launch_seconds=_LAUNCH,
    tp_launch_seconds=_LAUNCH,
    tp_link=_RATE,
    head_matmul=_RATE,
    logits=_PASSES,
    ends_seconds=_LAUNCH,
    link=_RATE,
    optimizer=_RATE,
)
"""Standard deviations of the logarithms about `PRIOR`: 0.7 is a factor of 2 either way."""
FACTOR_SPREAD = ShapeFactor(layer=0.15, head=0.5)
"""The same of a shape's factors; the head is one product, often with an odd side."""
NOISE = 0.03
"""Relative error of a row that nothing above explains."""
MACHINE_SPREAD = 0.5
"""In a recalibration, the same of a factor that all coefficients share."""
RECALIBRATION_SHARE = 0.3
"""And how far coefficients and factors may move beside each other, as a share of the above."""


def fit(cases: Sequence[StepCase], seconds: Sequence[float]) -> TimingModel:
    """The most probable model given measured steps, about `PRIOR`; some 20 rows do.

    ValueError for no rows, rows and seconds of different numbers, or seconds that are not above 0.
    """
    return _most_probable(PRIOR, 0.0, 1.0, cases, seconds)


def recalibrate(
    model: TimingModel, cases: Sequence[StepCase], measured: Sequence[float]
) -> TimingModel:
    """`model`, corrected by a user's own measurements of other machines or software.

    Three rows correct the speed as a whole; more also what kinds of work and shapes take beside
    each other. Errors as `fit`.
    """
    return _most_probable(model, MACHINE_SPREAD, RECALIBRATION_SHARE, cases, measured)


def _most_probable(
    prior: TimingModel,
    common: float,
    share: float,
    cases: Sequence[StepCase],
    seconds: Sequence[float],
) -> TimingModel:
    """Maximum a posteriori under log-normal priors and errors, by non-linear least squares.

    The unknowns z are standard normal: one for what all coefficients share, one for each, and two
    for each shape among the rows, its layer and its head.
    """
    measured = _checked(cases, seconds)
    work = ideal_seconds(cases)
    keys = [shape_key(case) for case in cases]
    shapes = sorted(set(keys))
    row_shape = [shapes.index(key) for key in keys]
    known = np.array([prior.factors.get(key, (1.0, 1.0)) for key in shapes])
    start, spread = np.array(astuple(prior.coefficients)), np.array(astuple(SPREAD))

    def unpack(z: np.ndarray) -> tuple[Coefficients, np.ndarray]:
        """Coefficients, and factors [shapes, 2]."""
        own, by_shape = np.split(z[1:], [len(start)])
        coefficients = start * np.exp(common * z[0] + share * spread * own)
        factors = known * np.exp(share * np.array(FACTOR_SPREAD) * by_shape.reshape(-1, 2))
        return Coefficients(*coefficients.tolist()), factors

    def residuals(z: np.ndarray) -> np.ndarray:
        coefficients, factors = unpack(z)
        parts = step_parts(work, coefficients, *factors[row_shape].T)
        return np.concatenate([np.log(sum(parts.values()) / measured) / NOISE, z])

    z = least_squares(residuals, np.zeros(1 + len(start) + known.size)).x
    coefficients, factors = unpack(z)
    fitted = {key: ShapeFactor(*pair) for key, pair in zip(shapes, factors.tolist(), strict=True)}
    return TimingModel(coefficients, {**prior.factors, **fitted})


def _checked(cases: Sequence[StepCase], seconds: Sequence[float]) -> np.ndarray:
    measured = np.asarray(seconds, np.float64)
    if len(cases) != len(measured):
        raise ValueError(f"{len(cases)} cases and {len(measured)} seconds; give one for each")
    if not len(measured):
        raise ValueError("no rows to calibrate with; measure 3 steps or more")
    wrong = np.flatnonzero(~(np.isfinite(measured) & (measured > 0)))
    if len(wrong):
        raise ValueError(f"row {wrong[0]} took {measured[wrong[0]]} seconds; it must be above 0")
    return measured


def read_rows(path: Path, node: Cluster, remat: Remat) -> tuple[list[StepCase], list[float]]:
    """Cases and seconds of a table as VIA-Research/vTrain publishes them: GPT models, tied heads.

    Columns are found by their names, in any order; lines before their line, and further columns,
    are passed over. `node` is one node of the machine, `remat` what was recomputed: the table says
    neither.
    """
    lines = path.read_text().splitlines()
    first = next((i for i, line in enumerate(lines) if "iteration time (ms)" in line), None)
    if first is None:
        raise ValueError(f"{path} has no column 'iteration time (ms)'; is it a table of vTrain's?")
    names = [name.strip("# ") for name in lines[first].split(",")]
    cases, seconds = [], []
    for row in csv.reader(lines[first + 1 :]):
        value = dict(zip(names, row, strict=True))
        dim, heads, seq_len = (
            int(value[name]) for name in ("hidden size", "attention heads", "sequence length")
        )
        model = TransformerConfig(
            vocab_size=GPT2_VOCAB,
            dim=dim,
            layers=int(value["layers"]),
            heads=heads,
            kv_heads=heads,
            mlp_dim=4 * dim,
            tied=True,
            family="gpt",
            context=seq_len,
        )
        strategy = Strategy(
            dp=int(value["data parallelism"]),
            tp=int(value["tensor parallelism"]),
            pp=int(value["pipeline parallelism"]),
            micro_batch=int(value["micro batch"]),
            global_batch=int(value["global batch"]),
            remat=remat,
        )
        nodes = math.ceil(strategy.devices / node.gpus_per_node)
        cases.append(StepCase(model, seq_len, strategy, replace(node, nodes=nodes)))
        seconds.append(float(value["iteration time (ms)"]) / 1e3)
    return cases, seconds
