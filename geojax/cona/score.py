# SPDX-License-Identifier: Apache-2.0
"""What a strategy's steps are worth at a noise scale, and the chain of strategies that follows.

Under the quadratic model of McCandlish et al. 2018 a step on B sequences at noise scale n, at its
best learning rate, makes 1 / (1 + n/B) of the progress of a step without noise. A strategy of T
seconds a step therefore has the score

    1 / (T (1 + n/B)) = X / (B + n)        X = B / T samples a second

in noise-free steps a second. Its inverse, T + n T/B, is a straight line in n: which strategies are
ever best, and from which noise on, is the lower envelope of lines.

Invariant: everything here is a pure function of its arguments; ties go the same way on every
process, to the smaller batch and then the first name. Batches and noise scales are in sequences.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from geojax.cona.rules import check_step, rate_factor
from geojax.config.rate import RateRule

WALK_POINTS = 1000
"""Samples at which a predicted chain may switch, besides the start."""
_ROUNDING = 1e-12
_LARGE_NOISE = 1e18  # stands for infinite noise, where every score is 0, with their order kept


@dataclass(frozen=True)
class Option:
    """A strategy that a run may use."""

    name: str
    """The strategy as text."""
    batch: int
    """Sequences a step."""
    seconds: float
    """Of one step."""

    def __post_init__(self):
        if self.batch < 1 or not 0 < self.seconds < math.inf:
            raise ValueError(
                f"option {self.name} has batch {self.batch} and {self.seconds} seconds a step: "
                "both must be above 0 and finite; measure it again"
            )


class Leg(NamedTuple):
    """A part of a predicted run under one strategy, from begin_sample up to end_sample."""

    option: Option
    begin_sample: int
    end_sample: int
    seconds: float
    """Of its steps, a last one that is not full counted by its share; no switch is in it."""
    noise_begin: float
    noise_end: float


def progress(rate: float, batch: int, noise: float) -> float:
    """Progress of a step in noise-free steps, at `rate` times the best noise-free learning rate.

    a (2 - a (1 + n/B)): the expected fall of a quadratic loss. Greatest at a = 1 / (1 + n/B), and
    below 0 where steps do harm. Noise is finite.
    """
    return rate * (2 - rate * (1 + noise / batch))


def worth(batch: int, noise: float, rule: RateRule | None = None) -> float:
    """Progress of a step in noise-free steps under a learning-rate rule, from 0 to 1.

    The config's rate counts as the best one for base_batch at the present noise. Adascale then is
    at the optimum at every batch (`rate_factor` says why); no rule means the same. Linear and sqrt
    fall short of it, down to 0 where the rule would diverge. A table is at the optimum, as tuned,
    but where it falls: the optimum never does, so what keeps a batch's rate below a smaller one's
    is something else than noise, and its steps fall short by that much at least.
    """
    check_step(batch, noise)
    at_best = batch / (batch + noise)
    if rule is None or rule.kind == "adascale" or math.isinf(noise):
        return at_best
    if rule.kind == "table":
        own = rate_factor(rule, batch, noise)
        share = own / max([own, *(factor for smaller, factor in rule.table if smaller < batch)])
        return share * (2 - share) * at_best  # of `progress`, at that share of the best rate
    rate = rate_factor(rule, batch, noise) / (1 + noise / rule.base_batch)
    return max(0.0, progress(rate, batch, noise))


def score(seconds: float, batch: int, noise: float, rule: RateRule | None = None) -> float:
    """Noise-free steps a second of a strategy with `seconds` a step on `batch` sequences."""
    return worth(batch, noise, rule) / seconds


def crossing(a: Option, b: Option) -> float | None:
    """The noise scale at which both score the same at their best learning rates.

    None if there is none above 0, as one of them is then at least as good everywhere; so where
    their samples a second are the same up to rounding.
    """
    ab, ba = a.batch * b.seconds, b.batch * a.seconds
    if math.isclose(ab, ba, rel_tol=_ROUNDING):
        return None
    noise = a.batch * b.batch * (b.seconds - a.seconds) / (ba - ab)
    return noise if noise > 0 else None


def fastest(options: Iterable[Option]) -> list[Option]:
    """The fastest option of each batch, by batch: under any rule no other can be best."""
    by_batch: dict[int, Option] = {}
    for option in sorted(options, key=lambda o: (o.batch, o.seconds, o.name)):
        by_batch.setdefault(option.batch, option)
    return list(by_batch.values())


def envelope(options: Iterable[Option]) -> list[tuple[float, Option]]:
    """The options that are ever best at their best learning rates, each with the noise scale from
    which on it is; the first from 0, noise and batches strictly increasing."""
    hull: list[tuple[float, Option]] = []
    for option in fastest(options):
        while hull:
            begin, top = hull[-1]
            if option.seconds > top.seconds:
                noise = crossing(top, option)
                if noise is None:  # slower, and no more samples a second
                    break
                if noise > begin:
                    hull.append((noise, option))
                    break
            hull.pop()
        else:
            hull.append((0.0, option))
    return hull


def best(options: Iterable[Option], noise: float, rule: RateRule | None = None) -> Option:
    """The option of the highest score; at infinite noise, the highest in the limit.

    ValueError if there are none.
    """
    candidates = fastest(options)
    if not candidates:
        raise ValueError("best of 0 options; give at least one strategy")
    noise = min(noise, _LARGE_NOISE)
    return max(candidates, key=lambda o: score(o.seconds, o.batch, noise, rule))


def predict_chain(
    options: Iterable[Option],
    noise_at: Callable[[float], float],
    total_samples: int,
    rule: RateRule | None = None,
    switch_seconds: float = 0.0,
) -> list[Leg]:
    """The strategies that a run of `total_samples` goes through when `noise_at(samples)` is known.

    It begins with the best one at sample 0, and looks again at WALK_POINTS samples at equal ratios
    from 1 to the end, since noise grows like a power of them: a switch is late by less than one
    ratio (1.4 % of its sample for a million samples). It switches to the best option if that saves
    more than `switch_seconds` over what is left: the progress that the present option would make
    on the remaining samples, at the noise of the moment, takes it less time by that much.

    ValueError for less than 1 sample, or a switch of negative or infinite time.
    """
    if total_samples < 1:
        raise ValueError(f"total_samples {total_samples} must be at least 1; lengthen the run")
    if not 0 <= switch_seconds < math.inf:
        raise ValueError(
            f"switch_seconds {switch_seconds} must be at least 0 and finite; give one option where "
            "switching is out of the question"
        )
    candidates = fastest(options)
    starts = [(0, best(candidates, noise_at(0), rule))]
    points = np.unique(np.geomspace(1, total_samples, WALK_POINTS).astype(np.int64)).tolist()
    for sample in points[:-1]:
        present, noise = starts[-1][1], noise_at(sample)
        challenger = best(candidates, noise, rule)
        old, new = (score(o.seconds, o.batch, noise, rule) for o in (present, challenger))
        left_seconds = (total_samples - sample) / present.batch * present.seconds
        if left_seconds * (new - old) > switch_seconds * new:
            starts.append((sample, challenger))
    ends = [*(sample for sample, _ in starts[1:]), total_samples]
    return [
        Leg(
            option,
            begin,
            end,
            (end - begin) / option.batch * option.seconds,
            noise_at(begin),
            noise_at(end),
        )
        for (begin, option), end in zip(starts, ends, strict=True)
    ]


def power_law(samples: Sequence[float], noise: Sequence[float]) -> Callable[[float], float]:
    """Noise scale by samples seen, e^a samples^b with b >= 0: noise as it is extrapolated.

    Least squares in log noise; noise that falls gives b = 0 and its geometric mean. ValueError
    unless there are points at two numbers of samples or more, all above 0 and finite.
    """
    if len(samples) != len(noise):
        raise ValueError(f"{len(samples)} samples and {len(noise)} noise scales; give pairs")
    for name, values in (("samples", samples), ("noise scale", noise)):
        for value in values:
            if not 0 < value < math.inf:
                raise ValueError(
                    f"{name} {value} must be above 0 and finite to fit a power law; leave the "
                    "point out"
                )
    if len(set(samples)) < 2:
        raise ValueError(
            f"{len(set(samples))} different samples in {list(samples)}, and a power law needs 2; "
            "measure for longer"
        )
    x, y = np.log(samples), np.log(noise)
    spread = x - x.mean()
    exponent = max(0.0, float(spread @ y / (spread @ spread)))
    scale = math.exp(y.mean() - exponent * x.mean())
    return lambda seen: scale * seen**exponent
