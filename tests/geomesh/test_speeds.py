# SPDX-License-Identifier: Apache-2.0
"""Plans that follow measured speeds, on a clock that the test turns."""

from dataclasses import replace

import pytest

from geojax.config import BalanceConfig
from geojax.geomesh.balance import Option, SliceProfile, make_plan
from geojax.geomesh.speeds import Speed, Speeds

BALANCE = BalanceConfig(inner_steps=20, batch_sizes=(8,), replan=0.03)
SECONDS = (0.4, 0.65, 0.9, 1.0)  # a step of 8 sequences, of each slice
BY_BATCH = {8: 1.0, 16: 1.99}


def profiles(seconds=SECONDS):
    return [
        SliceProfile(f"s{i}", tuple(Option(b, s * f, 0) for b, f in BY_BATCH.items()), None)
        for i, s in enumerate(seconds)
    ]


class Fleet:
    """Slices whose true seconds a step the test sets."""

    def __init__(self, balance=BALANCE, exchange_seconds=2.0):
        self.balance, self.exchange_seconds = balance, exchange_seconds
        self.seconds = dict(enumerate(SECONDS))
        self.plan = make_plan(profiles(), balance, exchange_seconds)
        self.speeds = Speeds(profiles(), exchange_seconds)
        self.changes = 0

    def step_seconds(self) -> dict[int, float]:
        return {i: self.seconds[i] * BY_BATCH[w.batch] for i, w in enumerate(self.plan.work)}

    def idle(self) -> float:
        took = [w.inner_steps * self.step_seconds()[i] for i, w in enumerate(self.plan.work)]
        return 1 - min(took) / max(took)

    def round(self, steering=True) -> float:
        """Straggler idle of one round."""
        idle = self.idle()
        self.speeds.observe(self.plan, self.step_seconds(), self.exchange_seconds)
        decision = self.speeds.propose(self.plan, range(4), self.balance)
        if steering and decision.kind == "change":
            self.plan, self.changes = decision.plan, self.changes + 1
            self.speeds.changed()
        return idle


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_slice_at_another_speed_is_balanced_within_two_rounds(victim, factor):
    fleet, without = Fleet(), Fleet()
    for _ in range(5):
        assert fleet.round() < 0.05
    for each in (fleet, without):
        each.seconds[victim] = SECONDS[victim] * factor
    visible = fleet.round()
    fleet.round()
    assert visible > 0.3
    after = [fleet.round() for _ in range(10)]
    assert max(after) < 0.05
    assert fleet.changes == 1
    assert min(without.round(steering=False) for _ in range(10)) > 0.3


def test_noise_and_single_slow_rounds_change_nothing():
    fleet = Fleet()
    plan = fleet.plan
    for number in range(60):
        sign = 1 if number % 2 else -1
        fleet.seconds = {i: s * (1 + 0.02 * sign * (-1) ** i) for i, s in enumerate(SECONDS)}
        if number % 7 == 3:
            fleet.seconds[number % 4] *= 3
        fleet.round()
    assert fleet.plan == plan


def test_the_round_follows_a_slower_link_where_a_share_is_asked_for():
    balance = BalanceConfig(sync_share=0.1, batch_sizes=(8,), replan=0.03)
    fleet = Fleet(balance)
    for _ in range(3):
        fleet.round()
    before = fleet.plan.compute_seconds
    fleet.exchange_seconds = 4.0
    for _ in range(3):
        fleet.round()
    assert fleet.plan.compute_seconds == pytest.approx(2 * before, rel=0.15)
    assert fleet.changes == 1


def test_a_change_is_believed_when_it_is_seen_twice():
    speed = Speed(1.0)
    speed.observe(2.0)
    assert speed.value == 1.0
    speed.observe(1.0)
    speed.observe(2.0)
    assert speed.value == 1.0
    speed.observe(1.9)
    assert speed.value == 1.9
    speed.observe(1.95)
    assert 1.9 < speed.value < 1.95


def test_a_plan_is_timed_by_what_was_measured():
    speeds = Speeds(profiles(), 1.0)
    plan = make_plan(profiles(), BALANCE, 1.0)
    for _ in range(2):
        speeds.observe(plan, {0: 0.8, 1: 0.65}, None)
    assert speeds.refreshed(plan).work[0] == replace(plan.work[0], seconds_per_step=0.8)
    assert speeds.profiles[0].options[1].seconds_per_step == pytest.approx(2 * 1.99 * 0.4)
    assert speeds.refreshed(plan).work[3] == plan.work[3]
