# SPDX-License-Identifier: Apache-2.0
"""A round of steps: what it was to be, what its steps gave so far, and what is recorded of it.

Invariant: an interrupted round is a value that a checkpoint holds; the rest of it, added to that,
gives the round that was not interrupted.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from geojax.cona.noise import Moments
from geojax.train.step import StepStats

_NOTHING = Moments(*[0.0] * len(Moments._fields))


class Sums(NamedTuple):
    """Of steps, on the host."""

    done: int
    """Steps, skipped ones included."""
    numbers: np.ndarray
    """nats, tokens, gradient norms, good steps, skipped ones."""
    noise: dict[str, Moments]


class Partial(NamedTuple):
    """A round under way."""

    steps: int
    span: tuple[float, float, float]
    """Progress at its beginning, and a step; scale of the learning rate."""
    probes: int
    """Steps at its beginning that are probes, 0 or 1."""
    sums: Sums = Sums(0, np.zeros(5), {})
    seconds: float = 0.0
    pace_seconds: float = 0.0
    """Without the probe."""
    disturbed: bool = False
    """Whether something was compiled beside it."""


def sums_of(stats: StepStats) -> Sums:
    """Of a chunk, its number of steps left out; waits for them."""
    stats = jax.device_get(stats)
    noise = {source: Moments(*map(float, moments)) for source, moments in stats.noise.items()}
    return Sums(0, np.array([float(x) for x in stats[:5]]), noise)


def add(a: Sums, b: Sums) -> Sums:
    noise = dict(a.noise)
    for source, moments in b.noise.items():
        pairs = zip(noise.get(source, _NOTHING), moments, strict=True)
        noise[source] = Moments(*(x + y for x, y in pairs))
    return Sums(a.done + b.done, a.numbers + b.numbers, noise)


def partial_record(part: Partial | None) -> dict[str, Any] | None:
    """For JSON."""
    if part is None:
        return None
    sums = part.sums
    noise = {source: list(moments) for source, moments in sums.noise.items()}
    return part._asdict() | {"sums": [sums.done, sums.numbers.tolist(), noise]}


def read_partial(fields: dict[str, Any] | None) -> Partial | None:
    """What `partial_record` gave."""
    if fields is None:
        return None
    done, numbers, noise = fields["sums"]
    sums = Sums(done, np.array(numbers), {k: Moments(*v) for k, v in noise.items()})
    return Partial(**fields | {"span": tuple(fields["span"]), "sums": sums})


def work_record(sums: Sums, batch: int, seconds: float) -> dict[str, Any]:
    """Fields of a `slice` record: of all there is, which waits for nobody and sends nothing."""
    nats, tokens, norms, good, skipped = sums.numbers.tolist()
    return {
        "slice": "all",
        "batch": batch,
        "steps": sums.done,
        "tokens": int(tokens),
        "loss": nats / tokens if tokens else None,
        "grad_norm": norms / good if good else None,
        "skipped": int(skipped),
        "merged": True,
        "compute_seconds": seconds,
        **{f"{part}_seconds": 0.0 for part in ("straggler", "wan", "outer")},
        **{f"{kind}_bytes": 0 for kind in ("payload", "wire", "sent")},
        "captured_energy": None,
    }


ALONE: dict[str, Any] = {
    "payload_bytes": 0,
    "payload_ratio": None,
    "wire_bytes": 0,
    "sign_agreement": None,
}
"""Fields of a `round` record in which nothing was exchanged."""
