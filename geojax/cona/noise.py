# SPDX-License-Identifier: Apache-2.0
"""The noise scale of the gradient, from squared norms of the gradients of a step's parts.

S is the trace of the gradient's covariance, G2 the squared norm of its mean, and S / G2, in
sequences, the batch in which both weigh the same (McCandlish et al. 2018, "An Empirical Model of
Large-Batch Training"). Invariant: S and G2 are averaged apart, each step by its samples, and
divided once, at the end: G2 of one step is often below 0, so no ratio of one step is ever taken.

Two kinds of data. The whole gradient, between the parts of a step or the halves of a probe: both
are unbiased for the same S and G2, so they share one average. And the gradients of norm layers, a
sequence at a time, which every strategy has: another quantity, about proportional to the first. The
proportion comes from spans where both were seen, over CALIBRATION_WINDOWS windows; its logarithm is
combined by precision with a prior around 0. The estimate is the one with the narrower interval: of
the whole, or of the norms times the proportion.

Weights fall by exp(-samples / window). Time is one count of samples, of the kind that saw the most:
the norms, where they are always there. Where a kind stops, its mean stays and the variance of that
grows by exp(samples since / window); so the norms take over, and later the prior. Intervals are of
the average over the window, which a noise scale that moves is ahead of by about a window.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from jaxtyping import Float64
from scipy.special import ndtri, stdtrit

Source = Literal["parts", "norms", "probe"]

CONFIDENCE = 0.95
CALIBRATION_WINDOWS = 3
PRIOR_SD = math.log(1.4)
"""Of the log of (noise scale of the whole / of the norms): the factor that Gray et al. 2024 found,
"Normalization Layer Per-Example Gradients are Sufficient to Predict Gradient Noise Scale in
Transformers"."""

WHOLE, NORMS = 0, 1  # rows of sums
_STATE = ("at", "paired_at", "recent", "pending", "paired")


class Moments(NamedTuple):
    """Sums over the good steps of a chunk, of S and G2 as `single_step` gives them.

    Floats on the host, arrays or tracers inside a program.
    """

    steps: Any
    s: Any
    g: Any
    ss: Any
    gg: Any
    sg: Any


@dataclass(frozen=True)
class NoiseEstimate:
    """A noise scale in sequences, with its interval at CONFIDENCE."""

    value: float | None
    """None where the mean of G2 is not above 0."""
    low: float
    high: float | None
    """None where G2 does not differ from 0: all that is known is `low`."""
    source: str
    """"whole gradient", "norms, calibrated", or by the prior alone "norms, uncalibrated"."""
    steps: float
    """Effective number of steps: (sum w)^2 / sum w^2, w a step's weight."""

    def __str__(self) -> str:
        low, *rest = (
            None if x is None else f"{x:.0f}" if x >= 10 else f"{x:.1f}"
            for x in (self.low, self.value, self.high)
        )
        if None in rest:
            return f"at least {low} sequences"
        return f"{rest[0]} ({low}-{rest[1]}) sequences"


def single_step(total_square, part_squares, tokens, tokens_squared, sequences):
    """Unbiased (S, G2) of one step, with S / G2 in sequences; of floats, arrays or tracers.

    `total_square` = |sum g_i|^2 and `part_squares` = sum |g_i|^2 of two parts or more, g_i a
    gradient summed (not averaged) over n_i tokens that bear loss; `tokens` = N = sum n_i,
    `tokens_squared` = sum n_i^2. With g_i of mean n_i G and covariance n_i C, parts independent,

        E |sum g_i|^2 = N^2 |G|^2 + N tr C          E sum |g_i|^2 = sum n_i^2 |G|^2 + N tr C

    are solved for |G|^2 and tr C; a sequence has N / `sequences` tokens. One part gives 0 / 0.
    """
    share = tokens_squared / tokens / tokens
    g = (total_square - part_squares) / tokens / tokens / (1 - share)
    s = (part_squares - share * total_square) / tokens / (1 - share)
    return s * sequences / tokens, g


