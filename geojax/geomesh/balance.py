# SPDX-License-Identifier: Apache-2.0
"""The planner: how many sequences a step (b) and steps a round (H) each slice does.

A plan is a pure function of profiles and settings that all slices agree on, in Python floats and a
fixed order, so that each slice can compute it and all get the same. Invariant: b >= 1, H >= 1, no
slice over its memory limit, and H_max / H_min within `balance.max_steps_ratio`.

Adaptive plans. A slice may use the options that fit its memory and come within `throughput_slack`
of its best sequences a second; the smallest batch of these is preferred. Where the worth of a step
is given, it takes the place of sequences, and the option of the most worth a second is preferred.
The slowest slice is the one whose step, at its preferred batch, takes longest. The round aims at T
seconds of compute: `inner_steps` steps of the slowest slice, whose H then stays fixed, or what
makes an exchange `sync_share` of the round, but no less than one step of the slowest slice.

A plan is balanced if all slices end within `IDLE_TARGET` of a round before a common deadline,
which under `sync_share` lies within `SHARE_TOLERANCE` of T. The cost of a plan is the time that the
first slice to end waits, plus the time by which the round misses T. If balanced plans exist, one
with the fewest sequences a step, summed over slices, is taken, and of those the cheapest found;
otherwise the cheapest found. No balanced plan is missed: the slice that ends last ends at a
multiple of one of its step times, and each such multiple is tried as the deadline, with every slice
doing what it can until then (unless over `MAX_DEADLINES` of them are nearer to T).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from geojax.config import BalanceConfig, ConfigError, require

IDLE_TARGET = 0.03
"""Straggler idle that is small enough to prefer smaller batches to less of it."""
SHARE_TOLERANCE = 0.1
"""How far a round may stray from the length that `sync_share` asks for, relative."""
MAX_DEADLINES = 4096
_ROUNDING = 1e-9  # of a step: a multiple of a step time must contain itself

Worth = Callable[[int], float]
"""Progress of a step by its batch, at least 0, in any unit that all slices share."""


@dataclass(frozen=True)
class Option:
    """One way for a slice to do its inner steps."""

    batch: int
    """Sequences a step."""
    seconds_per_step: float
    memory_bytes: int
    """Peak memory of one device."""
    strategy: str = "dp1"
    """Parallelism inside the slice, as text."""

    def __post_init__(self):
        require(
            self.batch >= 1 and 0 < self.seconds_per_step < math.inf,
            f"option with batch {self.batch} and {self.seconds_per_step} seconds a step: both must "
            "be above 0 and finite; measure it again",
        )


@dataclass(frozen=True)
class SliceProfile:
    """What a slice can do, measured or modelled."""

    name: str
    options: tuple[Option, ...]
    memory_limit_bytes: int | None
    """Memory of one device; None where it is unknown and everything counts as fitting."""


@dataclass(frozen=True)
class SliceWork:
    """One slice's part of a round."""

    name: str
    batch: int
    """Sequences a step (b)."""
    inner_steps: int
    """Steps a round (H)."""
    seconds_per_step: float
    strategy: str = "dp1"

    @property
    def compute_seconds(self) -> float:
        return self.inner_steps * self.seconds_per_step

    @property
    def sequences(self) -> int:
        """Sequences a round."""
        return self.batch * self.inner_steps


@dataclass(frozen=True)
class Plan:
    """Work of every slice, in the order of the profiles."""

    work: tuple[SliceWork, ...]

    @property
    def compute_seconds(self) -> float:
        """Seconds until the last slice is done."""
        return max(w.compute_seconds for w in self.work)

    @property
    def sequences(self) -> int:
        """Sequences a round, over all slices."""
        return sum(w.sequences for w in self.work)

    @property
    def straggler_idle(self) -> float:
        """Largest share of the round's compute time that a slice waits for the last one."""
        return 1 - min(w.compute_seconds for w in self.work) / self.compute_seconds

    def __str__(self) -> str:
        """Strategy and H of each slice: dp1-tp1-pp1-mb8-gb8 x 10 + dp2-tp1-pp1-mb4-gb8 x 22."""
        return " + ".join(f"{w.strategy} x {w.inner_steps}" for w in self.work)


def progress_rate(plan: Plan, worth: Worth, exchange_seconds: float) -> float:
    """Worth of all slices' steps a second of a round, the exchange in it counted."""
    steps = sum(w.inner_steps * worth(w.batch) for w in plan.work)
    return steps / (plan.compute_seconds + exchange_seconds)


