# SPDX-License-Identifier: Apache-2.0
"""Whether to change the strategy now, and to which: one pure function of what is known.

Invariant: `decide` looks at nothing but its arguments, all of which a run writes down, so the chain
of a run can be computed again from its records (`replay`).

A change pays where the progress of the rest of the run takes less time, with confidence, by more
than the change costs. With R = score(new) / score(present), and L the run's remaining seconds under
the present strategy, it saves L (1 - 1/R); for R stands its lower end, of the noise's interval and
of the step times' deviation, added as squares of logarithms.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from geojax.cona.score import score
from geojax.config.cona import ConaConfig
from geojax.config.rate import RateRule

CONFIDENCE_SDS = 1.645
"""Deviations between the expected and the lower end of a gain: 95 % one-sided."""
TRIAL_SDS = 3.0
"""Deviations above expectation at which a family that never ran is worth a trial."""
_LARGE_NOISE = 1e18

Kind = Literal["keep", "prepare", "switch", "trial", "fallback"]


class Known(NamedTuple):
    """What is known of one strategy."""

    name: str
    batch: int
    seconds: float
    """A step, expected."""
    sd: float
    """Of log (seconds / seconds of the present strategy)."""
    timed: bool
    family_timed: bool
    ready: bool
    """Compiled, or to be had without waiting."""


@dataclass(frozen=True)
class Situation:
    """All that a decision depends on, beside the config."""

    round: int
    samples: int
    total_samples: int
    elapsed_seconds: float
    present: str
    previous: str | None
    """The strategy before the present one."""
    rounds_here: int
    """Since the last switch."""
    on_trial: bool
    noise: tuple[float | None, float, float | None] | None
    """(value, low, high) in sequences, as a NoiseEstimate; None: not known yet."""
    switch_seconds: float
    """Expected of one switch."""
    trial_seconds: float
    """Spent so far on switches to and from what did not deliver."""
    options: tuple[Known, ...]
    """The present one and those that may be chosen."""


@dataclass(frozen=True)
class Decision:
    """What to do."""

    kind: Kind
    to: str
    reason: str
    gain: float
    """Expected score over the present one's."""
    gain_low: float
    """Its lower end."""


def decide(now: Situation, config: ConaConfig, rule: RateRule | None) -> Decision:
    """What to do at the end of a round."""
    by_name = {option.name: option for option in now.options}
    present = by_name[now.present]

    def keep(reason: str, gain: float = 1.0, low: float = 1.0) -> Decision:
        return Decision("keep", now.present, reason, gain, low)

    if now.noise is None:
        return keep("the noise is not known yet")
    gains = {o.name: _gain(o, present, now.noise, rule) for o in now.options if o is not present}
    previous = now.previous
    if now.on_trial and not present.timed:
        return keep("a trial that has no timing yet: something was compiled beside it")
    if now.on_trial and previous in gains:
        gain, low = gains[previous]
        if gain > 1:
            reason = f"the trial did not deliver: {previous} scores {gain:.3f} times as much"
            return _when_ready(by_name[previous], "fallback", reason, gain, low)
    if now.rounds_here < config.dwell_rounds:
        return keep(f"{now.rounds_here} of {config.dwell_rounds} rounds since the last switch")
    if not gains:
        return keep("no other strategy can be chosen")

    left = (now.total_samples - now.samples) / present.batch * present.seconds
    name, (gain, low) = max(gains.items(), key=lambda item: (item[1][1], item[0]))
    saved = left * (1 - 1 / low) if low > 0 else -left
    if low > 1 + config.margin and saved > now.switch_seconds:
        reason = f"saves {saved:.3g} s of {left:.3g}, or more, and costs {now.switch_seconds:.3g} s"
        kind: Kind = "fallback" if name == previous and not now.on_trial else "switch"
        return _when_ready(by_name[name], kind, reason, gain, low)
    what = f"{name} may score {gain:.3f} times as much, {low:.3f} at least"
    tried, budget = _trial(now, config, gains, rule, left)
    if budget is not None:
        what += f"; trials that failed have spent {now.trial_seconds:.3g} s of {budget:.3g}"
    return tried or keep(what, gain, low)


