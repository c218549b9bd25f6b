# SPDX-License-Identifier: Apache-2.0
"""The greedy oracle: at every interval it tries strategies from the same state, and keeps the best.

A branch trains under one strategy until the modelled clock comes to the end of the interval; the
one of the lowest held-out loss goes on, and the others never were. Tried are the strategy in force
and its neighbours on the envelope, in the first interval all of it. Whole steps are taken, so that
branches end up to half a step apart.

Invariant: what an interval does is a function of the last checkpoint, so a command that is killed
goes on to the same end.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from geojax import platform
from geojax.cona.rules import rate_factor
from geojax.cona.score import Option
from geojax.config import RunConfig
from geojax.data import TrainSequences, ValidSequences, both_splits, prepare
from geojax.meshes.reshard import bring_back, keep_copy, reshard
from geojax.meshes.strategy import parse_strategy
from geojax.train.agree import READY
from geojax.train.checkpoint import Checkpoints
from geojax.train.engine import Engine
from geojax.train.program import Program
from geojax.train.steering import devices_for, local_strategy, make_task
from geojax.train.step import TrainState

_CHUNK_STEPS = 8


class Place(NamedTuple):
    """Where the oracle is; what a checkpoint holds beside the state."""

    strategy: str
    cursor: int
    """Next global sample."""
    seconds: float
    evals: list[dict[str, Any]]
    """One at the start, then one an interval: seconds, tokens, loss, strategy, tried."""
    ended: bool = False


def run_greedy(
    config: RunConfig,
    folder: Path,
    options: Sequence[Option],
    until_seconds: float,
    intervals: int,
    console: Console,
) -> list[dict[str, Any]]:
    """Evaluations of the oracle over `until_seconds` or `config`'s tokens, whichever end first.

    `config`: of a run by CONA under the modelled clock, whose rate rule looks at no noise;
    `options`: those that are ever best, by batch. Kept in `folder`, and gone on with from there.
    """
    assert config.scaling, "every config by cona scales"
    assert not config.scaling.wants_noise, "branches measure none"
    folder.mkdir(parents=True, exist_ok=True)
    with Checkpoints(folder / "checkpoints", config.checkpoint) as checkpoints:
        place = None if checkpoints.empty else Place(**checkpoints.meta()["place"])
        if place and place.ended:
            return place.evals
        oracle = _Oracle(config, options, checkpoints, place)
        width = until_seconds / intervals
        place = place or oracle.first()
        while not place.ended:
            place = oracle.interval(place, width)
            number = len(place.evals) - 1
            whole = config.train.total_tokens
            ended = number >= intervals or place.evals[-1]["tokens"] >= whole
            place = place._replace(ended=ended)
            checkpoints.save({"state": oracle.engine.state}, {"place": place._asdict()})
            last = place.evals[-1]
            console.print(
                f"  greedy {number} of {intervals}: loss {last['loss']:.4f} by {last['strategy']}"
            )
        checkpoints.wait()
        oracle.engine.programs.close()
        return place.evals


class _Oracle:
    """The engine at work, and what is read."""

    def __init__(
        self,
        config: RunConfig,
        options: Sequence[Option],
        checkpoints: Checkpoints,
        place: Place | None,
    ):
        platform.apply(config.platform)
        self._config, self._options = config, options
        corpus = prepare(config.data, config.model.vocab_size)
        train, valid = both_splits(corpus, config.data, config.model.shifted)
        self._train: TrainSequences = train
        self._valid: ValidSequences = valid
        fixed = _by(config, place.strategy if place else options[0].name)
        devices = devices_for(fixed)
        self.engine = Engine(make_task(fixed), devices, _CHUNK_STEPS)
        make = partial(_restored, checkpoints) if place else lambda p: p.init(config.seed)
        code, why = self.engine.begin(self._local(fixed.strategy), make)
        assert code == READY, why
        self._judge = self.engine.program

    def first(self) -> Place:
        """Before the first step."""
        start = {"seconds": 0.0, "tokens": 0, "loss": self._loss()}
        return Place(self._options[0].name, 0, 0.0, [start])

    def interval(self, place: Place, width: float) -> Place:
        """The best of its branches, whose state the engine then holds."""
        number = len(place.evals)
        kept, program = keep_copy(self.engine.state), self.engine.program
        branches = []
        for option in self._tried(place):
            if branches:  # the first goes on from what is there
                self.engine.program, self.engine.state = program, bring_back(kept)
            after = self._branch(place, option, number * width)
            branches.append((after, self.engine.program, keep_copy(self.engine.state)))
        losses = {after.strategy: after.evals[-1]["loss"] for after, *_ in branches}
        best, self.engine.program, state = min(
            branches, key=lambda b: (b[0].evals[-1]["loss"], b[0].strategy)
        )
        self.engine.state = bring_back(state)
        best.evals[-1]["tried"] = losses
        return best

    def _tried(self, place: Place) -> Sequence[Option]:
        """Those of an interval, the present one among them."""
        if place.cursor == 0:
            return self._options
        at = [o.name for o in self._options].index(place.strategy)
        return self._options[max(at - 1, 0) : at + 2]

    def _branch(self, place: Place, option: Option, until_seconds: float) -> Place:
        config, seq_len = self._config, self._config.data.seq_len
        moved = option.name != place.strategy and place.cursor > 0
        seconds = place.seconds + moved * config.clock.switch_seconds
        code, why = self.engine.switch(self._local(option.name))
        assert code == READY, why
        left = -(-(config.train.total_tokens - place.cursor * seq_len) // (option.batch * seq_len))
        steps = min(max(round((until_seconds - seconds) / option.seconds), 1), left)
        self._steps(place.cursor, option.batch, steps)
        cursor, seconds = place.cursor + steps * option.batch, seconds + steps * option.seconds
        made = {
            "seconds": seconds,
            "tokens": cursor * seq_len,
            "loss": self._loss(),
            "strategy": option.name,
        }
        return Place(option.name, cursor, seconds, [*place.evals, made])

    def _steps(self, cursor: int, batch: int, steps: int) -> None:
        """As a run's trainer takes them."""
        config, program = self._config, self.engine.program
        seq_len, total = config.data.seq_len, config.train.total_tokens
        assert config.scaling, "checked by run_greedy"
        scale = rate_factor(config.scaling.rate_rule(), batch, 0.0)
        begin, stride, done = cursor * seq_len / total, batch * seq_len / total, 0
        for piece, real in self._train.chunks(cursor, steps, batch, _CHUNK_STEPS):
            self.engine.state, _ = program.run(
                self.engine.state, program.put_chunk(piece), real, begin, stride, done, scale
            )
            done += real

    def _loss(self) -> float:
        shown = self._config.eval
        return self._judge.evaluate(
            self.engine.state.params,
            lambda rows: self._valid.batches(rows, shown.sequences, shown.first, shown.draws),
            shown.batch,
            shown.draws,
        ).loss

    def _local(self, name: str):
        return local_strategy(self._config, parse_strategy(name))


def _by(config: RunConfig, strategy: str) -> RunConfig:
    """`config` by one strategy, noise not measured."""
    return replace(config, cona=None, strategy=strategy, noise=None)


def _restored(checkpoints: Checkpoints, program: Program) -> TrainState:
    state, _ = checkpoints.restore({"state": program.abstract_state})
    return jax.block_until_ready(reshard([state["state"]], program.state_shardings))
