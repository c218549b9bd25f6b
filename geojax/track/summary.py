# SPDX-License-Identifier: Apache-2.0
"""What a run came to, computed from its `metrics.jsonl` alone.

Invariant: a loaded `Run` has at least one finished round and one evaluation, and holds slice
records of finished rounds only. Seconds and hours are those of the run's clock.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from geojax.config import ConfigError, require
from geojax.track.metrics import Record, check_records, read_records

PARTS = ("compute", "straggler", "wan", "outer")
"""What a slice's share of a round is made of, in order; fields `<part>_seconds` of its record."""

UNITS = {
    "hours_to_target": "hours of the run's clock; null: not reached",
    "target_perplexity": "exp(nats a token), held-out",
    "final_perplexity": "exp(nats a token), held-out; null: not finite",
    "hours": "hours of the run's clock",
    "tokens": "predicted tokens over all slices",
    "straggler_idle": "share of the run's time, of the slice with most",
    "wan_idle": "share of the run's time, of the slice with most",
    "bytes_per_round": "payload bytes, mean over slices and rounds",
    "wire_bytes_per_round": "bytes on the wire, mean over slices and rounds",
    "payload_ratio": "fp32 bytes / payload bytes, mean over rounds; null: nothing was sent",
    "tokens_to_target": "predicted tokens over all slices; null: not reached",
}
"""Units of `Summary`'s numbers."""


@dataclass(frozen=True)
class Run:
    """One run folder's records by kind, in order."""

    name: str
    folder: Path
    start: Record
    slices: tuple[Record, ...]
    rounds: tuple[Record, ...]
    evals: tuple[Record, ...]
    end: Record | None
    """None for a run that goes on or was killed."""
    switches: tuple[Record, ...] = ()
    """Of strategy, each after the round it names."""
    refused: tuple[Record, ...] = ()
    """Strategies that could not run, tried after the round they name."""
    decisions: tuple[Record, ...] = ()
    """Of CONA, each after the round it names."""
    plans: tuple[Record, ...] = ()
    """Decisions of CONA over slices, the same."""
    config: Record = field(default_factory=dict)
    """As its config.json has it."""

    @property
    def seconds(self) -> float:
        """Time of the whole run."""
        return self.rounds[-1]["seconds"]

    @property
    def final_perplexity(self) -> float:
        """Of the last evaluation; infinite where it was not finite."""
        perplexity = self.evals[-1]["perplexity"]
        return math.inf if perplexity is None else perplexity

    def shares(self) -> dict[str, dict[str, float]]:
        """For each slice, in the order of the plan, its parts as shares of the run's time."""
        seconds = defaultdict(lambda: dict.fromkeys(PARTS, 0.0))
        for record in self.slices:
            for part in PARTS:
                seconds[record["slice"]][part] += record[f"{part}_seconds"]
        whole = self.seconds or 1.0  # a run that took no time waited none of it
        return {name: {p: s / whole for p, s in parts.items()} for name, parts in seconds.items()}


@dataclass(frozen=True)
class Summary:
    """A run in figures; units in `UNITS`."""

    method: str
    seed: int
    clock: str
    hours_to_target: float | None
    target_perplexity: float | None
    final_perplexity: float
    hours: float
    tokens: int
    straggler_idle: float
    wan_idle: float
    bytes_per_round: float
    wire_bytes_per_round: float
    payload_ratio: float | None
    tokens_to_target: float | None


class NoResultsError(ConfigError):
    """Of a run that has nothing to show yet, though it may once it has gone on."""


def load_run(folder: Path | str) -> Run:
    """The run in `folder`. Raises ConfigError where that is no run, or one without results yet."""
    folder = Path(folder)
    path = folder / "metrics.jsonl"
    require(
        (folder / "config.json").is_file(),
        f"{folder} is not a run folder (it has no config.json); give the folder of a run",
    )
    if not path.is_file():
        raise NoResultsError(f"{folder} has no metrics.jsonl; the run has not begun")
    records = read_records(path)
    check_records(records, path)
    by_kind = defaultdict(list)
    for record in records:
        by_kind[record["kind"]].append(record)
    for kind, missing in (("start", "start record"), ("round", "round"), ("eval", "evaluation")):
        if not by_kind[kind]:
            raise NoResultsError(f"{path} has no {missing} yet; let the run go on, then try again")
    finished = {record["round"] for record in by_kind["round"]}
    return Run(
        name=folder.resolve().name,
        folder=folder,
        start=by_kind["start"][0],
        slices=tuple(r for r in by_kind["slice"] if r["round"] in finished),
        rounds=tuple(by_kind["round"]),
        evals=tuple(by_kind["eval"]),
        end=records[-1] if records[-1]["kind"] == "end" else None,
        switches=tuple(r for r in by_kind["switch"] if r["round"] in finished),
        refused=tuple(r for r in by_kind["refused"] if r["round"] in finished),
        decisions=tuple(r for r in by_kind["decision"] if r["round"] in finished),
        plans=tuple(r for r in by_kind["plan"] if r["round"] in finished),
        config=_config(folder / "config.json"),
    )


