# SPDX-License-Identifier: Apache-2.0
"""Rounds of a run in modelled time: who computes, who waits for whom, and for how long.

An exchange begins when the last slice has done its inner steps and the exchange before is over.
Without overlap, slices wait for its end. With overlap they go on with the next round's inner steps
at once, and take the result in after a share of them (1: a lag of one round): then they wait only
for what is not over yet.

Invariant: compute + straggler wait + WAN wait of a slice, over all rounds, is the run's time. What
the slice that waits least waits in a round is WAN wait, for all; what others wait more, they wait
for it. Without overlap, and with neither jitter nor changes of speed, a round takes what
`ModelledClock` says.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from geojax.config import BalanceConfig, steps_ahead
from geojax.geomesh.balance import Option, Plan, SliceProfile, make_plan
from geojax.simulate.speeds import Speeds

_IDLE = 0.05
"""Straggler idle at which a plan is looked at again."""


class Round(NamedTuple):
    """One round, by slice. With overlap, rounds of different slices begin at different times."""

    plan: Plan
    compute: list[float]
    straggler: list[float]
    wan: list[float]
    exchange: float
    """Seconds under way, whether somebody waits or not."""
    end: float
    """When its exchange was over, since the run's beginning."""

    @property
    def straggler_idle(self) -> float:
        """Largest share over slices of what one waits for the others of the round's compute."""
        pairs = zip(self.straggler, self.compute, strict=True)
        return max(wait / (wait + compute) for wait, compute in pairs)


@dataclass(frozen=True)
class Replanner:
    """Plans anew where the plan in force idles, by the speeds that the last round showed.

    `profiles`: what each slice could do at speed 1.
    """

    profiles: tuple[SliceProfile, ...]
    balance: BalanceConfig
    exchange_seconds: float

    def plan(self, factors: list[float]) -> Plan:
        """For slices at these speeds. Slices that are alike get the same work."""
        alike = [
            (p.options, p.memory_limit_bytes, factor)
            for p, factor in zip(self.profiles, factors, strict=True)
        ]
        distinct = list(dict.fromkeys(alike))
        profiles = [
            SliceProfile(str(i), _slowed(options, factor), limit)
            for i, (options, limit, factor) in enumerate(distinct)
        ]
        work = make_plan(profiles, self.balance, self.exchange_seconds).work
        pairs = zip(self.profiles, alike, strict=True)
        return Plan(tuple(replace(work[distinct.index(key)], name=p.name) for p, key in pairs))


def run_rounds(
    plan: Plan,
    sequences: int,
    exchange: Callable[[int], float],
    speeds: Speeds,
    overlap: float = 0.0,
    replanner: Replanner | None = None,
    most: int | None = None,
) -> list[Round]:
    """Rounds until all slices together have done `sequences`, or `most` rounds.

    `plan`: at speed 1; `exchange`: seconds of the exchange of a round, from 1 on. `overlap`: as
    exchange.overlap. `replanner`: where the plan follows the speeds.
    """
    count = len(plan.work)
    planned = [1.0] * count  # the speeds that the plan counts on
    rounds: list[Round] = []
    begins = [0.0] * count  # of the round's inner steps
    over = 0.0  # the exchange before
    done = 0
    while done < sequences and len(rounds) != most:
        work = [w.compute_seconds * f for w, f in zip(plan.work, planned, strict=True)]
        ahead = [
            w.seconds_per_step * f * steps_ahead(overlap, w.inner_steps)
            for w, f in zip(plan.work, planned, strict=True)
        ]
        middles = [speeds.end(i, begins[i], ahead[i]) for i in range(count)]
        taken_in = [max(middle, over) for middle in middles] if overlap else middles
        ends = [speeds.end(i, taken_in[i], work[i] - ahead[i]) for i in range(count)]
        waits = [after - before for after, before in zip(taken_in, middles, strict=True)]
        compute = [end - begin - wait for end, begin, wait in zip(ends, begins, waits, strict=True)]
        took = exchange(len(rounds) + 1)
        over = max(*ends, over) + took
        done += plan.sequences
        last = done >= sequences or len(rounds) + 1 == most
        begins = [max(end, over) for end in ends] if last or not overlap else ends
        waits = [wait + b - end for wait, b, end in zip(waits, begins, ends, strict=True)]
        straggler = [wait - min(waits) for wait in waits]
        rounds.append(Round(plan, compute, straggler, [min(waits)] * count, took, over))
        if replanner:
            seen = [w / c for w, c in zip(work, compute, strict=True)]
            if _idle(plan, planned, seen) > _IDLE:
                plan, planned = replanner.plan(seen), seen
    return rounds


def _idle(plan: Plan, planned: list[float], factors: list[float]) -> float:
    """Straggler idle of a plan made for speeds `planned`, at `factors`."""
    rows = zip(plan.work, planned, factors, strict=True)
    compute = [w.compute_seconds * p / f for w, p, f in rows]
    return 1 - min(compute) / max(compute)


def _slowed(options: tuple[Option, ...], factor: float) -> tuple[Option, ...]:
    return tuple(replace(o, seconds_per_step=o.seconds_per_step / factor) for o in options)
