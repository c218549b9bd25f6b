# SPDX-License-Identifier: Apache-2.0
"""Plans keep their bounds, and idle as little as an exhaustive search says is possible."""

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.config import BalanceConfig, ConfigError
from geojax.geomesh.balance import (
    IDLE_TARGET,
    SHARE_TOLERANCE,
    Option,
    SliceProfile,
    SliceWork,
    make_plan,
)

PUBLISHED_SPEEDS = (2.57, 1.5, 1.1, 1.0)


def profile(name: str, *options: tuple[int, float], limit: int | None = None) -> SliceProfile:
    """Options of (batch, seconds a step); memory is the batch."""
    return SliceProfile(name, tuple(Option(b, t, b) for b, t in options), limit)


def published(batch: int = 16) -> list[SliceProfile]:
    return [profile(f"s{i}", (batch, 1 / s)) for i, s in enumerate(PUBLISHED_SPEEDS)]


def steps(plan) -> list[int]:
    return [w.inner_steps for w in plan.work]


@pytest.mark.parametrize(
    ("inner_steps", "expected"),
    [(10, [26, 15, 11, 10]), (20, [51, 30, 22, 20]), (30, [77, 45, 33, 30])],
)
def test_published_speeds_get_work_in_proportion(inner_steps, expected):
    plan = make_plan(published(), BalanceConfig(inner_steps=inner_steps), 1.0)
    assert steps(plan) == expected
    assert plan.straggler_idle < 0.012
    assert plan.sequences == 16 * sum(expected)


def test_equal_work_wastes_what_was_published():
    # DiLoCo: the fastest waits 1 - 1/2.57 of the compute time, and an exchange takes 65.8 % of the
    # round: 20.9 % of it, as published.
    balance = BalanceConfig(mode="equal", inner_steps=10)
    plan = make_plan(published(), balance, 1.0)
    assert steps(plan) == [10] * 4
    assert plan.straggler_idle == pytest.approx(1 - 1 / 2.57)
    assert plan.straggler_idle * (1 - 0.658) == pytest.approx(0.209, abs=5e-4)


@pytest.mark.parametrize("mode", ["equal", "adaptive"])
@pytest.mark.parametrize("share", [0.02, 0.118, 0.3])
def test_sync_share_sets_the_length_of_a_round(mode, share):
    exchange_seconds = 10.0
    plan = make_plan(published(), BalanceConfig(mode=mode, sync_share=share), exchange_seconds)
    wanted_seconds = exchange_seconds * (1 - share) / share
    # Within the tolerance, or half a step of the slowest where equal work rounds.
    assert abs(plan.compute_seconds - wanted_seconds) <= max(SHARE_TOLERANCE * wanted_seconds, 0.5)
    if mode == "adaptive":
        assert plan.straggler_idle <= IDLE_TARGET


def test_a_round_holds_a_step_of_each_slice_however_short_the_exchange():
    for mode in ("equal", "adaptive"):
        plan = make_plan(published(), BalanceConfig(mode=mode, sync_share=0.5), 1e-6)
        assert min(steps(plan)) >= 1


def test_smallest_batch_close_to_the_best_throughput_is_chosen():
    # 8: 1.6 a second; 16: 1.95; 32: 2.0. Within 5 % of the best come 16 and 32.
    options = ((8, 5.0), (16, 16 / 1.95), (32, 16.0))
    plan = make_plan([profile("a", *options)], BalanceConfig(inner_steps=7), 0.0)
    assert plan.work == (SliceWork("a", 16, 7, 16 / 1.95),)


def test_another_batch_is_taken_where_steps_alone_are_too_coarse():
    slow, fast = profile("slow", (8, 1.0)), profile("fast", (8, 0.7), (16, 0.99))
    balance = BalanceConfig(inner_steps=1, throughput_slack=0.5)
    alone = make_plan([slow, profile("fast", (8, 0.7))], balance, 0.0)
    plan = make_plan([slow, fast], balance, 0.0)
    assert alone.straggler_idle > 0.25
    assert [(w.batch, w.inner_steps) for w in plan.work] == [(8, 1), (16, 1)]


def test_ratio_of_inner_steps_is_bounded():
    profiles = [profile("slow", (8, 1.0)), profile("fast", (8, 0.01))]
    plan = make_plan(profiles, BalanceConfig(inner_steps=5, max_steps_ratio=4), 0.0)
    assert steps(plan) == [5, 20]


def test_equal_takes_the_largest_batch_that_fits_all():
    profiles = [
        profile("a", (8, 1.0), (16, 2.0), (32, 4.0), limit=40),
        profile("b", (8, 1.0), (16, 2.0), (32, 4.0), limit=20),
    ]
    plan = make_plan(profiles, BalanceConfig(mode="equal", inner_steps=3), 0.0)
    assert [w.batch for w in plan.work] == [16, 16]


def test_what_cannot_be_planned_is_refused_with_the_fix():
    steps3, share = BalanceConfig(inner_steps=3), BalanceConfig(sync_share=0.1)
    equal = BalanceConfig(mode="equal", inner_steps=3)
    with pytest.raises(ConfigError, match=r"slice b: no batch fits its 4 bytes .* batch 8 needs 8"):
        make_plan([profile("a", (8, 1.0)), profile("b", (16, 1.0), (8, 1.0), limit=4)], steps3, 1.0)
    with pytest.raises(ConfigError, match="slice a has no options; add a batch"):
        make_plan([profile("a")], steps3, 1.0)
    with pytest.raises(ConfigError, match="no batch fits every slice"):
        make_plan([profile("a", (8, 1.0)), profile("b", (16, 1.0))], equal, 1.0)
    with pytest.raises(ConfigError, match=r"not 0.0 seconds; set balance.inner_steps"):
        make_plan([profile("a", (8, 1.0))], share, 0.0)
    with pytest.raises(ConfigError, match="no slices"):
        make_plan([], steps3, 1.0)
    for batch, seconds in ((0, 1.0), (8, 0.0), (8, float("nan")), (8, float("inf"))):
        with pytest.raises(ConfigError, match="measure it again"):
            Option(batch, seconds, 1)


