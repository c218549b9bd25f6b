# SPDX-License-Identifier: Apache-2.0
"""What the processes of a cluster tell each other, so that all do the same.

Invariant: every process calls these in the same order; alone, a process agrees with itself at once.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils

PENDING, READY, FAILED, NO_MEMORY = 0, 1, 2, 3
"""How a program stands, the worst last."""


def reason(failure: Exception) -> str:
    """What the compiler or the device said, in a line."""
    return " ".join(str(failure).split())[:200]


def out_of_memory(reason: str) -> bool:
    """Whether that is why it failed."""
    return "RESOURCE_EXHAUSTED" in reason


def first_says(measured: float) -> float:
    """The first process's value, in all of them."""
    if jax.process_count() == 1:
        return measured
    return float(multihost_utils.broadcast_one_to_all(np.float32(measured)))


def first_chooses(number: int) -> int:
    """The first process's whole number, in all of them."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def anyone(flag: bool) -> bool:
    """Whether it holds in any process."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def code_of(error: str | None) -> int:
    """READY where there is none, NO_MEMORY where memory ran out, else FAILED."""
    return READY if error is None else NO_MEMORY if out_of_memory(error) else FAILED


def worst(error: str | None) -> int:
    """The code of all processes' errors: of the worst."""
    code = code_of(error)
    if jax.process_count() == 1:
        return code
    return int(multihost_utils.process_allgather(np.array(code)).max())


def standing(codes: list[int]) -> list[int]:
    """Of the same programs in all processes: the worst where one failed, ready where all are."""
    if jax.process_count() == 1 or not codes:
        return codes
    every = multihost_utils.process_allgather(np.array(codes))
    return np.where((every >= FAILED).any(0), every.max(0), every.min(0)).tolist()
