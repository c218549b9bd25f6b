# SPDX-License-Identifier: Apache-2.0
"""A chain of strategies predicted before training, and what other choices would take instead.

Progress counts in noise-free steps: at noise n and batch B one of them takes B + n samples
(geojax/cona/score.py). Noise depends on how far training is, not on what brought it there, so it is
a function of progress p: the noise that the chain meets as its samples pass. Another choice of B
sequences in T seconds a step goes from p to q in

    samples = B (q - p) + integral of n over progress, from p to q        seconds = samples T / B

so a fixed strategy takes T (P + N/B) for all the chain's progress P, N its integral of noise, and
the best one in hindsight is the best one at the mean noise N / P.

Invariant: everything but what reads and draws is a pure function. Batches and noise scales are in
sequences, learning rates the best at every batch; a switch costs the same whoever makes it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from scipy.optimize import root_scalar

from geojax.cona.score import Leg, Option, best, fastest, power_law, predict_chain
from geojax.config import ConfigError, require
from geojax.track.console import format_count
from geojax.track.metrics import read_records

FIRST_SHARE = 0.01
"""Share of the run at which an assumed noise has its first value."""
_LEG_POINTS = 1000  # of a leg, at which its integrals are taken


class NoisePoint(NamedTuple):
    """The noise scale that a run had measured by `samples`, with its interval."""

    samples: float
    value: float
    low: float
    high: float | None


@dataclass(frozen=True)
class Noise:
    """What is taken for the noise scale of the planned run."""

    at: Callable[[float], float]
    """Sequences, by samples seen."""
    source: str
    points: tuple[NoisePoint, ...] = ()
    """What it was fitted to."""

    @property
    def spread(self) -> float:
        """The factor by which points lie off the fit, one deviation of the logarithm."""
        return math.exp(np.std([math.log(p.value / self.at(p.samples)) for p in self.points]))


@dataclass(frozen=True)
class Chain:
    """A predicted run."""

    legs: tuple[Leg, ...]
    switch_seconds: float
    progress: Float64[np.ndarray, " points"]
    """Noise-free steps at points along the run, from 0 on."""
    noise_sum: Float64[np.ndarray, " points"]
    """The integral of noise over progress up to each: samples beyond those of noise-free steps."""

    @property
    def seconds(self) -> float:
        return sum(leg.seconds for leg in self.legs) + self.switch_seconds * (len(self.legs) - 1)

    @property
    def mean_noise(self) -> float:
        """Over progress."""
        return float(self.noise_sum[-1] / self.progress[-1])


class Choice(NamedTuple):
    """One way to make a chain's progress."""

    name: str
    options: tuple[Option, ...]
    """In the order of their use."""
    samples: float
    seconds: float
    """With its switches."""


def assumed_noise(first: float, last: float, total_samples: int) -> Noise:
    """A power law of samples: `first` at FIRST_SHARE of the run, `last` at its end."""
    require(
        0 < first <= last < math.inf,
        f"noise {first:g} {last:g} must be above 0, finite, and not fall; give START, then END",
    )
    law = power_law([FIRST_SHARE * total_samples, total_samples], [first, last])
    return Noise(law, f"assumed, {first:g} at {FIRST_SHARE:.0%} of the run and {last:g} at its end")


def measured_noise(run: Path, seq_len: int) -> Noise:
    """A power law fitted to the noise that the run of a folder measured, by its own samples.

    Where its sequences have another length than `seq_len`, samples and noise keep their tokens.
    ConfigError where the folder holds no measured noise at two numbers of samples or more.
    """
    path = run / "metrics.jsonl"
    require(path.is_file(), f"no file {path}; --noise-from wants the folder of a run")
    points, factor = [], 1.0
    for record in read_records(path):
        found = record.get("noise") if record["kind"] == "round" else None
        if found and (found["value"] or 0) > 0:
            factor = record["tokens"] / record["samples"] / seq_len
            high = None if found["high"] is None else found["high"] * factor
            value, low = found["value"] * factor, found["low"] * factor
            points.append(NoisePoint(record["samples"] * factor, value, low, high))
    require(points, f"{run} measured no noise; train it with `noise` or `cona` in its config")
    try:
        law = power_law([p.samples for p in points], [p.value for p in points])
    except ValueError as error:
        raise ConfigError(f"{run}: {error}") from error
    first, last = (format_count(points[i].samples * seq_len) for i in (0, -1))
    source = f"fitted to {len(points)} rounds of {run}, {first} to {last} tokens"
    if factor != 1:
        source += f", in tokens, as its sequences have {factor * seq_len:.0f}"
    return Noise(law, source, tuple(points))


