# SPDX-License-Identifier: Apache-2.0
"""Which plan is in force: one that is made once, or under CONA one that follows the noise.

CONA says what each slice's options are worth, the planner (geojax.geomesh.balance) makes a plan of
them, and a new plan takes the place of the old one at a round border where that pays: at the noise
as known and at both ends of its interval. A slice's steps count as if it trained alone, and those
of all slices add up; what merging takes out of their noise is not counted.

Invariant: `decide` looks at nothing but its arguments, all of which a run writes down and saves, so
a run that is resumed, or replayed, has the same plans. Options are profiled once, at the start; one
that fails later is refused from then on.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from geojax.cona.controller import NoiseWatch, rate_scale
from geojax.cona.noise import Moments
from geojax.cona.score import worth
from geojax.config import (
    BalanceConfig,
    ConaConfig,
    RunConfig,
    require,
)
from geojax.config.rate import RateRule
from geojax.geomesh.balance import (
    Option,
    Plan,
    SliceProfile,
    SliceWork,
    Worth,
    make_plan,
    progress_rate,
)

_CHANGE_SECONDS = 5.0  # expected of the first change of plan under the measured clock
_CHANGE_MEMORY = 0.5  # weight of the last change in what is expected of the next
_LARGE_NOISE = 1e18  # stands for infinite noise, where no step is worth anything
_LARGE_GAIN = 1e9  # over a plan that makes no progress


@dataclass(frozen=True)
class Situation:
    """All that a decision depends on, beside the config."""

    round: int
    samples: int
    total_samples: int
    rounds_here: int
    """Since the last change of plan."""
    plan: Plan
    profiles: tuple[SliceProfile, ...]
    exchange_seconds: float
    noise: tuple[float | None, float, float | None] | None
    """(value, low, high) in sequences, as a NoiseEstimate; None: not known yet."""
    change_seconds: float
    """Expected of one change."""


@dataclass(frozen=True)
class Decision:
    """What to do."""

    kind: Literal["keep", "change"]
    plan: Plan
    reason: str
    gain: float = 1.0
    """Progress a second over the present plan's, at the noise as known."""
    gain_low: float = 1.0
    """The least of that over the noise's interval."""
    best: Plan | None = None
    """At the noise as known, where that is another one than `plan`: likely to be the next."""


def decide(
    now: Situation, balance: BalanceConfig, cona: ConaConfig, rule: RateRule | None
) -> Decision:
    """What to do at the end of a round."""
    keep = partial(Decision, "keep", now.plan)
    if now.noise is None:
        return keep("the noise is not known yet")
    value, low, high = now.noise
    expected = low if value is None else value
    plan = make_plan(now.profiles, balance, now.exchange_seconds, _worth(expected, rule))
    if plan == now.plan:
        return keep(f"the plan is the best one at noise {expected:.3g}")
    if now.rounds_here < cona.dwell_rounds:
        reason = f"{now.rounds_here} of {cona.dwell_rounds} rounds since the last change"
        return keep(reason, best=plan)
    ends = (low, math.inf if high is None else high)
    gain, *others = (_gain(plan, now, noise, rule) for noise in (expected, *ends))
    least = min(gain, *others)
    rounds_left = max(now.total_samples - now.samples, 0) / now.plan.sequences
    left = rounds_left * (now.plan.compute_seconds + now.exchange_seconds)
    saved = left * (1 - 1 / least) if least > 0 else -left
    if least > 1 + cona.margin and saved > now.change_seconds:
        reason = f"saves {saved:.3g} s of {left:.3g}, or more, and costs {now.change_seconds:.3g} s"
        return Decision("change", plan, reason, gain, least)
    return keep(f"{plan} may be {gain:.3f} times as fast, {least:.3f} at least", gain, least, plan)


def record(now: Situation, decision: Decision) -> dict[str, Any]:
    """Fields of a `plan` record."""
    return {"inputs": asdict(now), "decision": asdict(decision)}


def replay(
    records: Iterable[Mapping[str, Any]],
    balance: BalanceConfig,
    cona: ConaConfig,
    rule: RateRule | None,
) -> list[tuple[Decision, Decision]]:
    """(as recorded, as computed again) of each `plan` record."""
    pairs = []
    for item in records:
        inputs, recorded = dict(item["inputs"]), dict(item["decision"])
        for fields in (inputs, recorded):
            fields["plan"] = read_plan(fields["plan"]["work"])
        if recorded.get("best"):
            recorded["best"] = read_plan(recorded["best"]["work"])
        inputs["profiles"] = read_profiles(inputs["profiles"])
        inputs["noise"] = inputs["noise"] and tuple(inputs["noise"])
        pairs.append((Decision(**recorded), decide(Situation(**inputs), balance, cona, rule)))
    return pairs