class NoiseTracker:
    """Averages of S and G2 over about `window_samples` sequences, and what they say.

    Of the sources of one chunk update the norms first: the others then count as up to date.
    """

    def __init__(self, window_samples: float):
        if not 0 < window_samples < math.inf:
            raise ValueError(f"noise window of {window_samples} samples; use a finite one above 0")
        self._window = float(window_samples)
        self._at = np.zeros(2)  # the count of samples at the last update of each kind
        self._paired_at = np.zeros(())
        # Sums over steps: of w (1, S, G2), then of w^2 (1, S, G2, S^2, G2^2, S G2), w in samples.
        self._recent = np.zeros((2, 9))
        self._pending = np.zeros((2, 9))  # since both kinds were last seen
        self._paired = np.zeros((2, 9))  # of spans where both were seen

    def resize(self, window_samples: float) -> None:
        """Average over another number of samples from now on."""
        self._window = float(window_samples)

    def update(self, source: Source, batch: int, moments: Moments) -> None:
        """Take in steps of `batch` sequences. No steps, or a sum that is not finite: no change."""
        sums = np.array([float(x) for x in (*moments[:3], *moments)])
        if not (np.isfinite(sums).all() and sums[0] > 0):
            return
        kind = NORMS if source == "norms" else WHOLE
        now = max(self._at[kind] + batch * sums[0], self._at.max())
        decay = math.exp((self._at[kind] - now) / self._window)
        self._at[kind] = now
        for held in (self._recent, self._pending):
            held[kind] = _reweighted(held[kind], decay) + _reweighted(sums, batch)
        weights = self._pending[:, 0]
        if weights.all():  # what waits is paired, the norms with no more weight than the whole
            decay = math.exp((self._paired_at - now) / (CALIBRATION_WINDOWS * self._window))
            for row in (WHOLE, NORMS):
                new = _reweighted(self._pending[row], weights[WHOLE] / weights[row])
                self._paired[row] = _reweighted(self._paired[row], decay) + new
            self._pending[:] = 0
            self._paired_at[()] = now

    def estimate(self) -> NoiseEstimate | None:
        """The noise scale as of now; None before two steps of one kind."""
        ages = (self._at.max() - self._at) / self._window
        whole = _fieller(self._recent[WHOLE], ages[WHOLE])
        norms = _fieller(self._recent[NORMS], ages[NORMS])
        if norms:
            since = float(self._at.max() - self._paired_at)
            norms = _calibrated(norms, self._paired, since / (CALIBRATION_WINDOWS * self._window))
        return min((found for found in (whole, norms) if found), key=_width, default=None)

    def state(self) -> dict[str, Any]:
        """All that the tracker holds, for JSON; `from_state` goes on from it bit for bit."""
        held = {name: getattr(self, f"_{name}").tolist() for name in _STATE}
        return {"window_samples": self._window, **held}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The tracker that gave `state`."""
        tracker = cls(state["window_samples"])
        for name in _STATE:
            setattr(tracker, f"_{name}", np.array(state[name]))
        return tracker


class _Means(NamedTuple):
    """Weighted means of S and G2 with their covariance, and the effective number of steps."""

    steps: float
    s: float
    g: float
    var_s: float
    var_g: float
    cov: float


def _reweighted(sums: Float64[np.ndarray, "9"], factor: float) -> Float64[np.ndarray, "9"]:
    """The sums with every weight times `factor`."""
    return sums * np.repeat([factor, factor * factor], [3, 6])


def _means(sums: Float64[np.ndarray, "9"]) -> _Means | None:
    """None below two effective steps.

    Var(mean) = sum w^2 (x - mean)^2 / (sum w)^2, with Bessel's correction: as steps of larger
    batches vary less, a common variance is not assumed.
    """
    weight, s, g, square, square_s, square_g, ss, gg, sg = sums.tolist()
    if square == 0 or (steps := weight * weight / square) < 2 - 1e-9:
        return None
    s, g = s / weight, g / weight
    scale = steps / (steps - 1) / weight / weight
    var_s = scale * max(ss - 2 * s * square_s + s * s * square, 0.0)
    var_g = scale * max(gg - 2 * g * square_g + g * g * square, 0.0)
    cov = scale * (sg - s * square_g - g * square_s + s * g * square)
    return _Means(steps, s, g, var_s, var_g, cov)


def _squared_quantile(steps: float, age: float) -> float:
    """Student's t at CONFIDENCE, squared, times the growth of a variance in `age` idle windows."""
    return float(stdtrit(steps - 1, (1 + CONFIDENCE) / 2)) ** 2 * math.exp(min(age, 100))


