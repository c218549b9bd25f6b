# SPDX-License-Identifier: Apache-2.0
"""Steps timed here: strategies side by side, and where the time of one goes.

Invariant: seconds are of whole steps after compilation, the median of several, on the devices of
this process; a table never mixes them with predicted ones unnamed.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from geojax import platform
from geojax.config import ConfigError, RunConfig, require
from geojax.meshes.calibration import calibration_json
from geojax.meshes.hardware import NOMINAL, Cluster, get_gpu
from geojax.meshes.strategy import Strategy, enumerate_strategies, parse_strategy, require_legal
from geojax.meshes.timing import StepCase
from geojax.meshes.timing_a100 import A100
from geojax.meshes.timing_fit import recalibrate
from geojax.track.console import format_bytes, format_count, format_seconds, format_share
from geojax.track.environment import machine, versions
from geojax.track.metrics import write_atomically
from geojax.train.program import Program, Task
from geojax.train.timed import one_step, random_batch, time_steps


def profile_strategies(
    config: RunConfig, strategies: Sequence[str], steps: int, out: Path | None
) -> None:
    """Time steps of `strategies` on this process's devices, and calibrate the timing model.

    Without strategies, all legal ones of the config's global batch on all devices, with 1 and 2
    sequences a micro-batch. ConfigError where one cannot be.
    """
    require(steps >= 1, f"steps {steps} must be at least 1")
    console = Console(highlight=False)
    devices = jax.devices()
    chosen = _chosen(config, strategies, len(devices))
    kind = devices[0].device_kind
    name = platform.detect_gpu(kind)
    gpu = get_gpu(name) if name else NOMINAL
    cases, seconds, rows = [], [], []
    for number, strategy in enumerate(chosen, 1):
        console.print(f"{number} of {len(chosen)}: {strategy}", soft_wrap=True)
        case = StepCase(
            config.model, config.data.seq_len, strategy, Cluster(gpu, 1, strategy.devices)
        )
        program = _program(config, strategy)
        timed = time_steps(program, steps, config.seed)
        cases.append(case)
        seconds.append(timed.seconds)
        rows.append((timed, program.state_bytes))
    model = recalibrate(A100, cases, seconds)

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    headings = ("strategy", "compile", "step", "spread", "tokens/s", "MFU", "state", "model says")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    order = sorted(range(len(cases)), key=lambda i: seconds[i] / chosen[i].global_batch)
    for i in order:
        timed, state_bytes = rows[i]
        speed = chosen[i].global_batch * config.data.seq_len / seconds[i]
        share = platform.mfu(speed, config.model, config.data.seq_len, chosen[i].devices, name)
        table.add_row(
            str(chosen[i]),
            format_seconds(timed.compile_seconds),
            format_seconds(seconds[i]),
            format_share(timed.spread),
            format_count(speed),
            "-" if share is None else format_share(share),
            format_bytes(state_bytes),
            format_seconds(model.seconds(cases[i])),
        )
    console.print(table)
    errors = [abs(model.seconds(c) / s - 1) for c, s in zip(cases, seconds, strict=True)]
    console.print(
        Text(
            f"Step: measured clock, median of {steps}; spread: slowest less fastest; state: bytes "
            f"a device. Model: the A100 fit, corrected by these rows; median error "
            f"{format_share(median(errors))} on the same rows. {kind} x {len(devices)}, {machine()}"
        )
    )
    if out:
        made = {
            "machine": machine(),
            "device": kind,
            "date": datetime.now(UTC).date().isoformat(),
            "versions": versions(),
        }
        write_atomically(out, calibration_json(model, cases, seconds, made))
        console.print(f"wrote {out}: `geojax plan --calibration {out}` reads it", soft_wrap=True)


def profile_trace(config: RunConfig, steps: int, folder: Path) -> None:
    """A trace of `steps` steps of the config's strategy, and its operations by time."""
    require(steps >= 1, f"steps {steps} must be at least 1")
    require(
        config.strategy,
        f"{config.name} has slices; name a preset with a strategy, or set one with --strategy",
    )
    console = Console(highlight=False)
    program = _program(config, parse_strategy(config.strategy))
    chunk = program.put_chunk(random_batch(program))
    state = program.init(config.seed)
    state = one_step(program, state, chunk)
    with platform.trace_steps(folder) as trace:
        for _ in range(steps):
            state = one_step(program, state, chunk)
    if trace.summary is None:
        console.print("the trace holds no operation of a device")
    else:
        whole = trace.summary.device_seconds
        console.print(f"{format_seconds(whole)} on devices in {steps} steps of {program.strategy}")
        for operation in trace.summary.top:
            console.print(
                f"  {format_seconds(operation.seconds):>8} {format_share(operation.share):>6}  "
                f"{operation.name}",
                soft_wrap=True,
            )
    console.print(f"wrote {trace.file}; open it at ui.perfetto.dev", soft_wrap=True)


def _chosen(config: RunConfig, strategies: Sequence[str], devices: int) -> list[Strategy]:
    try:
        if strategies:
            found = [parse_strategy(text) for text in strategies]
            for strategy in found:
                require_legal(strategy, config.model)
                require(
                    strategy.devices <= devices,
                    f"strategy {strategy} wants {strategy.devices} devices, and there are "
                    f"{devices}; choose a smaller one",
                )
            return found
    except ValueError as error:
        raise ConfigError(str(error)) from error
    require(
        config.strategy, f"{config.name} has slices; name strategies, or a preset with a strategy"
    )
    batch = parse_strategy(config.strategy).global_batch
    legal = enumerate_strategies(config.model, devices, [batch], (1, 2)).legal
    require(
        legal,
        f"no strategy of global_batch {batch} is legal on {devices} devices; name some, or set "
        "--strategy to one of another batch",
    )
    return list(legal)


def _program(config: RunConfig, strategy: Strategy) -> Program:
    task = Task(
        config.model, config.train, config.data.seq_len, config.data.document_mask, config.seed
    )
    return Program(task, strategy, jax.devices()[: strategy.devices])