def _trial(
    now: Situation,
    config: ConaConfig,
    gains: Mapping[str, tuple[float, float]],
    rule: RateRule | None,
    left: float,
) -> tuple[Decision | None, float | None]:
    """A strategy whose steps were never timed, if it would pay as it is expected to be, or if its
    family may be far better than expected; and the budget, in seconds, that forbade one.

    What only may be better shares `trial_share` of the run; what would pay as expected has as much
    again, so that looking around at first does not forbid it later.
    """
    assert now.noise is not None, "asked only where noise is known"
    present = next(o for o in now.options if o.name == now.present)
    share, spent = config.trial_share, now.trial_seconds + 2 * now.switch_seconds
    hopes, forbade = [], None
    for option in now.options:
        if option.timed or option.name not in gains:
            continue
        budget = share * (now.elapsed_seconds + left) * (2 if option.family_timed else 1)
        if option.family_timed:
            _, hope = _gain(option._replace(sd=0.0), present, now.noise, rule)
            why = f"as predicted it would score {hope:.3f} times as much, or more"
        else:
            hope = gains[option.name][0] * math.exp(TRIAL_SDS * option.sd)
            why = f"nothing like it has run yet; it may score up to {hope:.2f} times as much"
        if hope > 1 + config.margin and left * (1 - 1 / hope) > 2 * now.switch_seconds:
            if spent <= budget:
                hopes.append((gains[option.name], option, why))
            else:
                forbade = max(budget, forbade or 0.0)
    if not hopes:
        return None, forbade
    (gain, low), option, why = max(hopes, key=lambda h: (h[0], h[1].name))
    return _when_ready(option, "trial", why, gain, low), None


def _when_ready(option: Known, kind: Kind, reason: str, gain: float, low: float) -> Decision:
    return Decision(kind if option.ready else "prepare", option.name, reason, gain, low)


def _gain(
    option: Known,
    present: Known,
    noise: tuple[float | None, float, float | None],
    rule: RateRule | None,
) -> tuple[float, float]:
    """Expected ratio of scores, and its lower end."""
    value, low, high = noise
    ends = [min(x, _LARGE_NOISE) for x in (low, math.inf if high is None else high)]
    expected = low if value is None else value

    def log_ratio(noise: float) -> float:
        new, old = (score(o.seconds, o.batch, noise, rule) for o in (option, present))
        if new <= 0:
            return -math.inf
        return math.log(new / old) if old > 0 else math.inf

    mean = log_ratio(expected)
    if math.isinf(mean):
        return math.exp(min(mean, 700.0)), math.exp(min(mean, 700.0))
    worst = min(mean, *(log_ratio(n) for n in ends))
    down = math.hypot(mean - worst, CONFIDENCE_SDS * option.sd)
    return math.exp(mean), math.exp(mean - down)


def record(now: Situation, decision: Decision) -> dict[str, Any]:
    """Fields of a `decision` record."""
    inputs = asdict(now) | {"options": [list(option) for option in now.options]}
    return {"inputs": inputs, "decision": asdict(decision)}


def replay(
    records: Iterable[Mapping[str, Any]], config: ConaConfig, rule: RateRule | None
) -> list[tuple[Decision, Decision]]:
    """(as recorded, as computed again) of each `decision` record."""
    pairs = []
    for item in records:
        inputs = dict(item["inputs"])
        inputs["options"] = tuple(Known(*option) for option in inputs["options"])
        inputs["noise"] = inputs["noise"] and tuple(inputs["noise"])
        recorded = Decision(**item["decision"])
        pairs.append((recorded, decide(Situation(**inputs), config, rule)))
    return pairs