def _config(path: Path) -> Record:
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); give the folder of a run") from error
    require(isinstance(config, dict), f"{path} is not a config; give the folder of a run")
    return config


def check_accounting(run: Run) -> None:
    """Raise ConfigError unless every second of every slice is accounted for.

    Rounds must be numbered from 1 without a gap, a slice's parts must sum to its round, and rounds
    and switches between them to the run, all within 1e-6 of the value.
    """
    switched = defaultdict(float)
    for record in (*run.switches, *run.refused):
        switched[record["round"]] += record["switch_seconds"]
    slices = defaultdict(list)
    for record in run.slices:
        slices[record["round"]].append(record)
    seconds = 0.0
    for number, record in enumerate(run.rounds, 1):
        place = f"{run.folder}: round {record['round']}"
        require(record["round"] == number, f"{place} is recorded where round {number} should be")
        require(slices[number], f"{place} has no slice records")
        for part_of in slices[number]:
            parts = sum(part_of[f"{part}_seconds"] for part in PARTS)
            require(
                math.isclose(parts, record["round_seconds"], rel_tol=1e-6),
                f"{place}: the parts of slice {part_of['slice']} sum to {parts} s, but the round "
                f"took {record['round_seconds']} s",
            )
        seconds += record["round_seconds"] + switched[number - 1]
        require(
            math.isclose(seconds, record["seconds"], rel_tol=1e-6),
            f"{place}: rounds so far sum to {seconds} s, but its clock says {record['seconds']} s",
        )


def crossing(run: Run, perplexity: float) -> tuple[float, float] | None:
    """(seconds, tokens) at which the run first got down to `perplexity`, or None if it never did.

    Linear in (seconds, log perplexity) and in (tokens, log perplexity) between the two evaluations
    around the crossing.
    """
    before = None
    for after in run.evals:
        level = after["perplexity"]
        if level is not None and level <= perplexity:
            if before is None:  # nothing finite to interpolate from
                return after["seconds"], after["tokens"]
            levels = np.log([level, before["perplexity"]])
            seconds, tokens = (
                float(np.interp(math.log(perplexity), levels, [after[axis], before[axis]]))
                for axis in ("seconds", "tokens")
            )
            return seconds, tokens
        before = None if level is None else after
    return None


def common_target(runs: Sequence[Run], factor: float = 1.02) -> float:
    """`factor` times the worst final perplexity: a target that every run that converged reached.

    Raises ConfigError where no run's final perplexity is finite.
    """
    finals = [run.final_perplexity for run in runs if math.isfinite(run.final_perplexity)]
    require(finals, "no run ended with a finite perplexity; give the target perplexity")
    return factor * max(finals)


def summarise(run: Run, target_perplexity: float | None) -> Summary:
    """`run` in figures; without a target, the figures of the way to it are None."""
    reached = crossing(run, target_perplexity) if target_perplexity is not None else None
    shares = run.shares().values()
    ratios = [r["payload_ratio"] for r in run.rounds if r["payload_ratio"] is not None]
    return Summary(
        method=run.start["method"],
        seed=run.start["seed"],
        clock=run.start["clock"],
        hours_to_target=reached[0] / 3600 if reached else None,
        target_perplexity=target_perplexity,
        final_perplexity=run.final_perplexity,
        hours=run.seconds / 3600,
        tokens=run.rounds[-1]["tokens"],
        straggler_idle=max(parts["straggler"] for parts in shares),
        wan_idle=max(parts["wan"] for parts in shares),
        bytes_per_round=_mean([r["payload_bytes"] for r in run.slices]),
        wire_bytes_per_round=_mean([r["wire_bytes"] for r in run.slices]),
        payload_ratio=_mean(ratios) if ratios else None,
        tokens_to_target=reached[1] if reached else None,
    )


def labels(runs: Sequence[Run]) -> list[str]:
    """The shortest names that tell `runs` apart: method, with seed, folder's name, or folder.

    Raises ConfigError where one folder is given twice.
    """
    for name in (
        lambda run: run.start["method"],
        lambda run: f"{run.start['method']} seed {run.start['seed']}",
        lambda run: run.name,
        lambda run: str(run.folder),
    ):
        names = [name(run) for run in runs]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"a run folder is given twice: {names}; give each once")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
