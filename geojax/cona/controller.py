# SPDX-License-Identifier: Apache-2.0
"""Who says which strategy is in force: a fixed chain of them, or CONA.

A pilot is asked once a round. Invariant: its answers follow from what it was told, and `state`
holds all of that, so a run that is resumed, or replayed, takes the same chain.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from geojax.cona.decision import Decision, Known, Situation, decide
from geojax.cona.noise import Moments, NoiseEstimate, NoiseTracker
from geojax.cona.rules import rate_factor
from geojax.cona.score import Option, best, envelope
from geojax.cona.speed import SpeedBelief
from geojax.config.cona import ConaConfig, NoiseConfig
from geojax.config.rate import RateRule
from geojax.meshes.candidates import Candidate
from geojax.meshes.strategy import Strategy

_SHOWN = 2  # strategies of each batch that a decision looks at, beside those worth a trial
_LIKELY = 4  # strategies to have compiled beside the one in force
_SWITCH_MEMORY = 0.5  # weight of the last switch in the mean that the next is expected to take


class Round(NamedTuple):
    """What a round of steps gave."""

    steps: int
    seconds: float
    """Of these steps, probes left out."""
    noise: Mapping[str, Moments]
    disturbed: bool = False
    """Whether something was compiled beside them: no timing."""


class NoiseWatch:
    """The noise scale during a run, averaged over a share of what was seen."""

    def __init__(self, config: NoiseConfig):
        self.config = config
        self._tracker, self._steps = NoiseTracker(config.window_samples), 0

    def observe(self, batch: int, samples: int, steps: int, noise: Mapping[str, Moments]) -> None:
        """Steps of `batch` sequences, up to sample `samples`."""
        window = max(self.config.window_samples, self.config.window_fraction * samples)
        self._tracker.resize(window)
        self._steps += steps
        for source in sorted(noise, key=lambda s: s != "norms"):  # the norms first
            self._tracker.update(source, batch, noise[source])  # type: ignore[arg-type]

    def estimate(self) -> NoiseEstimate | None:
        """None before the first steps, and while nothing is known."""
        return self._tracker.estimate() if self._steps >= self.config.first_steps else None

    def state(self) -> dict[str, Any]:
        metric = self.config.metric
        return {"metric": metric, "steps": self._steps, "tracker": self._tracker.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Noise in another metric says nothing."""
        if state["metric"] == self.config.metric:
            self._steps, self._tracker = state["steps"], NoiseTracker.from_state(state["tracker"])


class Pilot(Protocol):
    """Says which strategy is in force."""

    @property
    def strategy(self) -> Strategy: ...

    @property
    def noise(self) -> NoiseWatch | None:
        """None where nobody looks at the noise."""
        ...

    def scale(self) -> float:
        """Factor on the learning rate, for the next round."""
        ...

    def samples_left(self, samples: int) -> int | None:
        """After how many more samples the next round must end; None: any."""
        ...

    def observe(self, samples: int, done: Round) -> None:
        """A round under the strategy in force has ended at sample `samples`."""
        ...

    def propose(
        self, round: int, samples: int, elapsed_seconds: float, ready: Collection[str] | None
    ) -> tuple[Decision, Situation | None]:
        """What to do now. `ready`: strategies that are compiled; None: no wait for any."""
        ...

    def switched(self, decision: Decision, seconds: float) -> None:
        """The proposal was carried out, in `seconds`."""
        ...

    def refuse(self, name: str, reason: str, out_of_memory: bool = False) -> None:
        """A strategy cannot run here: it is never proposed again. If it is the one in force,
        another takes its place. ValueError where there is none."""
        ...

    def likely(self) -> list[Strategy]:
        """Strategies that may be next."""
        ...

    def state(self) -> dict[str, Any]:
        """For JSON; `restore` goes on from it."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


def rate_scale(rule: RateRule | None, batch: int, watch: NoiseWatch | None) -> float:
    """The rule's factor under the noise as known; not known, the lowest that any noise gives."""
    if rule is None:
        return 1.0
    found = watch.estimate() if watch else None
    if found is None:
        return min(rate_factor(rule, batch, noise) for noise in (0.0, math.inf))
    return rate_factor(rule, batch, found.low if found.value is None else found.value)


