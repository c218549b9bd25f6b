# SPDX-License-Identifier: Apache-2.0
"""Seconds a step of every strategy: a model's predictions, corrected by the steps that were timed.

The logarithm of (true / predicted) is taken as one number for all strategies, plus one for each
family (the same tp and pp), plus one for each strategy: independent, normal, of mean 0. Timed steps
then say something about strategies that never ran, most about those of their own family, and how
sure that is: linear regression of Gaussian processes (Rasmussen and Williams 2006, chapter 2) with
a covariance of three constants. How far families differ, and strategies within one, is itself
learnt from those that were timed.

Invariant: without a timed step all strategies keep the order of their predictions.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

COMMON_SD = 10.0
"""Of the number that all strategies share: a machine may be any number of times slower."""
OWN_SHARE = 0.25
"""Deviation between strategies of a family, as a share of that between families."""
STEP_SD = 0.05
"""Of the log of one round's mean step time, before rounds show what it is here."""
_PRIOR_COUNT = 2  # of families, or strategies, that the prior of their deviation counts as
_DECAY = 0.5 ** (1 / 20)  # a timing counts half after 20 rounds


class Speeds(NamedTuple):
    """Of some strategies, in the order asked for."""

    seconds: Float64[np.ndarray, " n"]
    sd: Float64[np.ndarray, " n"]
    """Of the logarithm of (seconds / seconds of the reference)."""
    timed: list[bool]
    """Whether it ran itself."""
    family_timed: list[bool]


class SpeedBelief:
    """What is known of step times."""

    def __init__(self, predicted: Mapping[str, float], families: Mapping[str, str], error: float):
        """`predicted` seconds and family by strategy; `error`: prior deviation of the logarithm
        between families."""
        self._predicted, self._families, self._error = dict(predicted), dict(families), error
        self._timed: dict[str, tuple[float, float]] = {}  # mean log residual, rounds
        self._scatter = (STEP_SD**2, _PRIOR_COUNT + 1.0)  # mean square within strategies, rounds

    def observe(self, name: str, seconds: float) -> None:
        """A round of steps of `seconds` each; recent rounds count more."""
        residual = math.log(seconds / self._predicted[name])
        mean, rounds = self._timed.get(name, (0.0, 0.0))
        rounds *= _DECAY
        if rounds:  # what a new round is off by has the variance of both
            square, count = self._scatter
            off = (residual - mean) ** 2 * rounds / (rounds + 1)
            count *= _DECAY
            self._scatter = ((square * count + off) / (count + 1), count + 1)
        self._timed[name] = ((mean * rounds + residual) / (rounds + 1), rounds + 1)

    def timed(self, name: str) -> bool:
        """Whether it ran."""
        return name in self._timed

    def of(self, names: Sequence[str], reference: str) -> Speeds:
        """Seconds a step of `names`, and how sure they are against `reference`."""
        seen = list(self._timed)
        families = {self._families[n] for n in seen}
        prior = np.log([self._predicted[n] for n in (*names, reference)])
        spread, own = self._deviations()
        asked = [*names, reference]

        def covariance(a: Sequence[str], b: Sequence[str]) -> np.ndarray:
            family = np.array([[self._families[x] == self._families[y] for y in b] for x in a])
            same = np.array([[x == y for y in b] for x in a])
            return COMMON_SD**2 + spread**2 * family + own**2 * same

        variance = np.full(len(asked), COMMON_SD**2 + spread**2 + own**2)
        cross = covariance(asked, [reference])[:, 0]
        mean = np.zeros(len(asked))
        if seen:
            residuals, rounds = (np.array(x) for x in zip(*self._timed.values(), strict=True))
            between = covariance(asked, seen)
            known = covariance(seen, seen) + np.diag(self._scatter[0] / rounds)
            weights = np.linalg.solve(known, between.T)
            mean = residuals @ weights
            variance = variance - np.einsum("ij,ji->i", between, weights)
            cross = cross - between @ weights[:, -1]
        seconds = np.exp(prior + mean)
        apart = variance + variance[-1] - 2 * cross
        apart[-1] = 0.0
        same = np.array([name == reference for name in names])
        sd = np.where(same, 0.0, np.sqrt(np.maximum(apart[:-1], 0.0)))
        return Speeds(
            seconds[:-1],
            sd,
            [n in self._timed for n in names],
            [self._families[n] in families for n in names],
        )

    def _deviations(self) -> tuple[float, float]:
        """Between families, and between strategies of one: the prior, and those that were timed."""
        groups: dict[str, list[float]] = {}
        for name, (residual, _) in self._timed.items():
            groups.setdefault(self._families[name], []).append(residual)
        means = [float(np.mean(group)) for group in groups.values()]
        within = sum(float(np.var(group)) * len(group) for group in groups.values())
        degrees = sum(len(group) - 1 for group in groups.values())

        def learnt(prior: float, squares: float, count: int) -> float:
            return math.sqrt((_PRIOR_COUNT * prior**2 + squares) / (_PRIOR_COUNT + count))

        between = float(np.var(means)) * len(means) if means else 0.0
        return (
            learnt(self._error, between, max(len(means) - 1, 0)),
            learnt(OWN_SHARE * self._error, within, degrees),
        )

    def state(self) -> dict[str, Any]:
        """For JSON; `restore` goes on from it."""
        timed = {name: list(value) for name, value in self._timed.items()}
        return {"timed": timed, "scatter": list(self._scatter)}

    def restore(self, state: dict[str, Any]) -> None:
        """Timings of strategies that are no candidates any more are dropped."""
        self._timed = {
            name: (mean, rounds)
            for name, (mean, rounds) in state["timed"].items()
            if name in self._predicted
        }
        self._scatter = (state["scatter"][0], state["scatter"][1])