@dataclass(frozen=True)
class Case:
    profiles: list[SliceProfile]
    balance: BalanceConfig
    exchange_seconds: float


def random_case(rng: random.Random) -> Case:
    """Two or three slices, speeds up to 16x apart and memories up to 6x, coarse rounds."""
    profiles = []
    for i in range(rng.choice((2, 3))):
        speed, overhead = rng.uniform(1, 16), rng.uniform(0, 3)
        options = tuple(
            Option(b, (b + overhead) / speed * rng.uniform(0.98, 1.02), 100 + 10 * b)
            for b in (4, 8, 16)
        )
        profiles.append(SliceProfile(f"s{i}", options, round(100 + rng.uniform(40, 240))))
    common = {"max_steps_ratio": rng.choice((1, 1.5, 4, 16)), "throughput_slack": 0.1}
    if rng.random() < 0.5:
        return Case(profiles, BalanceConfig(inner_steps=rng.randint(1, 8), **common), 0.0)
    return Case(profiles, BalanceConfig(sync_share=0.5, **common), rng.uniform(0.2, 6))


def least_idle(case: Case) -> float:
    """Straggler idle of the best plan that the rules allow, by trying every (b, H) of every slice.

    Plans that idle for half of the round or more are not looked at.
    """
    balance = case.balance
    allowed = []
    for p in case.profiles:
        fits = [o for o in p.options if o.memory_bytes <= p.memory_limit_bytes]
        best = max(o.batch / o.seconds_per_step for o in fits)
        floor = (1 - balance.throughput_slack) * best
        allowed.append([o for o in fits if o.batch / o.seconds_per_step >= floor])
    preferred = [min(options, key=lambda o: o.batch).seconds_per_step for options in allowed]
    slowest = preferred.index(max(preferred))
    if balance.inner_steps:
        longest = balance.inner_steps * max(o.seconds_per_step for o in allowed[slowest])
        low, high = 0.0, 2 * longest
    else:
        target = max(case.exchange_seconds, preferred[slowest])  # a share of one half
        low, high = (1 - SHARE_TOLERANCE) * target, (1 + SHARE_TOLERANCE) * target
    table = []
    for i, options in enumerate(allowed):
        rows = []
        for o in options:
            top = int(high / o.seconds_per_step * (1 + 1e-12))
            some = range(1, top + 1)
            if balance.inner_steps and i == slowest:
                some = [balance.inner_steps]
            rows += [(h, h * o.seconds_per_step) for h in some]
        kept = [row for row in rows if row[1] >= low / 2]
        table.append(np.array(kept).reshape(-1, 2))
    index = np.array(list(itertools.product(*(range(len(t)) for t in table)))).T
    if not index.size:
        return 1.0
    h = np.stack([t[i, 0] for t, i in zip(table, index, strict=True)])
    works = np.stack([t[i, 1] for t, i in zip(table, index, strict=True)])
    ends = works.max(0)
    legal = (h.max(0) <= balance.max_steps_ratio * h.min(0)) & (ends >= low) & (ends <= high)
    return float(np.min(1 - works.min(0)[legal] / ends[legal], initial=1.0))


def check_bounds(case: Case, plan) -> None:
    for p, w in zip(case.profiles, plan.work, strict=True):
        chosen = next(o for o in p.options if o.batch == w.batch)
        assert chosen.memory_bytes <= p.memory_limit_bytes
        assert w.name == p.name
        assert w.batch >= 1
        assert w.inner_steps >= 1
        assert w.seconds_per_step == chosen.seconds_per_step
    ratio = max(steps(plan)) / min(steps(plan))
    assert ratio <= case.balance.max_steps_ratio
    if case.balance.inner_steps:
        assert case.balance.inner_steps in steps(plan)


def test_idle_is_under_the_target_wherever_a_plan_exists_that_is():
    rng = random.Random(0)
    possible = 0
    for _ in range(1000):
        case = random_case(rng)
        plan = make_plan(case.profiles, case.balance, case.exchange_seconds)
        check_bounds(case, plan)
        least = least_idle(case)
        if least < IDLE_TARGET:
            possible += 1
            assert plan.straggler_idle <= IDLE_TARGET + 1e-9, (case, least)
        elif case.balance.inner_steps:  # the exhaustive search itself missed nothing
            assert plan.straggler_idle >= least - 1e-9, (case, least)
    assert 200 < possible < 950  # both outcomes are tested


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.floats(1.0, 16.0), min_size=1, max_size=8),
    st.integers(34, 500),
    st.integers(0, 2**32),
)
def test_fine_rounds_idle_under_the_target_on_any_speeds(speeds, inner_steps, seed):
    # With H >= 34 = ceil(1 / 0.03) + 1, a step is under 3 % of the round and every speed fits.
    rng = random.Random(seed)
    profiles = [
        SliceProfile(f"s{i}", (Option(8, 8 / s, rng.randint(1, 4)),), 4)
        for i, s in enumerate(speeds)
    ]
    case = Case(profiles, BalanceConfig(inner_steps=inner_steps), 0.0)
    plan = make_plan(profiles, case.balance, 0.0)
    check_bounds(case, plan)
    assert plan.straggler_idle < IDLE_TARGET
    assert make_plan(profiles, case.balance, 0.0) == plan
