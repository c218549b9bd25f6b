# SPDX-License-Identifier: Apache-2.0
"""A profile of a few steps, and which operations their time went to.

Invariant: seconds are self times of operations on devices (nested ones count for the inner), summed
over devices and streams; the host's own work is not in them. On CPU the device is the threads that
run XLA's operations.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from geojax.config import RunError

TOP = 15


class OpTime(NamedTuple):
    """An operation's time over the whole trace."""

    name: str
    """Of the instruction in the compiled program; of the kernel where XLA did not name it."""
    seconds: float
    share: float
    """Of all devices' time."""


@dataclass(frozen=True)
class TraceSummary:
    """What devices did."""

    device_seconds: float
    top: tuple[OpTime, ...]
    """Longest first."""


@dataclass
class Trace:
    """A trace; complete after its `with` block."""

    folder: Path
    file: Path | None = None
    """The trace, for ui.perfetto.dev; XProf reads the folder."""
    summary: TraceSummary | None = None
    """None where no device operation was recorded."""


@contextmanager
def trace_steps(folder: Path) -> Generator[Trace]:
    """Profile what runs inside; end with a wait for its results, or they are cut off.

    The yielded `Trace` is filled in afterwards. RunError where the folder cannot be written or
    another trace is running.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a trace holds a million events; Python's calls would fill it
    before = set(_traces(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(str(folder), profiler_options=options)
    except (OSError, RuntimeError) as error:
        raise RunError(f"cannot trace into {folder}: {error}") from error
    trace = Trace(folder)
    try:
        yield trace
    finally:
        jax.profiler.stop_trace()
    new = sorted(set(_traces(folder)) - before)
    if new:
        trace.file = new[-1]
        trace.summary = summarize(trace.file)


def summarize(file: Path, top: int = TOP) -> TraceSummary | None:
    """Time of devices' operations in a *.trace.json.gz; None where there is none of any."""
    with gzip.open(file) as stream:
        events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for event in events:
        if event.get("name") == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    if any(name.startswith("/device:") for name in processes.values()):
        # Other threads of a device repeat its streams, grouped by module and source line.
        spans = [
            span
            for span in spans
            if processes.get(span["pid"], "").startswith("/device:")
            and threads.get((span["pid"], span["tid"]), "").startswith("Stream")
        ]
    else:
        spans = [span for span in spans if "hlo_op" in span.get("args", {})]
    by_thread: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for span in spans:
        by_thread[span["pid"], span["tid"]].append(span)
    microseconds: dict[str, float] = defaultdict(float)
    for thread in by_thread.values():
        for name, own in _self_times(thread):
            microseconds[name] += own
    total = sum(microseconds.values())
    if not total:
        return None
    longest = sorted(microseconds.items(), key=lambda item: -item[1])[:top]
    return TraceSummary(
        total * 1e-6, tuple(OpTime(name, own * 1e-6, own / total) for name, own in longest)
    )


def _traces(folder: Path) -> list[Path]:
    return list(folder.glob("plugins/profile/*/*.trace.json.gz"))


def _self_times(spans: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """(name, microseconds) of each span of one thread, less those inside it."""
    spans = sorted(spans, key=lambda span: (span["ts"], -span["dur"]))
    own = [float(span["dur"]) for span in spans]
    outer: list[int] = []
    for i, span in enumerate(spans):
        while outer and span["ts"] >= spans[outer[-1]]["ts"] + spans[outer[-1]]["dur"]:
            outer.pop()
        if outer:
            own[outer[-1]] -= min(span["dur"], own[outer[-1]])
        outer.append(i)
    for span, microseconds in zip(spans, own, strict=True):
        yield span.get("args", {}).get("hlo_op") or span["name"], microseconds
