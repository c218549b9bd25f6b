# SPDX-License-Identifier: Apache-2.0
"""Options of the comparisons that are made of training runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from geojax.bench import cona, geomesh
from geojax.track.environment import usable_cores
from geojax.track.metrics import NewFile, NewFolder


@dataclass(frozen=True)
class _Jobs:
    jobs: int = len(usable_cores())
    """Runs at a time, one core each."""
    json: NewFile | None = None
    """File for the figures; unset: report.json in the folder."""


@dataclass(frozen=True)
class DemoOptions(_Jobs):
    """Train one small model by four methods over four unequal slices, and compare them."""

    out: NewFolder = Path("runs/demo")
    """Folder of the runs, pictures and report.json; finished runs in it are kept."""


@dataclass(frozen=True)
class GeomeshOptions(_Jobs):
    """All methods and controls over several seeds. Resumable: start it again to go on."""

    out: NewFolder = Path("runs/bench-geomesh")
    """Folder of the runs."""
    seeds: int = 3
    methods: tuple[str, ...] = ()
    """Which, DiLoCo in any case; halos and streaming-diloco among those there are. Unset: GeoMesh,
    DiLoCo, the halves and controls."""


@dataclass(frozen=True)
class ConaOptions(_Jobs):
    """CONA against fixed strategies, a warm-up by hand and an oracle; says first what it costs.
    Resumable: start it again to go on."""

    out: NewFolder = Path("runs/bench-cona")
    """Folder of the runs, pictures and report.json."""
    models: tuple[str, ...] = ("gpt", "bert", "llama")
    """Which."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Which, all models of one before the next."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Of the learning rate, to a tenth; constant: a control, under which who spends tokens faster
    is not further down a schedule. Give each a folder."""


@dataclass(frozen=True)
class TuneOptions(_Jobs):
    """Twelve settings of each method's optimizers, on held-out text of its own."""

    methods: tyro.conf.Positional[tuple[str, ...]] = ()
    out: NewFolder = Path("runs/tune-geomesh")
    """Folder of the runs."""


def run_demo(options: DemoOptions) -> None:
    geomesh.run_demo(options.out, options.jobs, options.json)


def run_geomesh(options: GeomeshOptions) -> None:
    methods = options.methods or geomesh.BENCH_METHODS
    geomesh.run_bench(options.out, options.jobs, options.seeds, options.json, methods)


def run_tune(options: TuneOptions) -> None:
    geomesh.tune(options.methods, options.out, options.jobs, options.json)


def run_cona(options: ConaOptions) -> None:
    cona.run_cona(
        options.out, options.jobs, options.models, options.seeds, options.json, options.decay
    )