def make_plan(
    profiles: Sequence[SliceProfile],
    balance: BalanceConfig,
    exchange_seconds: float,
    worth: Worth | None = None,
) -> Plan:
    """The plan of the next rounds; `exchange_seconds` is what one exchange takes, and `worth` what
    a step is worth: by default its sequences, of which the smallest batch is taken that is about
    as good as any.

    ConfigError where a slice has no option that fits, where mode equal finds no batch that fits
    all, or where `sync_share` is asked of an exchange that takes no time.
    """
    require(profiles, "no slices to plan for; a run needs at least one")
    require(
        balance.sync_share is None or 0 < exchange_seconds < math.inf,
        f"balance.sync_share {balance.sync_share} needs an exchange that takes time, not "
        f"{exchange_seconds} seconds; set balance.inner_steps instead",
    )
    fitting = [_fitting(profile) for profile in profiles]
    if balance.mode == "equal":
        return _equal(profiles, fitting, balance, exchange_seconds, worth)
    return _adaptive(profiles, fitting, balance, exchange_seconds, worth)


_Options = tuple[Option, ...]
_BATCHES = "balance.batch_sizes (under cona: cona.global_batches)"


def _fitting(profile: SliceProfile) -> _Options:
    """Options within the memory limit, smallest batch first."""
    require(
        profile.options,
        f"slice {profile.name} has no options; add a batch to {_BATCHES}",
    )
    limit = profile.memory_limit_bytes
    fits = [o for o in profile.options if limit is None or o.memory_bytes <= limit]
    if not fits:
        least = min(profile.options, key=lambda o: o.memory_bytes)
        raise ConfigError(
            f"slice {profile.name}: no batch fits its {limit:,} bytes a device; batch "
            f"{least.batch} needs {least.memory_bytes:,}; add a smaller one to {_BATCHES}, or set "
            "a smaller train.micro_batch"
        )
    return tuple(sorted(fits, key=lambda o: (o.batch, o.seconds_per_step)))


def _equal(
    profiles: Sequence[SliceProfile],
    fitting: list[_Options],
    balance: BalanceConfig,
    exchange_seconds: float,
    worth: Worth | None,
) -> Plan:
    common = set.intersection(*({o.batch for o in options} for options in fitting))
    if not common:
        largest = {p.name: o[-1].batch for p, o in zip(profiles, fitting, strict=True)}
        raise ConfigError(
            f"balance.mode equal: no batch fits every slice (largest that fit: {largest}); add a "
            f"smaller one to {_BATCHES}, or set balance.mode to adaptive"
        )
    rows = {b: [next(o for o in row if o.batch == b) for row in fitting] for b in sorted(common)}
    batch = max(common)
    if worth:  # all wait for the slowest
        batch = max(rows, key=lambda b: worth(b) / max(o.seconds_per_step for o in rows[b]))
    options = rows[batch]
    steps = balance.inner_steps
    if steps is None:
        slowest_seconds = max(o.seconds_per_step for o in options)
        steps = max(1, round(_shared_seconds(balance, exchange_seconds) / slowest_seconds))
    return _plan(profiles, [(option, steps) for option in options])


def _adaptive(
    profiles: Sequence[SliceProfile],
    fitting: list[_Options],
    balance: BalanceConfig,
    exchange_seconds: float,
    worth: Worth | None,
) -> Plan:
    efficient = [_efficient(options, balance.throughput_slack, worth) for options in fitting]
    preferred = [
        options[:1] if worth is None else (_best(options, worth),) for options in efficient
    ]
    longest = max(options[0].seconds_per_step for options in preferred)
    fixed: list[int | None] = [None] * len(profiles)
    if balance.inner_steps is None:
        target = max(_shared_seconds(balance, exchange_seconds), longest)
    else:
        target = balance.inner_steps * longest
        slowest = next(i for i, o in enumerate(preferred) if o[0].seconds_per_step == longest)
        fixed[slowest] = balance.inner_steps

    def score(deadline: float, choice: _Choice) -> tuple[bool, float, float]:
        works = [steps * option.seconds_per_step for option, steps in choice]
        batches = sum(option.batch for option, _ in choice)
        cost = max(works) - min(works) + abs(max(works) - target)
        in_reach = balance.inner_steps or abs(deadline / target - 1) <= SHARE_TOLERANCE
        if in_reach and min(works) >= (1 - IDLE_TARGET) * deadline:
            return False, batches, cost
        return True, cost, batches

    def search(options: list[_Options]) -> tuple[tuple[bool, float, float], _Choice]:
        scored = (
            (score(deadline, choice), choice)
            for deadline in _deadlines(options, fixed, target)
            for choice in _choices(options, fixed, deadline, balance.max_steps_ratio)
        )
        return min(scored, key=lambda pair: pair[0])

    # No balanced plan has fewer sequences a step, or under `worth` better options.
    (unbalanced, *_), choice = search(preferred)
    if unbalanced:
        _, choice = search(efficient)
    return _plan(profiles, choice)


