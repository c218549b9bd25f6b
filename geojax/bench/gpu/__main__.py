# SPDX-License-Identifier: Apache-2.0
"""The process of one stage: `python -m geojax.bench.gpu NAME SECONDS real|tiny FILE`, as
`benchmarks/gpu.py` starts it."""

import json
import sys
from functools import partial
from pathlib import Path

from geojax.bench.gpu.stages import Stage, run_stage
from geojax.track.metrics import to_json, write_atomically


def main(name: str, seconds: str, size: str, path: str) -> None:
    """Run one stage, and keep the file at what it has found so far."""

    def save(content: dict) -> None:
        write_atomically(Path(path), json.dumps(to_json(content)))

    stage = Stage(float(seconds), save)
    run_stage(stage, partial(_work, name, size == "tiny"))


def _work(name: str, tiny: bool, stage: Stage) -> None:
    from geojax.bench.gpu import engine, kernels, steps

    works = {
        "device": kernels.device,
        "kernels": kernels.kernels,
        "train": steps.train,
        "steps": steps.steps,
        "engine": engine.engine,
        "attention": kernels.attention,
    }
    works[name](stage, tiny)


if __name__ == "__main__":
    main(*sys.argv[1:])
