# SPDX-License-Identifier: Apache-2.0
"""The state of requests that are being denoised, and how a step changes it.

Invariant: a request's row changes by its own fields alone: rows of one batch may be at any block
and step. Its blocks begin at its first mask, and a block ends when none of its positions is masked;
a row that is done never changes again.

Shapes: b requests, s positions of the longest, padded, w positions of a window.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from geojax.diffusion.choose import POLICIES, Draws, Reading, fill, scheduled_count, steps_of_block
from geojax.diffusion.request import Request, masks


class Canvas(NamedTuple):
    """What a step changes; on the host or on the device."""

    tokens: Int[Any, "b s"]
    block: Int[Any, " b"]
    """Where the present block begins."""
    block_masks: Int[Any, " b"]
    """Masks that it began with."""
    block_steps: Int[Any, " b"]
    """Steps that it is to take."""
    block_step: Int[Any, " b"]
    """Steps taken in it."""
    steps: Int[Any, " b"]
    """Steps taken in all."""
    done: Bool[Any, " b"]
    broken: Bool[Any, " b"]
    """Whether a logit was no number; such a row is done, and what it says means nothing."""


class Rules(NamedTuple):
    """What it does not change."""

    length: Int[Any, " b"]
    """Tokens; those after them are padding."""
    begin: Int[Any, " b"]
    """The first mask."""
    end: Int[Any, " b"]
    """After the last one."""
    block_size: Int[Any, " b"]
    steps: Int[Any, " b"]
    """Denoising steps of all blocks."""
    policy: Int[Any, " b"]
    threshold: Float[Any, " b"]
    temperature: Float[Any, " b"]
    guidance: Float[Any, " b"]
    seed: UInt[Any, " b"]
    ends: Bool[Any, " b"]
    """Whether an end-of-text token ends it."""

    @property
    def draws(self) -> Draws:
        return Draws(self.policy, self.temperature, self.seed)


class Window(NamedTuple):
    """Positions of each row's present block, its masked ones first."""

    positions: Int[Array, "b w"]
    masked: Bool[Array, "b w"]


def begin(
    requests: Sequence[Request], mask_id: int, rows: int, positions: int
) -> tuple[Canvas, Rules]:
    """State before the first step, on the host; rows beyond the requests are done."""
    tokens = np.zeros((rows, positions), np.int32)
    done = np.arange(rows) >= len(requests)
    columns: dict[str, Any] = {name: np.zeros(rows, np.int32) for name in Rules._fields}
    columns["length"] += 1  # an empty row would attend to nothing
    columns["block_size"] += 1
    for name in ("threshold", "temperature", "guidance"):
        columns[name] = np.zeros(rows, np.float32)
    columns["seed"], columns["ends"] = np.zeros(rows, np.uint32), np.zeros(rows, bool)
    for i, request in enumerate(requests):
        ask, hidden = request.sampling, masks(request, mask_id)
        tokens[i, : len(hidden)] = request.tokens
        places = np.flatnonzero(hidden)
        first, last = int(places[0]), int(places[-1])
        values = {
            "length": len(hidden),
            "begin": first,
            "end": last + 1,
            "block_size": ask.block or last + 1 - first,
            "steps": min(ask.steps or len(places), len(places)),
            "policy": POLICIES.index(ask.policy),
            "threshold": ask.threshold,
            "temperature": ask.temperature,
            "guidance": ask.guidance,
            "seed": ask.seed,
            "ends": request.ends and bool(hidden[first:].all()),
        }
        for name, value in values.items():
            columns[name][i] = value
    rules = Rules(**columns)
    zeros = np.zeros(rows, np.int32)
    canvas = Canvas(tokens, rules.begin, zeros, zeros, zeros, zeros, done, np.zeros(rows, bool))
    hidden = _inside(tokens == mask_id, rules.begin, rules.end, np)
    first = _inside(hidden, rules.begin, rules.begin + rules.block_size, np).sum(1)
    steps = steps_of_block(rules.steps, hidden.sum(1), first, np)
    return canvas._replace(
        block_masks=first.astype(np.int32), block_steps=steps.astype(np.int32)
    ), rules


def window(canvas: Canvas, rules: Rules, mask_id: int, width: int) -> Window:
    """`width`: at least every row's block size. Positions beyond a block are not masked."""
    positions = canvas.block[:, None] + jnp.arange(width)
    inside = positions < jnp.minimum(canvas.block + rules.block_size, rules.end)[:, None]
    positions = jnp.minimum(positions, canvas.tokens.shape[1] - 1)
    masked = jnp.take_along_axis(canvas.tokens, positions, axis=1) == mask_id
    masked &= inside & ~canvas.done[:, None]
    order = jnp.argsort(~masked, axis=1, stable=True)
    pick = lambda x: jnp.take_along_axis(x, order, axis=1)  # noqa: E731
    return Window(pick(positions), pick(masked))


def commit(
    canvas: Canvas,
    rules: Rules,
    seen: Window,
    reading: Reading,
    mask_id: int,
    end_ids: Bool[Array, " V"],
) -> Canvas:
    """The state after a step that read `seen`."""
    steps = jnp.maximum(canvas.block_steps, 1)
    now = fill(
        reading,
        seen.masked,
        rules.policy,
        rules.threshold,
        scheduled_count(canvas.block_masks, steps, canvas.block_step),
        # With n steps, of those that are masked before step i, 1 / (n - i) are filled in it.
        1.0 / jnp.maximum(steps - canvas.block_step, 1),
    )
    rows = jnp.arange(len(now))[:, None]
    places = jnp.where(now, seen.positions, canvas.tokens.shape[1])  # out of bounds is dropped
    tokens = canvas.tokens.at[rows, places].set(reading.token, mode="drop")
    active = ~canvas.done
    hidden = _inside(tokens == mask_id, rules.begin, rules.end, jnp)
    first = jnp.where(hidden.any(1), jnp.argmax(hidden, axis=1), rules.end)
    # The block of the first mask: blocks that were given whole are passed over.
    block = canvas.block + (first - canvas.block) // rules.block_size * rules.block_size
    moved = block != canvas.block
    ended = _inside(jnp.asarray(end_ids)[tokens], rules.begin, first, jnp).any(1) & rules.ends
    masks = _inside(hidden, block, block + rules.block_size, jnp).sum(1, dtype=jnp.int32)
    left = hidden.sum(1, dtype=jnp.int32)
    new_steps = steps_of_block(rules.steps - canvas.steps - 1, left, masks)
    broken = jnp.any(seen.masked & jnp.isnan(reading.score), axis=1)
    new = Canvas(
        tokens,
        jnp.where(moved, block, canvas.block),
        jnp.where(moved, masks, canvas.block_masks),
        jnp.where(moved, new_steps, canvas.block_steps),
        jnp.where(moved, 0, canvas.block_step + 1),
        canvas.steps + 1,
        canvas.done | ended | broken | (first >= rules.end),
        broken,
    )
    keep = lambda a, b: jnp.where(active.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
    return Canvas(*(keep(a, b) for a, b in zip(new, canvas, strict=True)))


def _inside(what, begin, end, np_or_jnp):
    places = np_or_jnp.arange(what.shape[1])
    return what & (places >= begin[:, None]) & (places < end[:, None])


def power_of_two(n: int) -> int:
    """The first that is at least `n`: shapes come in them, so that few programs serve all."""
    return 1 << max(n - 1, 0).bit_length()
