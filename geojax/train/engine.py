# SPDX-License-Identifier: Apache-2.0
"""The program and the state of a run on one cluster, and going over from one program to another.

Invariant: a switch that fails leaves program and state as they were, bit for bit, in all processes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from geojax.config import RunError
from geojax.meshes.reshard import bring_back, keep_copy
from geojax.meshes.strategy import Strategy
from geojax.train.agree import FAILED, PENDING, READY, code_of, reason, standing, worst
from geojax.train.program import Program, Task
from geojax.train.programs import Programs
from geojax.train.step import TrainState

FOREIGN = "another process could not"
"""Why, where it was not this process that failed."""


class Engine:
    """One program at work."""

    program: Program
    state: Any
    """Of the program: a TrainState, donated to each call of `program.run`."""

    def __init__(self, task: Task, devices: Sequence[jax.Device], chunk_steps: int):
        self.programs = Programs(task, devices, chunk_steps)
        self._ran: set[Strategy] = set()

    def begin(
        self, strategy: Strategy, make_state: Callable[[Program], TrainState]
    ) -> tuple[int, str]:
        """Compile, make the state and rehearse; READY, or how it failed and why."""
        error = None
        try:
            self.program = self.programs.get(strategy)
            self.state = make_state(self.program)
            self.state = self.program.rehearse(self.state, self.programs.steps)
        except (ValueError, RunError):  # a mistake of the user's, or of a file
            raise
        except Exception as failure:  # whatever the compiler or the device raises
            error = reason(failure)
        code = worst(error)
        if code == READY:
            self._ran.add(strategy)
        else:
            self.state = None
        return code, error or FOREIGN

    def switch(self, strategy: Strategy) -> tuple[int, str]:
        """Go over to another strategy; READY, or how it failed and why, all being as it was.

        RunError where a program that has run before fails: there is no copy to go back to.
        """
        before, error = self.program, None
        try:
            target = self.programs.get(strategy)
        except Exception as failure:  # whatever the compiler raises
            target, error = before, reason(failure)
        code = worst(error)
        if code == READY and target is not before:
            # A program that never ran may run out of memory, after the old state has gone.
            kept = None if strategy in self._ran else keep_copy(self.state)
            self.program = target
            error = self._move(before, rehearse=kept is not None)
            code = worst(error)
            if code != READY and kept is None:
                raise RunError(
                    f"the state did not reach {strategy}, which has run before: {error}; go on "
                    "with `geojax train --resume`"
                )
            if code != READY:
                self.program, self.state = before, None  # what is there takes the room
                self.state = bring_back(kept)
        if code == READY:
            self._ran.add(strategy)
        else:
            self.programs.forget(strategy)
        return code, error or FOREIGN

    def standing(self) -> list[tuple[Strategy, int, str]]:
        """How each strategy stands that was asked for, by all processes: PENDING, READY, or how it
        failed and why; what failed is forgotten."""
        found = sorted(self.programs.found().items(), key=lambda item: str(item[0]))
        errors = [reason(x) if isinstance(x, Exception) else None for _, x in found]
        own = [
            code_of(error) if error or done else PENDING
            for error, (_, done) in zip(errors, found, strict=True)
        ]
        stands = []
        for (strategy, _), error, code in zip(found, errors, standing(own), strict=True):
            stands.append((strategy, code, error or FOREIGN))
            if code >= FAILED:
                self.programs.forget(strategy)
        return stands

    def _move(self, before: Program, rehearse: bool) -> str | None:
        """Take the state from `before` to the present program; what went wrong, if anything.

        Nothing of a failure stays but its text: its frames would hold arrays.
        """
        try:
            taken = [self.state]
            self.state = None
            self.state = self.program.move(taken, before)
            if rehearse:
                self.state = self.program.rehearse(self.state, self.programs.steps)
            self.state = self.program.carry_over(self.state, before.strategy.global_batch)
        except jax.errors.JaxRuntimeError as failure:
            return reason(failure)
        return None
