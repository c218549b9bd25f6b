# SPDX-License-Identifier: Apache-2.0
"""`geojax plan PRESET --cluster FILE`: a whole run over regions, before it is trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from geojax.config import RunConfig, require
from geojax.meshes.aot import AotUnavailableError
from geojax.meshes.candidates import Job
from geojax.meshes.memory import STATED_ERROR
from geojax.meshes.strategy import Strategy
from geojax.plan.changes import effects
from geojax.plan.cluster import read_cluster
from geojax.plan.exact import exact_bytes
from geojax.plan.timing import read_timing, timing_source
from geojax.plan.whole import Search, Whole, count_memory, placed, plan_whole
from geojax.plan.whole_report import (
    gantt_runs,
    plan_notes,
    print_effects,
    print_whole,
    whole_content,
)
from geojax.simulate.report import write_figures
from geojax.simulate.setting import How
from geojax.track.metrics import NewFile, NewFolder


@dataclass(frozen=True)
class WholeOptions:
    """Any field of the config can be set, but its slices and its clock: those are the file's."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    cluster: Path = Path("cluster.toml")
    """TOML file of slices, links and prices; docs/planning.md describes it."""
    tokens: float | None = None
    """Budget of the run; unset: the config's."""
    by: Annotated[How, tyro.conf.arg(name="exchange")] = "auto"
    """The pattern of the exchange; auto: the one of the least modelled time, config: as the run
    would."""
    overlap: bool = False
    """Plan with exchanges beside the next round's steps."""
    changes: bool = True
    """Also say what would help most."""
    exact: bool = True
    """Let the compiler count the memory of the plan's strategies; needs the extra `aot`."""
    calibration: Path | None = None
    """File of `geojax profile strategies --out`; unset: fitted to A100 rows."""
    out: NewFolder | None = None
    """Folder for the picture gantt.png."""
    json: NewFile | None = None
    """File for all figures."""


def run_whole(options: WholeOptions, preset: RunConfig) -> None:
    """Print the plan of `preset` as `options` change it; ConfigError where the cluster, or the two
    together, make no sense."""
    console = Console(highlight=False)
    for name in ("slices", "clock"):
        require(
            getattr(options.config, name) == getattr(preset, name),
            f"--{name}.* would be ignored: slices and links are those of {options.cluster}; change "
            "that file",
        )
    cluster = read_cluster(options.cluster)
    config = placed(options.config, cluster, options.tokens)
    search = Search(*read_timing(options.calibration))

    def make() -> Whole:
        return plan_whole(config, cluster, options.by, search)

    def count(job: Job, gpu: str, strategy: Strategy) -> int:
        where = f"{job.cluster.nodes} x {job.cluster.gpus_per_node} {gpu}"
        console.print(f"compiling {strategy} for {where}", soft_wrap=True)
        return exact_bytes(job, gpu, strategy)

    memory = f"memory is estimated, to within {STATED_ERROR:.0%} for 9 of 10"
    whole = make()
    if options.exact:
        try:
            whole = count_memory(make, search, count)
            memory = "memory marked * is counted by the compiler, the rest estimated"
        except AotUnavailableError as error:
            memory += f": {error}"
    source = timing_source(options.calibration)
    notes = plan_notes(whole, options.by, source, memory)
    print_whole(whole, options.overlap, notes, console)
    found = []
    if options.changes:
        found = effects(whole, config, options.by, options.overlap, search)
        print_effects(found, whole.timed(options.overlap).outcome.hours, console)
    if options.out:
        from geojax.track.plots import plot_gantt

        options.out.mkdir(parents=True, exist_ok=True)
        plot_gantt(gantt_runs(whole), options.out / "gantt.png")
        console.print(Text(f"wrote {options.out / 'gantt.png'}"), soft_wrap=True)
    if options.json:
        content = whole_content(whole, found, options.overlap, search)
        write_figures(options.json, content | {"times": source, "memory": memory}, console)
