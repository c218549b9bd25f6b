# SPDX-License-Identifier: Apache-2.0
"""Sampling from a masked diffusion model: batches of requests, some steps a call.

Invariant: what a request is answered does not depend on the others of its batch, on their order or
on padding, apart from rounding; shapes come in buckets, so that few programs serve all requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int32

from geojax.config import RunError, require
from geojax.diffusion.canvas import Canvas, Rules, begin, commit, power_of_two, window
from geojax.diffusion.choose import Read, read
from geojax.diffusion.forward import hidden, read_window, rows_of
from geojax.diffusion.request import Request, check, masks
from geojax.models.transformer import Params, Transformer

_POSITION_BUCKET = 64  # sequences are padded to whole multiples of it
_FEWEST_POSITIONS = 16


class Progress(NamedTuple):
    """Where a batch stands."""

    tokens: Int32[np.ndarray, "b s"]
    """Of each request; masked ones are not filled yet."""
    filled: Int32[np.ndarray, " b"]
    """Where its first mask is, or its end: what lies before never changes again."""
    done: Bool[np.ndarray, " b"]


@dataclass(frozen=True)
class Answer:
    """A request that was filled."""

    tokens: Int32[np.ndarray, " n"]
    """All of the request's, as far as they count: up to and without the end-of-text token that
    ended it."""
    new: Int32[np.ndarray, " m"]
    """Those from its first mask to its last."""
    ended: bool
    """Whether an end-of-text token ended it."""
    steps: int
    """Denoising steps taken."""


@dataclass(frozen=True)
class Sampler:
    """A model that fills masks."""

    model: Transformer
    params: Params
    mask_id: int
    forbidden: Bool[np.ndarray, " vocab"]
    """Ids that are never sampled: the mask, and what no text stands for."""
    end_ids: tuple[int, ...] = ()
    """Ids that end an answer."""
    dtype: DTypeLike = jnp.float32
    read: Read = read
    """How logits are read: one's own rule gives each masked position a token, and a score by which
    the request's policy chooses what is filled (confidence: the highest; threshold: all above)."""

    def __post_init__(self):
        config = self.model.config
        require(
            not config.causal,
            f"a causal {config.family} predicts the next token and fills no masks; give a "
            "bidirectional model, such as one trained by preset llada-tiny",
        )
        require(
            self.forbidden.shape == (config.vocab_size,) and not self.forbidden.all(),
            f"forbidden has shape {self.forbidden.shape}, with {int(self.forbidden.sum())} set; "
            f"say of each of the {config.vocab_size} ids whether it may not be sampled",
        )
        require(
            0 <= self.mask_id < config.vocab_size and bool(self.forbidden[self.mask_id]),
            f"mask id {self.mask_id} must be in 0..{config.vocab_size - 1}, and forbidden, or a "
            "mask could be filled with itself",
        )

    def sample(
        self,
        requests: Sequence[Request],
        on_step: Callable[[Progress], None] | None = None,
        steps_a_call: int = 8,
    ) -> list[Answer]:
        """Fill the requests as one batch.

        `on_step` is called on the host after each `steps_a_call` steps, and at the end. ConfigError
        where the model cannot fill one of them.
        """
        require(requests, "there is no request to sample; give one")
        for request in requests:
            check(request, self.model.config, self.mask_id)
        canvas, rules, width = self.batch(requests)
        guided = any(r.sampling.guidance for r in requests)
        while True:
            canvas = self.run(canvas, rules, steps_a_call, width, guided)
            progress = self.progress(canvas, rules, len(requests))
            if on_step:
                on_step(progress)
            require_numbers(np.asarray(canvas.broken))
            if progress.done.all():
                steps = np.asarray(canvas.steps)
                return [
                    self.make_answer(request, tokens[: len(request.tokens)], int(taken))
                    for request, tokens, taken in zip(
                        requests, progress.tokens, steps, strict=False
                    )
                ]

    def batch(self, requests: Sequence[Request]) -> tuple[Canvas, Rules, int]:
        """Their state in buckets, on the device, and the window that holds every block."""
        rows = power_of_two(len(requests))
        longest = max(len(r.tokens) for r in requests)
        positions = max(-(-longest // _POSITION_BUCKET) * _POSITION_BUCKET, _FEWEST_POSITIONS)
        canvas, rules = begin(requests, self.mask_id, rows, positions)
        widest = int(np.minimum(rules.block_size, rules.end - rules.begin).max())
        return *jax.device_put((canvas, rules)), min(power_of_two(widest), positions)

    def run(self, canvas: Canvas, rules: Rules, steps: int, width: int, guided: bool) -> Canvas:
        """The state after up to `steps` steps, fewer where all rows are done before.

        `width`: positions of a window; `guided`: whether any row wants guidance, which takes the
        model twice.
        """
        return self._run(self.params, canvas, rules, steps, width=width, guided=guided)

    def progress(self, canvas: Canvas, rules: Rules, requests: int) -> Progress:
        """On the host, of the first `requests` rows."""
        tokens, done, begin, end = (
            np.asarray(x)[:requests] for x in (canvas.tokens, canvas.done, rules.begin, rules.end)
        )
        left = (tokens == self.mask_id) & (np.arange(tokens.shape[1]) >= begin[:, None])
        first = np.where(left.any(1), left.argmax(1), end)
        return Progress(tokens, first.astype(np.int32), done)

    @cached_property
    def _run(self):
        return jax.jit(self._steps, static_argnames=("width", "guided"))

    def _steps(self, params, canvas: Canvas, rules: Rules, steps, *, width: int, guided: bool):
        step = partial(self._step, params, rules, width, guided)

        def wanted(carry):
            i, canvas = carry
            return (i < steps) & ~jnp.all(canvas.done)

        return jax.lax.while_loop(wanted, lambda c: (c[0] + 1, step(c[1])), (0, canvas))[1]

    def _step(self, params, rules: Rules, width: int, guided: bool, canvas: Canvas) -> Canvas:
        seen = window(canvas, rules, self.mask_id, width)
        rows = rows_of(self._hidden(params, canvas.tokens, rules), seen.positions, self.model)
        blind = None
        if guided:
            # The prompt is masked, whatever of the canvas is filled stays.
            places = jnp.arange(canvas.tokens.shape[1])
            given = (places < rules.begin[:, None]) | (places >= rules.end[:, None])
            tokens = jnp.where(given, self.mask_id, canvas.tokens)
            blind = rows_of(self._hidden(params, tokens, rules), seen.positions, self.model)
        reading = read_window(
            self.model,
            params,
            rows,
            blind,
            seen,
            rules,
            canvas.steps,
            jnp.asarray(self.padded_forbidden),
            self.read,
        )
        return commit(canvas, rules, seen, reading, self.mask_id, jnp.asarray(self.padded_ends))

    def _hidden(self, params, tokens: Array, rules: Rules) -> Array:
        return hidden(self.model, params, tokens, rules.length, self.dtype)

    @cached_property
    def padded_forbidden(self) -> Bool[np.ndarray, " V"]:
        """`forbidden` of the padded vocabulary."""
        beyond = self.model.config.padded_vocab - self.model.config.vocab_size
        return np.pad(self.forbidden, (0, beyond), constant_values=True)

    @cached_property
    def padded_ends(self) -> Bool[np.ndarray, " V"]:
        """Whether an id of the padded vocabulary ends an answer."""
        return np.isin(np.arange(self.model.config.padded_vocab), self.end_ids)

    def make_answer(self, request: Request, tokens: Int32[np.ndarray, " n"], steps: int) -> Answer:
        """What `tokens`, the request's after the last step, say."""
        asked = masks(request, self.mask_id)
        first, last = (int(i) for i in np.flatnonzero(asked)[[0, -1]])
        stop = len(tokens)
        if request.ends and asked[first:].all():
            # Masks that were left after it are no tokens.
            over = np.isin(tokens[first:], [*self.end_ids, self.mask_id])
            stop = first + int(np.argmax(over)) if over.any() else stop
        ended = stop < len(tokens)
        return Answer(tokens[:stop], tokens[first : min(stop, last + 1)], ended, steps)


def require_numbers(broken: Bool[np.ndarray, " b"]) -> None:
    """RunError where the model gave a request logits that are no numbers."""
    if broken.any():
        raise RunError(
            f"request {int(np.argmax(broken))} of the batch: the model's logits are not finite; "
            "look at its weights, or compute in float32"
        )
