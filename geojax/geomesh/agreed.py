# SPDX-License-Identifier: Apache-2.0
"""What all slices of a run know alike: plan, position in the data, and who takes what.

Invariant: a pure function of the config and the journal's entries up to a border, so that a slice
that comes back, whatever it missed, knows it too.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from geojax.cona.noise import Moments
from geojax.config import RunConfig
from geojax.geomesh.balance import Plan
from geojax.geomesh.clock import modelled_profiles
from geojax.geomesh.speeds import Speeds
from geojax.geomesh.steering import Decision, Planner, first_plan, read_profiles, record
from geojax.geomesh.sync import Most
from geojax.geomesh.wan.history import History
from geojax.geomesh.wan.samples import Border, Opened, count


class Agreed:
    """Follows a history from border to border."""

    def __init__(self, config: RunConfig, exchange_seconds: float | None):
        """`exchange_seconds`: modelled; None under the measured clock."""
        self._config, self._modelled_seconds = config, exchange_seconds
        self.border = -1
        """Of no history yet."""
        self._epoch = 0
        self.planner: Planner
        self.data = Border()
        self.tokens_before = 0
        """At the border before."""
        self.considered: dict[str, Any] | None = None
        """CONA: fields of the `plan` record of this border."""
        self.likely: Plan | None = None
        """CONA: may be the next plan."""
        self.changed: tuple[Plan, Decision] | None = None
        """The plan before, and why, where this border changed it."""

    @property
    def plan(self) -> Plan:
        return self.planner.plan

    @property
    def tokens(self) -> int:
        """Predicted tokens that are merged, over all slices."""
        return self.data.merged * self._config.data.seq_len

    @property
    def finished(self) -> bool:
        """Whether the run is over at this border."""
        waiting = self.data.samples.returned or self.data.ahead
        return self._enough(self.data.merged) and not waiting

    def follow(self, history: History, border: int) -> None:
        """To that border."""
        if history.epoch != self._epoch or border < self.border or self.border < 0:
            self._begin(history)
        self._epoch = history.epoch
        while self.border < border:
            self._close(history)

    def open(self, members: Sequence[int]) -> Opened:
        """Samples of the next round, which these slices are in."""
        wanted = {i: self.plan.work[i].sequences for i in members}
        return self.data.open(wanted, self._config.exchange.overlap > 0, self._enough)

    def most(self, members: Sequence[int]) -> list[Most]:
        """What each slice's message of the next round may say of itself at most."""
        shares = self.open(members).shares
        length = self._config.data.seq_len + 1  # a loss may bear on all of a sample's tokens
        samples = [sum(map(len, shares.get(i, ()))) for i in range(len(self.plan.work))]
        return [
            Most(count * length, min(count, work.batch) * length)
            for count, work in zip(samples, self.plan.work, strict=True)
        ]

    def spans(self, opened: Opened) -> tuple[tuple[float, float], tuple[float, float]]:
        """Shares of all tokens seen before and after that round, and the one after it, if all of
        their slices are merged."""
        seq_len, total = self._config.data.seq_len, self._config.train.total_tokens
        taken = count(opened.shares), count(opened.ahead)
        begin, middle, end = (
            samples * seq_len / total for samples in accumulate(taken, initial=self.data.merged)
        )
        return (begin, middle), (middle, end)

    def _enough(self, samples: int) -> bool:
        return samples * self._config.data.seq_len >= self._config.train.total_tokens

    def _begin(self, history: History) -> None:
        assert history.start is not None, "the run has begun"
        config, facts = self._config, history.start["facts"]
        seconds = self._modelled_seconds
        if config.clock.kind == "modelled":
            profiles = modelled_profiles(config)
        else:
            profiles = read_profiles(facts[str(i)]["profile"] for i in range(len(config.slices)))
            seconds = max(f["exchange_seconds"] for f in facts.values())
        plan = first_plan(config, profiles, seconds or 0.0)
        self.planner = Planner(config, plan, profiles, seconds or 0.0)
        self._speeds = Speeds(profiles, seconds or 0.0)
        self.data, self.border, self.tokens_before = Border(), 0, 0
        self.considered = self.likely = self.changed = None

    def _close(self, history: History) -> None:
        """The next round is over."""
        number = self.border + 1
        entry = history.rounds[number - 1]
        facts = {int(i): f for i, f in entry["facts"].items()}
        self.tokens_before = self.tokens
        self.data = Border.after(self.open(history.members_of(number)), facts)
        self.border = number
        every = range(len(self._config.slices))
        self.planner.observe(
            self.data.merged,
            [facts[i]["steps"] if i in facts else 0 for i in every],
            [_moments(facts[i]["noise"]) if i in facts else {} for i in every],
        )
        self.considered = self.likely = self.changed = None
        if self._enough(self.data.merged):
            return
        replan = self._config.balance.replan is not None
        if replan:
            steps = {i: f["step_seconds"] for i, f in facts.items()}
            took = min(f["exchange_seconds"] for f in facts.values())  # of the last to come
            self._speeds.observe(self.plan, steps, took)
            self.planner.profiled(self._speeds.profiles, self._speeds.exchange_seconds)
        before = self.plan
        if self._config.cona:
            situation, decision = self.planner.propose(number, self.data.merged)
            self.considered, self.likely = record(situation, decision), decision.best
        elif replan:
            members = entry["merged"]
            decision = self._speeds.propose(self.plan, members, self._config.balance)
        else:
            return
        if decision.kind == "change":
            self.planner.changed(decision.plan)
            self._speeds.changed()
            self.changed = before, decision


def _moments(sums: Mapping[str, Sequence[float]]) -> dict[str, Moments]:
    return {source: Moments(*parts) for source, parts in sums.items()}
