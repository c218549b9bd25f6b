# SPDX-License-Identifier: Apache-2.0
"""How well the step-time model predicts rows that it was not fitted to.

Run it as `python benchmarks/timing.py CSV [--other CSV]`. The first table is
`data/ground_truth_single.csv` of VIA-Research/vTrain (MIT), see meshes/timing_a100.py; the other is
`data/ground_truth_multi.csv` beside it, steps on 64 to 512 A100 80GB with recomputation, predicted
with all rows of the first and none of its own. `--print-coefficients` prints those of
meshes/timing_a100.py instead.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from geojax.meshes.hardware import Cluster, get_gpu
from geojax.meshes.timing import StepCase, TimingModel
from geojax.meshes.timing_a100 import CALIBRATED_REMAT
from geojax.meshes.timing_fit import fit, read_rows

SEEDS = range(10)
LIMITS = {100: (0.06, 0.03), 20: (0.08, 0.06)}
"""Fitted rows, and the most that median error and mean regret are to be."""
NEW_WIDTH_LIMIT = 0.15
A100_NODE = Cluster(get_gpu("a100-80gb"))
OTHER_NODE = Cluster(get_gpu("a100-80gb"), network_bytes_per_second=12.5e9)
"""Of the rows from more nodes: 800 Gbit/s a node."""
REGRET = """\
error: |predicted / measured - 1|, median over the rows that were not fitted
regret: these rows in groups of equal GPUs, model and global batch; in a group, measured time of the
  row predicted fastest over that of the fastest - 1; mean over groups of 2 rows or more"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--print-coefficients", action="store_true")
    options = parser.parse_args()
    cases, seconds = read_rows(options.rows, A100_NODE, CALIBRATED_REMAT)
    model = fit(cases, seconds)
    if options.print_coefficients:
        _print_source(model)
        return

    print(f"{len(cases)} rows; {len(SEEDS)} seeds, mean (least-most)\n{REGRET}")
    for count, limits in LIMITS.items():
        results = [_split(cases, seconds, count, seed) for seed in SEEDS]
        for name, values, limit in zip(
            ("error", "regret"), zip(*results, strict=True), limits, strict=True
        ):
            print(
                f"{count:4} random rows: {name:6} {100 * statistics.mean(values):5.2f} % "
                f"({100 * min(values):.2f}-{100 * max(values):.2f}); at most {100 * limit:.0f} %"
            )
    widths = sorted({case.model.dim for case in cases})
    for width in widths:
        inside = [case.model.dim == width for case in cases]
        error, regret = _fit_and_test(cases, seconds, np.array(inside))
        print(
            f"width {width} to others: error {100 * error:5.2f} %, at most "
            f"{100 * NEW_WIDTH_LIMIT:.0f} %; regret {100 * regret:.2f} %"
        )
    error, regret = score(model, cases, seconds)
    print(f"all rows, fitted to all: error {100 * error:.2f} %, regret {100 * regret:.2f} %")
    if options.other:
        cases, seconds = read_rows(options.other, OTHER_NODE, "full")
        error, regret = score(model, cases, seconds)
        ratios = model.seconds_of(cases) / seconds
        low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9])
        print(
            f"{len(cases)} other rows, fitted to none: error {100 * error:.1f} %, regret "
            f"{100 * regret:.2f} %, predicted over measured {middle:.2f} (tenths {low:.2f}-"
            f"{high:.2f})"
        )


def score(
    model: TimingModel, cases: Sequence[StepCase], seconds: Sequence[float]
) -> tuple[float, float]:
    """Median error and mean regret, as REGRET defines them."""
    predicted, measured = model.seconds_of(cases), np.asarray(seconds)
    groups = defaultdict(list)
    for i, case in enumerate(cases):
        groups[case.strategy.devices, case.model, case.strategy.global_batch].append(i)
    regrets = [
        measured[min(rows, key=predicted.__getitem__)] / min(measured[rows]) - 1
        for rows in groups.values()
        if len(rows) > 1
    ]
    return float(np.median(np.abs(predicted / measured - 1))), statistics.mean(regrets)


def _split(
    cases: Sequence[StepCase], seconds: Sequence[float], count: int, seed: int
) -> tuple[float, float]:
    fitted = np.zeros(len(cases), bool)
    fitted[np.random.default_rng(seed).permutation(len(cases))[:count]] = True
    return _fit_and_test(cases, seconds, fitted)


def _fit_and_test(
    cases: Sequence[StepCase], seconds: Sequence[float], fitted: np.ndarray
) -> tuple[float, float]:
    """Error and regret on the rows that are not `fitted`."""
    inside, outside = np.flatnonzero(fitted), np.flatnonzero(~fitted)
    model = fit([cases[i] for i in inside], [seconds[i] for i in inside])
    return score(model, [cases[i] for i in outside], [seconds[i] for i in outside])


def _print_source(model: TimingModel) -> None:
    print("COEFFICIENTS = Coefficients(")
    for name, value in asdict(model.coefficients).items():
        print(f"    {name}={value:.4g},")
    print(")\nFACTORS = {  # (dim, tp, tokens): (layer, head)")
    for key, (layer, head) in sorted(model.factors.items()):
        print(f"    {tuple(key)}: ({layer:.3f}, {head:.3f}),")
    print("}")


if __name__ == "__main__":
    main()