@dataclass
class FixedChain:
    """A chain that was given: (first sample, strategy) of each leg."""

    legs: Sequence[tuple[int, Strategy]]
    rule: RateRule | None = None
    noise: NoiseWatch | None = None

    def __post_init__(self):
        self.strategy, self._samples = self.legs[0][1], 0

    def scale(self) -> float:
        return rate_scale(self.rule, self.strategy.global_batch, self.noise)

    def samples_left(self, samples: int) -> int | None:
        return next((begin - samples for begin, _ in self.legs if begin > samples), None)

    def observe(self, samples: int, done: Round) -> None:
        self._samples = samples
        if self.noise:
            self.noise.observe(self.strategy.global_batch, samples, done.steps, done.noise)

    def propose(
        self, round: int, samples: int, elapsed_seconds: float, ready: Collection[str] | None
    ) -> tuple[Decision, Situation | None]:
        due = self._due(samples)
        kind = "keep" if due == self.strategy else "switch"
        return Decision(kind, str(due), f"the chain says so at {samples:,} samples", 1.0, 1.0), None

    def switched(self, decision: Decision, seconds: float) -> None:
        self.strategy = next(s for _, s in self.legs if str(s) == decision.to)

    def refuse(self, name: str, reason: str, out_of_memory: bool = False) -> None:
        raise ValueError(f"strategy {name} cannot run here: {reason}; choose another")

    def likely(self) -> list[Strategy]:
        return [strategy for begin, strategy in self.legs if begin > self._samples][:1]

    def state(self) -> dict[str, Any]:
        noise = self.noise.state() if self.noise else None
        return {"strategy": str(self.strategy), "samples": self._samples, "noise": noise}

    def restore(self, state: dict[str, Any]) -> None:
        """The strategy that is due; whatever pilot the state is of, and its noise if it has any in
        the same metric."""
        self._samples = state["samples"]
        self.strategy = self._due(self._samples)
        if self.noise and state["noise"]:
            self.noise.restore(state["noise"])

    def _due(self, samples: int) -> Strategy:
        return [strategy for begin, strategy in self.legs if begin <= samples][-1]


