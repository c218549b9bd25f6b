# SPDX-License-Identifier: Apache-2.0
"""A run's scalars for other trackers: by step and by tokens, at the seconds of the run's clock.

A step is that of one cluster; where slices train it is an outer step. Invariant: an export takes
the place of the one before it, of the same run, and of nothing else.
"""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from geojax.config import require
from geojax.track.metrics import Record
from geojax.track.summary import Run

_FILE = "events.out.tfevents.geojax"
_AXES = {"kind", "round", "step"}


class Scalar(NamedTuple):
    group: str
    """Kind of the record, or the slice."""
    name: str
    step: int
    tokens: int
    """Predicted by all slices up to then."""
    seconds: float
    """Of the run's clock."""
    value: float


def scalars(run: Run) -> Iterator[Scalar]:
    """All numbers of the run's rounds, slices, evaluations, switches and decisions, in order."""
    places = {0: (0, 0, 0.0)}
    for record in run.rounds:
        step = record.get("step", record["round"])
        places[record["round"]] = (step, record["tokens"], record["seconds"])
    groups: list[tuple[str, Record]] = [("round", r) for r in run.rounds]
    groups += [(f"slice_{_tag(r['slice'])}", r) for r in run.slices]
    groups += [("eval", r) for r in run.evals if r["round"] in places]
    groups += [("switch", r) for r in run.switches]
    groups += [("decision", r["decision"] | {"round": r["round"]}) for r in run.decisions]
    for group, record in groups:
        for name, value in _numbers(record):
            yield Scalar(group, name, *places[record["round"]], value)


def to_tensorboard(runs: Sequence[tuple[str, Run]], folder: Path) -> str:
    """One event file a run, in a folder of its name; what was written, in words."""
    _need("tensorboard", "tensorboardX")
    from tensorboardX import SummaryWriter

    taken: set[Path] = set()
    for name, run in runs:
        place = folder / _tag(name)
        while place in taken:
            place = place.with_name(f"{place.name}_")
        taken.add(place)
        place.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=place, prefix=".export-") as scratch:
            with SummaryWriter(scratch) as writer:
                for group, name, step, tokens, seconds, value in scalars(run):
                    writer.add_scalar(f"{group}/{name}", value, step, seconds)
                    writer.add_scalar(f"{group}_by_tokens/{name}", value, tokens, seconds)
            (events,) = Path(scratch).iterdir()
            events.replace(place / _FILE)
    return f"{len(runs)} runs for TensorBoard; see them with `tensorboard --logdir {folder}`"


def to_trackio(runs: Sequence[tuple[str, Run]], project: str) -> str:
    """Runs of a Trackio project on this machine, by name; what was written, in words."""
    _need("trackio", "trackio")
    import trackio  # pyrefly: ignore[missing-import]

    try:
        before = list(trackio.Api().runs(project))
    except ValueError:  # there is no such project yet
        before = []
    with redirect_stdout(io.StringIO()):  # it says where it writes
        for name, run in runs:
            started = trackio.init(
                project=project,
                name=name,
                config=run.config or None,
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            for step, values in sorted(_by_axis(run).items()):
                trackio.log(values, step=step)
            trackio.finish()
            for old in before:
                if old.name == name and old.id != started.id:
                    old.delete()
    return f"{len(runs)} runs for Trackio; see them with `trackio show --project {project}`"


def _by_axis(run: Run) -> dict[int, dict[str, float]]:
    """Values that belong to one number of steps, or of tokens."""
    found: dict[int, dict[str, float]] = {}
    for scalar in scalars(run):
        name = f"{scalar.group}/{scalar.name}"
        found.setdefault(scalar.step, {})[name] = scalar.value
        name = f"{scalar.group}_by_tokens/{scalar.name}"
        found.setdefault(scalar.tokens, {})[name] = scalar.value
    return found


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{_tag(name)}.")
        elif isinstance(value, bool | int | float) and name not in _AXES:
            number = float(value)
            if math.isfinite(number):
                yield prefix + _tag(name), number


def _tag(name: str) -> str:
    """`name` in letters that a folder's name and a tag may have."""
    return re.sub(r"[^\w.+-]", "_", name).lstrip(".") or "_"


def _need(extra: str, module: str) -> None:
    require(
        find_spec(module) is not None,
        f"--{extra} needs {module}; install it with `pip install 'geojax[{extra}]'`",
    )