class Planner:
    """Says which plan is in force."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        profiles: Sequence[SliceProfile] = (),
        exchange_seconds: float = 0.0,
    ):
        """`profiles` and `exchange_seconds`, of one exchange: what later plans are made of."""
        self._config, self.plan = config, plan
        self._profiles, self._exchange_seconds = tuple(profiles), exchange_seconds
        noise = config.measured_noise
        self.watch = NoiseWatch(noise) if noise else None
        """The gradient's noise, of all slices together; None without CONA."""
        self._rounds_here, self._steps = 0, [0] * len(config.slices)
        modelled = config.clock.kind == "modelled"
        self._change_seconds = config.clock.switch_seconds if modelled else _CHANGE_SECONDS

    def scale(self, index: int) -> float:
        """Factor on the learning rate of slice `index`, in the next round."""
        return rate_scale(_rule(self._config), self.plan.work[index].batch, self.watch)

    def probe_due(self, index: int) -> bool:
        """Whether slice `index` begins the next round with a probe, if its strategy needs any."""
        if self.watch is None:
            return False
        every = self.watch.config.probe_steps
        return -self._steps[index] % every < self.plan.work[index].inner_steps

    def observe(
        self, samples: int, good: Sequence[int], noise: Sequence[Mapping[str, Moments]]
    ) -> None:
        """A round has ended at sample `samples`, with so many good steps of each slice and their
        moments."""
        self._rounds_here += 1
        for i, (work, steps, moments) in enumerate(zip(self.plan.work, good, noise, strict=True)):
            self._steps[i] += work.inner_steps
            if self.watch:
                self.watch.observe(work.batch, samples, steps, moments)

    def propose(self, round: int, samples: int) -> tuple[Situation, Decision]:
        """What to do now; only under CONA."""
        config = self._config
        assert config.cona is not None, "only CONA changes plans"
        assert self.watch is not None, "cona asks for noise"
        noise = self.watch.estimate()
        now = Situation(
            round,
            samples,
            -(-config.train.total_tokens // config.data.seq_len),
            self._rounds_here,
            self.plan,
            self._profiles,
            self._exchange_seconds,
            (noise.value, noise.low, noise.high) if noise else None,
            self._change_seconds,
        )
        return now, decide(now, config.balance, config.cona, _rule(config))

    def profiled(self, profiles: Sequence[SliceProfile], exchange_seconds: float) -> None:
        """What later plans are made of, from now on."""
        self._profiles, self._exchange_seconds = tuple(profiles), exchange_seconds

    def changed(self, plan: Plan, seconds: float | None = None) -> None:
        """`plan` is in force from the next round on; the change took `seconds`, where that is
        known."""
        self.plan, self._rounds_here = plan, 0
        if seconds is not None:
            self._change_seconds += _CHANGE_MEMORY * (seconds - self._change_seconds)

    def refuse(self, work: SliceWork, out_of_memory: bool = False) -> None:
        """That option failed, and is in no later plan; where it ran out of memory, so are all
        of its slice that take as much or more, but the one in force."""

        def kept(option: Option, size: int, mine: SliceWork) -> bool:
            if option.strategy == mine.strategy and option.batch == mine.batch:
                return True
            failed = option.strategy == work.strategy and option.batch == work.batch
            return not failed and not (out_of_memory and size and option.memory_bytes >= size)

        profiles = []
        for profile, mine in zip(self._profiles, self.plan.work, strict=True):
            if profile.name == work.name:
                named = {(o.strategy, o.batch): o for o in profile.options}
                size = named[work.strategy, work.batch].memory_bytes
                options = tuple(o for o in profile.options if kept(o, size, mine))
                profile = replace(profile, options=options)
            profiles.append(profile)
        self._profiles = tuple(profiles)

    def state(self) -> dict[str, Any]:
        """For JSON; `restored` goes on from it."""
        state: dict[str, Any] = {"plan": [asdict(work) for work in self.plan.work]}
        if self.watch:
            state["planner"] = {
                "profiles": [asdict(p) for p in self._profiles],
                "exchange_seconds": self._exchange_seconds,
                "rounds_here": self._rounds_here,
                "change_seconds": self._change_seconds,
                "steps": self._steps,
                "noise": self.watch.state(),
            }
        return state

    @classmethod
    def restored(cls, config: RunConfig, meta: Mapping[str, Any]) -> "Planner":
        """From a checkpoint's facts, `state` among them; nothing is profiled anew."""
        plan, state = read_plan(meta["plan"]), meta.get("planner")
        require(
            bool(state) == (config.cona is not None),
            f"the checkpoint is of a run {'with' if state else 'without'} cona, and config.json "
            f"has {'none' if state else 'it'}; put it back as it was, or start a new run",
        )
        if not state:
            return cls(config, plan)
        planner = cls(config, plan, read_profiles(state["profiles"]), state["exchange_seconds"])
        assert planner.watch is not None, "cona asks for noise"
        planner.watch.restore(state["noise"])
        planner._rounds_here, planner._steps = state["rounds_here"], list(state["steps"])
        planner._change_seconds = state["change_seconds"]
        return planner


def first_plan(
    config: RunConfig, profiles: Sequence[SliceProfile], exchange_seconds: float
) -> Plan:
    """Under CONA the best where noise is as small as the smallest batch. ConfigError as `make_plan`
    says."""
    worth = _worth(min(config.cona.global_batches), None) if config.cona else None
    return make_plan(profiles, config.balance, exchange_seconds, worth)


def read_plan(work: Iterable[Mapping[str, Any]]) -> Plan:
    """The plan whose `work` was written as JSON."""
    return Plan(tuple(SliceWork(**fields) for fields in work))


def read_profiles(profiles: Iterable[Mapping[str, Any]]) -> tuple[SliceProfile, ...]:
    """Profiles that were written as JSON."""
    return tuple(
        SliceProfile(**dict(p) | {"options": tuple(Option(**o) for o in p["options"])})
        for p in profiles
    )


def _rule(config: RunConfig) -> RateRule | None:
    return config.scaling.rate_rule() if config.scaling else None


def _worth(noise: float, rule: RateRule | None) -> Worth:
    """What a slice's step is worth at that noise."""
    return lambda batch: worth(batch, min(noise, _LARGE_NOISE), rule)


def _gain(plan: Plan, now: Situation, noise: float, rule: RateRule | None) -> float:
    """Progress a second under `plan` over that under the present one."""
    rates = [progress_rate(p, _worth(noise, rule), now.exchange_seconds) for p in (plan, now.plan)]
    if rates[0] <= 0:
        return 0.0
    return min(rates[0] / rates[1], _LARGE_GAIN) if rates[1] > 0 else _LARGE_GAIN
