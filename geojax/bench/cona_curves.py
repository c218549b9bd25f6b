# SPDX-License-Identifier: Apache-2.0
"""Held-out loss over the seconds of the clock, and what of it says which method is faster.

Invariant: a pure function of its arguments. What a step does to the loss depends on its batch
alone, so one run of each batch gives the curve of every fixed strategy: its samples over the batch,
times the strategy's seconds a step. Losses are in nats a token, noise scales in sequences.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from geojax.cona.score import Option
from geojax.config import require
from geojax.track.metrics import Record
from geojax.track.summary import Run

_NOISE_POINTS = 24  # at equal ratios of samples; between them noise is interpolated


@dataclass(frozen=True)
class Curve:
    """A method's evaluations, in order."""

    name: str
    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    losses: tuple[float, ...]

    @property
    def end(self) -> float:
        """Seconds of the whole run."""
        return self.seconds[-1]

    @property
    def final_perplexity(self) -> float:
        return math.exp(self.losses[-1])


def curve_of(run: Run, name: str) -> Curve:
    """The run's own curve; an evaluation that was not finite is left out."""
    return from_evals(name, run.evals)


def from_evals(name: str, evals: Sequence[Record]) -> Curve:
    """Of records with seconds, tokens and loss."""
    found = [e for e in evals if e["loss"] is not None]
    seconds, tokens, losses = (tuple(e[k] for e in found) for k in ("seconds", "tokens", "loss"))
    return Curve(name, seconds, tokens, losses)


def fixed_curve(run: Run, option: Option, seq_len: int) -> Curve:
    """What a fixed strategy makes of the curve of its batch."""
    own = curve_of(run, option.name)
    seconds = tuple(t / (seq_len * option.batch) * option.seconds for t in own.tokens)
    return Curve(option.name, seconds, own.tokens, own.losses)


def seconds_to(curve: Curve, loss: float) -> float | None:
    """When the curve first gets down to `loss`, linear between evaluations; None: it never does."""
    for i, after in enumerate(curve.losses):
        if after <= loss:
            if i == 0:
                return curve.seconds[0]
            before = curve.losses[i - 1]
            share = (before - loss) / (before - after)
            return curve.seconds[i - 1] + share * (curve.seconds[i] - curve.seconds[i - 1])
    return None


def loss_at(curve: Curve, seconds: float) -> float:
    """The loss at that time, linear between evaluations; before the first that one's, and after the
    last, where the run has ended and its result is there, the last one's."""
    return float(np.interp(seconds, curve.seconds, curve.losses))


def best_fixed(curves: Sequence[Curve], loss: float) -> Curve | None:
    """The first to get down to `loss`; None where none does."""
    reached = [(s, c.name, c) for c in curves if (s := seconds_to(c, loss)) is not None]
    return min(reached)[2] if reached else None


def hindsight(curves: Sequence[Curve], loss: float) -> Curve:
    """The best fixed strategy for that loss; where none gets there, the one that comes nearest."""
    return best_fixed(curves, loss) or min(curves, key=lambda c: (min(c.losses), c.name))


def targets(curve: Curve, shares: Sequence[float]) -> list[float]:
    """The loss that the run has at each share of its time; falling, as a target is reached once."""
    losses = [loss_at(curve, share * curve.end) for share in shares]
    return np.minimum.accumulate(losses).tolist()


def over_oracle(curve: Curve, oracle: Sequence[Curve], from_share: float) -> list[float]:
    """Perplexity over the lowest that any of `oracle` has at the same time, less 1, at each
    evaluation after `from_share` of the run's time."""
    return [
        math.exp(loss - min(loss_at(other, seconds) for other in oracle)) - 1
        for seconds, loss in zip(curve.seconds, curve.losses, strict=True)
        if seconds > from_share * curve.end
    ]


def noise_curve(run: Run) -> Callable[[float], float]:
    """The noise that the run measured, by its samples: means of the logarithm at equal ratios of
    samples, and straight lines in logarithms between them. ConfigError where it measured none."""
    known = [(r["samples"], r["noise"]["value"]) for r in run.rounds if r.get("noise")]
    known = [(s, n) for s, n in known if n]
    require(known, f"the noise of {run.folder} was never known; give it more tokens")
    pairs = np.log(known)
    edges = np.linspace(pairs[0, 0], pairs[-1, 0], _NOISE_POINTS + 1)
    part = np.clip(np.searchsorted(edges, pairs[:, 0], side="right") - 1, 0, _NOISE_POINTS - 1)
    means = np.array([pairs[part == i].mean(0) for i in np.unique(part)])
    return lambda samples: math.exp(
        np.interp(math.log(max(samples, 1.0)), means[:, 0], means[:, 1])
    )


def crossed_at(noise: Callable[[float], float], scale: float, total_samples: int) -> float | None:
    """The share of the run at which its noise first comes up to `scale`; None: it never does."""
    for sample in np.unique(np.geomspace(1, total_samples, 2000).astype(int)).tolist():
        if noise(sample) >= scale:
            return sample / total_samples
    return None


def tokens_for_equal_loss(
    losses: Mapping[int, float], slope: float, noise: Callable[[float], float], total_samples: int
) -> dict[int, tuple[float, float]]:
    """By batch: tokens to one loss, over those of the smallest batch, as measured and by the noise.

    Measured: the batch ended `losses` apart after equal tokens, and e times as many lower the loss
    of the smallest by `slope`. By the noise n: a sample is worth 1 / (batch + n), averaged over the
    run's.
    """
    first = min(losses)
    seen = np.linspace(0, total_samples, _NOISE_POINTS * 10 + 1)[1:]
    scales = np.array([noise(s) for s in seen])
    worth = {batch: float(np.mean(1 / (batch + scales))) for batch in losses}
    return {
        batch: (math.exp((loss - losses[first]) / slope), worth[first] / worth[batch])
        for batch, loss in losses.items()
    }


def vertex(losses: Mapping[float, float]) -> float:
    """The learning rate of the least loss: the vertex of the parabola through the best one and its
    neighbours, in log rate; the best one where it has no neighbour on a side."""
    rates = sorted(losses)
    place = min(range(len(rates)), key=lambda i: losses[rates[i]])
    if place in (0, len(rates) - 1):
        return rates[place]
    around = rates[place - 1 : place + 2]
    square, slope, _ = np.polyfit(np.log(around), [losses[r] for r in around], 2)
    return math.exp(-slope / (2 * square)) if square > 0 else rates[place]