class Controller:
    """CONA: the strategy of the best score, when a change pays."""

    def __init__(
        self,
        config: ConaConfig,
        noise: NoiseConfig,
        candidates: Sequence[Candidate],
        total_samples: int,
        switch_seconds: float,
        rule: RateRule | None = None,
    ):
        """`candidates`: strategies that fit, with predicted times; `switch_seconds`: what a switch
        is expected to take before one was measured. ValueError where config.start is none of them.
        """
        self._config, self._rule, self._total = config, rule, total_samples
        self._candidates = {str(c.strategy): c for c in candidates}
        self.noise: NoiseWatch = NoiseWatch(noise)
        self._speed = SpeedBelief(
            {name: c.step_seconds for name, c in self._candidates.items()},
            {name: _family(c.strategy) for name, c in self._candidates.items()},
            config.timing_error,
        )
        self._refused: dict[str, str] = {}
        self._switch_seconds = switch_seconds
        self._trial_seconds = self._open_seconds = (
            0.0  # of trials that failed; of the one under way
        )
        self._rounds_here, self._on_trial, self._samples = 0, False, 0
        self._previous: str | None = None
        self.strategy = self._first(config)

    def scale(self) -> float:
        return rate_scale(self._rule, self.strategy.global_batch, self.noise)

    def samples_left(self, samples: int) -> int | None:
        return None

    def observe(self, samples: int, done: Round) -> None:
        self.noise.observe(self.strategy.global_batch, samples, done.steps, done.noise)
        self._rounds_here += 1
        self._samples = samples
        if done.steps and not done.disturbed:
            self._speed.observe(str(self.strategy), done.seconds / done.steps)

    def propose(
        self, round: int, samples: int, elapsed_seconds: float, ready: Collection[str] | None
    ) -> tuple[Decision, Situation]:
        noise = self.noise.estimate()
        situation = Situation(
            round,
            samples,
            self._total,
            elapsed_seconds,
            str(self.strategy),
            self._previous,
            self._rounds_here,
            self._on_trial,
            (noise.value, noise.low, noise.high) if noise else None,
            self._switch_seconds,
            self._trial_seconds,
            tuple(self._known(ready)),
        )
        decision = decide(situation, self._config, self._rule)
        if decision.kind == "keep" and self._speed.timed(str(self.strategy)):
            self._on_trial = False  # it delivered
        return decision, situation

    def switched(self, decision: Decision, seconds: float) -> None:
        if self._on_trial and decision.kind == "fallback":
            self._trial_seconds += self._open_seconds + seconds
        self._open_seconds = seconds if decision.kind == "trial" else 0.0
        self._previous = str(self.strategy)
        self.strategy = self._candidates[decision.to].strategy
        self._rounds_here, self._on_trial = 0, decision.kind == "trial"
        self._switch_seconds += _SWITCH_MEMORY * (seconds - self._switch_seconds)

    def refuse(self, name: str, reason: str, out_of_memory: bool = False) -> None:
        """If it ran out of memory, with all that are expected to take as much and never ran."""
        self._refused[name] = reason
        if out_of_memory:
            size = self._candidates[name].memory_bytes
            for other, candidate in self._candidates.items():
                fits = other == str(self.strategy) or self._speed.timed(other)
                if candidate.memory_bytes >= size and not fits:
                    self._refused.setdefault(other, f"needs as much memory as {name}, or more")
        if name == str(self.strategy):
            options = self._options()
            if not options:
                raise ValueError(f"no strategy can run here; the last, {name}: {reason}")
            found = self.noise.estimate()
            noise = min(self._config.global_batches) if found is None else found.low
            self.strategy = self._candidates[best(options, noise).name].strategy

    def describe(self) -> str:
        """A line on what there is to choose from."""
        batches = sorted({c.strategy.global_batch for c in self._candidates.values()})
        missing = sorted(set(self._config.global_batches) - set(batches))
        gaps = f"; none fits batches {missing}" if missing else ""
        return (
            f"{len(self._candidates):,} strategies with batches of {batches[0]} to {batches[-1]} "
            f"sequences{gaps}; now {self.strategy}"
        )

    def likely(self) -> list[Strategy]:
        """The neighbours, by noise, of the strategy in force, among those that are ever best; then
        the fastest of each family that never ran."""
        options = self._options()
        line = [option.name for _, option in envelope(options)]
        batch = self.strategy.global_batch
        below = [n for n in line if self._candidates[n].strategy.global_batch < batch]
        above = [n for n in line if self._candidates[n].strategy.global_batch > batch]
        found = [*above[:1], *below[-1:]]
        new = [k for k in self._known(None) if not k.family_timed]
        for known in sorted(new, key=lambda k: (k.seconds / k.batch, k.name)):
            family = _family(self._candidates[known.name].strategy)
            if family not in {_family(self._candidates[n].strategy) for n in found}:
                found.append(known.name)
        return [self._candidates[n].strategy for n in found[:_LIKELY]]

    def state(self) -> dict[str, Any]:
        return {
            "strategy": str(self.strategy),
            "samples": self._samples,
            "previous": self._previous,
            "rounds_here": self._rounds_here,
            "on_trial": self._on_trial,
            "switch_seconds": self._switch_seconds,
            "trial_seconds": self._trial_seconds,
            "open_seconds": self._open_seconds,
            "refused": self._refused,
            "noise": self.noise.state(),
            "speed": self._speed.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """ValueError where the strategy in force then can no longer be, or the state is of a run
        that went by another way."""
        if "speed" not in state:
            raise ValueError(
                "the checkpoint is of a run without cona, and the config has it; resume with the "
                "config that wrote it, or with --strategy"
            )
        if state["strategy"] not in self._candidates:
            raise ValueError(
                f"the run was under {state['strategy']}, which does not fit these devices; resume "
                "on as many as before, or with --strategy"
            )
        self.strategy = self._candidates[state["strategy"]].strategy
        self._samples, self._previous = state["samples"], state["previous"]
        self._rounds_here, self._on_trial = state["rounds_here"], state["on_trial"]
        self._switch_seconds = state["switch_seconds"]
        self._trial_seconds = state["trial_seconds"]
        self._open_seconds = state.get("open_seconds", 0.0)
        self._refused = dict(state["refused"])
        self.noise.restore(state["noise"])
        self._speed.restore(state["speed"])

    def _first(self, config: ConaConfig) -> Strategy:
        if config.start:
            if config.start not in self._candidates:
                raise ValueError(
                    f"cona.start {config.start} is none of the {len(self._candidates)} strategies "
                    "that fit; `geojax plan` lists those"
                )
            return self._candidates[config.start].strategy
        options = [_option(c, c.step_seconds) for c in self._candidates.values()]
        return self._candidates[best(options, min(config.global_batches)).name].strategy

    def _options(self) -> list[Option]:
        names = [n for n in self._candidates if n not in self._refused]
        seconds = self._speed.of(names, str(self.strategy)).seconds
        return [_option(self._candidates[n], float(s)) for n, s in zip(names, seconds, strict=True)]

    def _known(self, ready: Collection[str] | None) -> list[Known]:
        """The present strategy, the one before, the fastest of each batch, and the fastest of each
        batch whose family never ran."""
        present = str(self.strategy)
        names = [n for n in self._candidates if n not in self._refused or n == present]
        speeds = self._speed.of(names, present)
        known = [
            Known(
                name,
                self._candidates[name].strategy.global_batch,
                float(seconds),
                float(sd),
                timed,
                family_timed,
                ready is None or name in ready,
            )
            for name, seconds, sd, timed, family_timed in zip(names, *speeds, strict=True)
        ]
        chosen = {present, self._previous}
        by_speed = sorted(known, key=lambda k: (k.seconds, k.name))
        for batch in {k.batch for k in known}:
            own = [k for k in by_speed if k.batch == batch]
            chosen |= {k.name for k in own[:_SHOWN]}
            chosen |= {k.name for k in own if not k.family_timed and k in own[: 4 * _SHOWN]}
        return [k for k in known if k.name in chosen]


def _option(candidate: Candidate, seconds: float) -> Option:
    return Option(str(candidate.strategy), candidate.strategy.global_batch, seconds)


def _family(strategy: Strategy) -> str:
    return f"tp{strategy.tp}-pp{strategy.pp}"
