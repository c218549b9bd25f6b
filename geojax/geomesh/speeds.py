# SPDX-License-Identifier: Apache-2.0
"""Another plan where slices turn out to be faster or slower than their profiles say.

Every round gives each slice's seconds a step as a ratio to its profile's, and the seconds of the
exchange. Small differences go into an average; one of over `_NOISE` waits for the next round, and
is taken as it is if that one shows a change the same way, so that a single slow round changes
nothing and a lasting change is known after two. Invariant: all is a function of what the journal
holds, so every slice comes to the same plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from geojax.config import BalanceConfig
from geojax.geomesh.balance import Plan, SliceProfile, make_plan
from geojax.geomesh.steering import Decision

_NOISE = 0.1  # relative; over it a difference may be a change
_WEIGHT = 0.3  # of a round in the average
_DWELL_ROUNDS = 2  # after a change, until the next


@dataclass
class Speed:
    """An average with a memory for changes."""

    value: float
    _doubt: float | None = None
    """What the last round said, where it was far off."""

    def observe(self, new: float) -> None:
        change = new / self.value - 1
        if abs(change) <= _NOISE:
            self.value *= 1 + _WEIGHT * change
            self._doubt = None
        elif self._doubt is not None and (self._doubt > self.value) == (change > 0):
            self.value, self._doubt = new, None
        else:
            self._doubt = new


class Speeds:
    """What rounds so far say of every slice and of the exchange."""

    def __init__(self, profiles: Sequence[SliceProfile], exchange_seconds: float):
        self._profiles = tuple(profiles)
        self._ratios = [Speed(1.0) for _ in profiles]
        self._exchange = Speed(exchange_seconds) if exchange_seconds else None
        self._rounds_here = 0

    def observe(
        self, plan: Plan, step_seconds: Mapping[int, float], exchange_seconds: float | None
    ) -> None:
        """A round under `plan` has ended; `step_seconds` of the slices in it."""
        self._rounds_here += 1
        for index, seconds in step_seconds.items():
            self._ratios[index].observe(seconds / self._profiled(plan, index))
        if exchange_seconds and self._exchange:
            self._exchange.observe(exchange_seconds)
        elif exchange_seconds:
            self._exchange = Speed(exchange_seconds)

    def propose(self, plan: Plan, members: Sequence[int], balance: BalanceConfig) -> Decision:
        """Whether another plan is worth it for these slices."""
        assert balance.replan is not None, "asked for"
        now = self.refreshed(plan)
        if self._rounds_here < _DWELL_ROUNDS:
            return Decision("keep", plan, f"{self._rounds_here} rounds since the last change")
        new = make_plan(self.profiles, balance, self.exchange_seconds)
        before, after = (self._miss(p, members, balance) for p in (now, new))
        reason = f"straggler idle {before[0]:.1%} by measured speeds, {after[0]:.1%} with {new}"
        gains = [a - b for a, b in zip(before, after, strict=True)]
        if max(gains) > balance.replan and min(gains) > -balance.replan:
            return Decision("change", new, reason)
        return Decision("keep", plan, reason)

    def changed(self) -> None:
        """Another plan is in force."""
        self._rounds_here = 0

    @property
    def profiles(self) -> tuple[SliceProfile, ...]:
        """As they are now."""
        return tuple(
            replace(
                profile,
                options=tuple(
                    replace(o, seconds_per_step=o.seconds_per_step * ratio.value)
                    for o in profile.options
                ),
            )
            for profile, ratio in zip(self._profiles, self._ratios, strict=True)
        )

    @property
    def exchange_seconds(self) -> float:
        return self._exchange.value if self._exchange else 0.0

    def refreshed(self, plan: Plan) -> Plan:
        """The same work, in the time that it takes now."""
        work = (
            replace(w, seconds_per_step=self._profiled(plan, i) * self._ratios[i].value)
            for i, w in enumerate(plan.work)
        )
        return Plan(tuple(work))

    def _profiled(self, plan: Plan, index: int) -> float:
        """Seconds of a step of the plan, as first measured."""
        work = plan.work[index]
        same = (work.batch, work.strategy)
        options = self._profiles[index].options
        return next(o.seconds_per_step for o in options if (o.batch, o.strategy) == same)

    def _miss(self, plan: Plan, members: Sequence[int], balance: BalanceConfig) -> list[float]:
        """Straggler idle, and how far the exchange's share of a round is from what is asked."""
        seconds = [plan.work[i].compute_seconds for i in members]
        idle = 1 - min(seconds) / max(seconds)
        if balance.sync_share is None:
            return [idle]
        share = self.exchange_seconds / (self.exchange_seconds + max(seconds))
        return [idle, abs(share - balance.sync_share)]