def predict(
    options: Iterable[Option],
    noise_at: Callable[[float], float],
    total_samples: int,
    switch_seconds: float = 0.0,
) -> Chain:
    """The chain of a run of `total_samples`, with the progress that it makes.

    Before a step of the smallest batch noise is that after it: at sample 0 a power law has none.
    Integrals are trapezia over samples, at equal ratios. ValueError as of `predict_chain`, and
    where noise is not finite.
    """
    candidates = fastest(options)
    first = min((o.batch for o in candidates), default=0)

    def noise(seen: float) -> float:
        found = noise_at(max(seen, first))
        if not found < math.inf:
            raise ValueError(
                f"noise scale {found} at {max(seen, first):g} samples must be finite; lower it"
            )
        return found

    legs = predict_chain(candidates, noise, total_samples, None, switch_seconds)
    progress, noise_sum = [np.zeros(1)], [np.zeros(1)]
    for leg in legs:
        points = np.geomspace(max(leg.begin_sample, 1), leg.end_sample, _LEG_POINTS)
        samples = np.unique([leg.begin_sample, *points])
        scales = np.array([noise(seen) for seen in samples.tolist()])
        pace = 1 / (leg.option.batch + scales)  # progress a sample
        for whole, part in ((progress, pace), (noise_sum, scales * pace)):
            pieces = np.diff(samples) * (part[1:] + part[:-1]) / 2
            whole.append(whole[-1][-1] + np.cumsum(pieces))
    return Chain(tuple(legs), switch_seconds, np.concatenate(progress), np.concatenate(noise_sum))


def compare(chain: Chain, options: Iterable[Option]) -> list[Choice]:
    """The chain and its rivals, each up to the chain's progress.

    Rivals: the least seconds a step, the most samples a second, the best fixed strategy in
    hindsight, and, where batches allow for it, a warm-up that doubles them by hand.
    """
    candidates = fastest(options)
    fixed = {
        "shortest iteration": min(candidates, key=lambda o: o.seconds),
        "highest throughput": max(candidates, key=lambda o: o.batch / o.seconds),
        "best fixed in hindsight": best(candidates, chain.mean_noise),
    }
    own = tuple(leg.option for leg in chain.legs)
    choices = [Choice("chain", own, float(chain.legs[-1].end_sample), chain.seconds)]
    for name, option in fixed.items():
        samples = float(option.batch * chain.progress[-1] + chain.noise_sum[-1])
        seconds = samples / option.batch * option.seconds
        choices.append(Choice(name, (option,), samples, seconds))
    stages = [candidates[0]]
    for option in candidates:
        if option.batch >= 2 * stages[-1].batch:
            stages.append(option)
    return choices + ([_warm_up(chain, stages)] if len(stages) > 1 else [])


def _warm_up(chain: Chain, stages: Sequence[Option]) -> Choice:
    """Each stage in turn, for the same number of samples."""
    samples = [o.batch * chain.progress + chain.noise_sum for o in stages]  # up to each point

    def lacking(share: float) -> float:
        """Samples that the last stage needs beyond its share."""
        made = 0.0
        for passed in samples[:-1]:
            made = np.interp(
                np.interp(made, chain.progress, passed) + share, passed, chain.progress
            )
        return float(samples[-1][-1] - np.interp(made, chain.progress, samples[-1])) - share

    share = root_scalar(lacking, bracket=(0.0, float(samples[-1][-1]))).root
    seconds = sum(share / o.batch * o.seconds for o in stages)
    seconds += chain.switch_seconds * (len(stages) - 1)
    return Choice("batch warm-up by hand", tuple(stages), share * len(stages), seconds)
