# SPDX-License-Identifier: Apache-2.0
"""The outer step: merged pseudo-gradients move the parameters that all slices share.

Each slice holds a copy of its own: parameters and outer optimizer state, 8 bytes a parameter beside
the 4 of error feedback. Invariant: all copies are equal, bit for bit, at every round border. So the
step runs on the host, elementwise, one operation after another (optax, not under jit, so that no
compiler contracts a multiply and an add on one kind of machine and not on another).

Sign convention: pseudo-gradient = shared parameters - a slice's parameters, which an outer
optimizer descends as it would a gradient (Douillard et al. 2023, DiLoCo).
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from geojax.config import OuterConfig, RunError
from geojax.geomesh.codec import Leaves
from geojax.geomesh.message import Header
from geojax.train.optim import make_optimizer, make_schedule


class DesyncError(RunError):
    """Copies of the shared parameters differ between slices."""


@dataclass
class OuterCopy:
    """One slice's copy of what is shared: a pytree of host arrays and the optimizer's state."""

    params: Any
    opt_state: Any


class OuterStep:
    """Applies merged pseudo-gradients by the configured optimizer."""

    def __init__(self, config: OuterConfig):
        self._optimizer = make_optimizer(config.optimizer)
        self._schedule = make_schedule(config.schedule, config.optimizer.learning_rate)

    def init(self, params: Any) -> OuterCopy:
        """A copy that starts from `params` (a pytree of arrays)."""
        params = jax.tree.map(lambda x: np.array(x, np.float32), params)
        return OuterCopy(params, self._on_host(self._optimizer.init, params))

    def apply(self, copy: OuterCopy, merged: Leaves, progress: float) -> None:
        """Replace the copy's parameters and state by those after one step along `merged`."""
        gradient = jax.tree.unflatten(jax.tree.structure(copy.params), merged)
        updates, copy.opt_state = self._on_host(
            self._optimizer.update, gradient, copy.opt_state, copy.params
        )
        rate = np.float32(self._on_host(self._schedule, progress))
        copy.params = jax.tree.map(lambda p, u: p - rate * u, copy.params, updates)

    @staticmethod
    def _on_host(function, *args):
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return jax.tree.map(np.asarray, function(*args))


def merge_weights(
    headers: Sequence[Header], merge: Literal["tokens", "fednova"]
) -> list[float] | None:
    """Weight of each slice's pseudo-gradient; None where no slice brings a token.

    tokens: its share of the loss-bearing tokens. A pseudo-gradient grows with its steps by itself,
    so a slice that takes more of them counts more in both ways. fednova (Wang et al. 2020):
    p_i * tau / tau_i, with p_i its share of the tokens a step, tau_i its steps and tau = sum p_i
    tau_i, so that a slice that takes more steps does not pull the result towards its own data.
    """
    if merge == "tokens":
        parts = [float(h.tokens) for h in headers]
        factors = [1.0] * len(headers)
    else:
        steps = [max(h.steps, 1) for h in headers]
        parts = [h.tokens / s for h, s in zip(headers, steps, strict=True)]
        mean_steps = sum(p * s for p, s in zip(parts, steps, strict=True)) / (sum(parts) or 1.0)
        factors = [mean_steps / s for s in steps]
    total = sum(parts)
    if not total:
        return None
    return [p / total * f for p, f in zip(parts, factors, strict=True)]


def digest(copy: OuterCopy) -> bytes:
    """SHA-256 of a copy's parameters and outer optimizer state."""
    result = hashlib.sha256()
    for leaf in jax.tree.leaves((copy.params, copy.opt_state)):
        result.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    return result.digest()


def check_digests(digests: Sequence[bytes], names: Sequence[str], round_: int) -> None:
    """DesyncError unless all are equal; it names the slices in the minority where there is one."""
    counts = Counter(digests)
    if len(counts) == 1:
        return
    majority, votes = counts.most_common(1)[0]
    if 2 * votes > len(digests):
        odd = [n for n, d in zip(names, digests, strict=True) if d != majority]
        who = f"of {', '.join(odd)} differ from those of the other {votes} slices"
    else:
        who = f"of {', '.join(names)} differ, and no majority shows whose are wrong"
    raise DesyncError(
        f"round {round_}: the shared parameters {who}; resume from the last checkpoint, and look "
        "for memory errors or mixed versions"
    )