def _fieller(sums: Float64[np.ndarray, "9"], age: float) -> NoiseEstimate | None:
    """S / G2 with the interval of Fieller's theorem.

    It holds the r >= 0 of which t does not reject S - r G2 = 0: (s - r g)^2 <= t^2 Var(s - r g), or
    a r^2 - 2 b r + c <= 0. Where G2 differs from 0 (a > 0) these lie between two roots. Elsewhere
    there is no upper end, and the lower one is the root above 0, or 0 where S does not differ from
    0 either. A mean of G2 below 0 counts as 0, which only lowers that end.
    """
    means = _means(sums)
    if means is None:
        return None
    s, g = means.s, max(means.g, 0.0)
    t_square = _squared_quantile(means.steps, age)
    a, c = g * g - t_square * means.var_g, s * s - t_square * means.var_s
    b = s * g - t_square * means.cov
    upper = b + math.sqrt(max(b * b - a * c, 0.0))
    value = max(s / g, 0.0) if g > 0 else None
    low = c / upper if min(s, c, upper) > 0 else 0.0
    high = max(upper / a, 0.0) if a > 0 else None
    return NoiseEstimate(value, low, high, "whole gradient", means.steps)


def _calibrated(
    norms: NoiseEstimate, paired: Float64[np.ndarray, "2 9"], age: float
) -> NoiseEstimate:
    """`norms` times the proportion of the whole, with the errors of both in the interval.

    The proportion has its variance to first order, made wider where t is, and counts where both G2
    are two deviations above 0. Half widths add as squares, in logarithms (Zou & Donner 2008,
    "Construction of Confidence Limits About Effect Measures"); where there is no value they just
    add.
    """
    log_ratio, sd, source = 0.0, PRIOR_SD, "norms, uncalibrated"
    z = float(ndtri((1 + CONFIDENCE) / 2))
    whole, part = (_means(sums) for sums in paired)
    if whole and part and all(x.s > 0 and x.g > 2 * math.sqrt(x.var_g) for x in (whole, part)):
        variance = sum(
            max(x.var_s / x.s**2 + x.var_g / x.g**2 - 2 * x.cov / x.s / x.g, 0.0)
            * (_squared_quantile(x.steps, age) / z**2)
            for x in (whole, part)
        )
        trust = PRIOR_SD**2 / (PRIOR_SD**2 + variance)
        log_ratio = trust * (math.log(whole.s / whole.g) - math.log(part.s / part.g))
        sd, source = math.sqrt(trust * variance), "norms, calibrated"
    ratio, spread = math.exp(log_ratio), z * sd
    value, low, high = norms.value, norms.low, norms.high
    if value:
        low = value * math.exp(-math.hypot(math.log(value / low), spread)) if low else 0.0
        high = high and value * math.exp(math.hypot(math.log(high / value), spread))
    else:
        low, high = low * math.exp(-spread), high and high * math.exp(spread)
    return NoiseEstimate(
        value and value * ratio, low * ratio, high and high * ratio, source, norms.steps
    )


def _width(found: NoiseEstimate) -> tuple[float, float]:
    """Sorts closed intervals by the ratio of their ends, then open ones from the highest on."""
    return found.high / found.low if found.high and found.low else math.inf, -found.low