def _efficient(options: _Options, slack: float, worth: Worth | None) -> _Options:
    """Options within `slack` of the best sequences, or worth, a second."""

    def rate(option: Option) -> float:
        return (worth(option.batch) if worth else option.batch) / option.seconds_per_step

    best = max(rate(o) for o in options)
    return tuple(o for o in options if rate(o) >= (1 - slack) * best)


def _best(options: _Options, worth: Worth) -> Option:
    """Of the most worth a second; of equal ones the smallest batch, which comes first."""
    return max(options, key=lambda o: worth(o.batch) / o.seconds_per_step)


def _shared_seconds(balance: BalanceConfig, exchange_seconds: float) -> float:
    """Compute time a round of which the exchange is `sync_share`."""
    assert balance.sync_share is not None
    return exchange_seconds * (1 - balance.sync_share) / balance.sync_share


def _deadlines(slices: list[_Options], fixed: list[int | None], target: float) -> list[float]:
    """Ends of a round worth trying: multiples of step times in reach, those near target first.

    Past target, or past the end of a slice of fixed H, in reach is what the tolerance allows, or
    one more step where that is longer.
    """
    longest = max(options[0].seconds_per_step for options in slices)
    high = max((1 + SHARE_TOLERANCE) * target, target + longest)
    windows = [((1 - SHARE_TOLERANCE) * target, high)]
    for options, steps in zip(slices, fixed, strict=True):
        if steps is not None:
            ends = [(steps * o.seconds_per_step, o.seconds_per_step) for o in options]
            windows = [(end, max(end + step, end / (1 - IDLE_TARGET))) for end, step in ends]
    deadlines = {
        steps * option.seconds_per_step
        for options in slices
        for option in options
        for low, high in windows
        for steps in range(
            max(1, math.ceil(low / option.seconds_per_step - _ROUNDING)),
            math.floor(high / option.seconds_per_step + _ROUNDING) + 1,
        )
    }
    nearest = sorted(deadlines | {target}, key=lambda seconds: (abs(seconds - target), seconds))
    return nearest[:MAX_DEADLINES]


_Choice = list[tuple[Option, int]]  # option and H of every slice


def _choices(
    slices: list[_Options], fixed: list[int | None], deadline: float, ratio: float
) -> Iterator[_Choice]:
    """For each least H that could be the best one, the best choice that ends by the deadline.

    The slice of the least H does all that fits, or has its H fixed: if it could do more, raising
    its H would lose nothing. So these are the only ones to try.
    """
    within = [
        [math.floor(deadline / o.seconds_per_step + _ROUNDING) for o in options]
        for options in slices
    ]
    for least in sorted({n for row in within for n in row} | {n for n in fixed if n}):
        most = math.floor(ratio * least + _ROUNDING)
        rows = [
            [
                (option, steps or min(n, most))
                for option, n in zip(options, row, strict=True)
                if 1 <= least <= (steps or least) <= min(n, most)
            ]
            for options, row, steps in zip(slices, within, fixed, strict=True)
        ]
        if all(rows):
            worked = [max(h * o.seconds_per_step for o, h in row) for row in rows]
            enough = min((1 - IDLE_TARGET) * deadline, *worked)
            yield [next((o, h) for o, h in row if h * o.seconds_per_step >= enough) for row in rows]


def _plan(profiles: Sequence[SliceProfile], choice: _Choice) -> Plan:
    return Plan(
        tuple(
            SliceWork(profile.name, option.batch, steps, option.seconds_per_step, option.strategy)
            for profile, (option, steps) in zip(profiles, choice, strict=True)
        )
    )
