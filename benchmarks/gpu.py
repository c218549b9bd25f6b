# SPDX-License-Identifier: Apache-2.0
"""One GPU measured in minutes, for people and for `geojax plan`.

    python benchmarks/gpu.py [--minutes 10] [--out gpu.json]
    python benchmarks/gpu.py --tiny

Kernels against float64; llama-150m trained for some hundred steps by the fastest of some
strategies; steps of other shapes, to which the timing model is fitted; the engine with LLaDA 8B's
shape and random weights; attention timed. Every stage has a share of the time and a process of its
own: what it has no time for is left out by name, what fails is recorded, and the rest goes on. The
file is written after every stage, and `geojax plan --calibration FILE` reads it. Exit code 1 where
anything failed. `--tiny` runs all of it in small shapes on a CPU, whose times say nothing.
"""

import argparse
import sys
from pathlib import Path

from geojax.bench.gpu.run import measure
from geojax.config import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="that all of it may take")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--tiny", action="store_true", help="small shapes, on a CPU")
    options = parser.parse_args()
    try:
        return 0 if measure(options.minutes, options.out, options.tiny) else 1
    except ConfigError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
