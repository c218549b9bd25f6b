# SPDX-License-Identifier: Apache-2.0
"""One answer that is wanted: what was asked, and what is certain of it so far.

Invariant: the engine's thread alone replaces `view`, whole; the event loop reads it, and may set
`gone`, after which nothing more is computed for it. A reader that is slow finds the newest view, so
nothing piles up.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from geojax.bicache.engine import Job
from geojax.diffusion.request import Request, SamplingConfig
from geojax.serve.errors import ApiError
from geojax.serve.tenants import Tenant

_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Ask:
    """One answer to one prompt."""

    prompt: Int32[np.ndarray, " p"]
    sampling: SamplingConfig
    """Steps are those of all canvases."""
    tokens: int
    """Most new ones."""
    canvas: int
    """Masks at once."""
    suffix: Int32[np.ndarray, " s"] = field(default_factory=lambda: _NONE)
    """What follows the answer; then it has one canvas."""
    ends: bool = True
    """Whether an end-of-text token ends it."""
    prefix_ends: tuple[int, ...] | None = None
    """Where segments of the shared prefix end; (): nothing is shared; None: as may be found."""
    exact: bool = False
    priority: int = 0
    """Lower ones first, within a tenant."""
    watched: bool = False
    """Whether somebody looks at each step."""


class View(NamedTuple):
    """What is known of an answer."""

    tokens: Int32[np.ndarray, " n"] = _NONE
    """New ones from the first on that never change again."""
    canvas: Int32[np.ndarray, " m"] = _NONE
    """The present canvas with its masks, after `tokens` of canvases before."""
    before: int = 0
    """How many those are."""
    steps: int = 0
    """Denoising steps taken."""
    finish: str | None = None
    """stop, length, or None: more comes."""
    error: ApiError | None = None

    @property
    def over(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass(eq=False)
class Ticket:
    ask: Ask
    tenant: Tenant
    arrived: float
    """Seconds of time.monotonic; as are all that follow."""
    deadline: float
    wake: Callable[[], object]
    """Called by the engine's thread after each change of `view`."""
    view: View = View()
    gone: bool = False
    """Nobody wants it any more."""
    admitted: float | None = None
    blocked: float | None = None
    """Since when memory is too small for it."""
    segments: tuple[int, ...] | None = None
    """Of its prefix, once it was admitted."""
    built: int = 0
    """Tokens of prefixes that were built for it, also where it was not admitted then."""
    cached: int = 0
    """Tokens of its prefix that were stored before it came."""
    steps: int = 0
    """Denoising steps of canvases that are full."""
    depth: int = 0
    """Layers in which its prefix is shared."""

    def show(self, view: View) -> None:
        """What is known now."""
        self.view = view
        try:
            self.wake()
        except RuntimeError:  # its event loop has ended
            self.gone = True

    def end(
        self,
        finish: str | None = None,
        error: ApiError | None = None,
        view: View | None = None,
    ) -> None:
        """Neither `finish` nor `error`: nobody wants it any more."""
        if finish is None and error is None:
            finish = "abort"
        self.show((view or self.view)._replace(finish=finish, error=error))

    @property
    def prefix(self) -> int:
        return sum(self.segments or ())

    def request(self, mask_id: int) -> Request:
        """For the next canvas, after what is there."""
        ask = self.ask
        masks = np.full(self._size, mask_id, np.int32)
        return Request(
            np.concatenate([ask.prompt, self.view.tokens, masks, ask.suffix]),
            replace(ask.sampling, steps=self._steps),
            ask.ends and not len(ask.suffix),
        )

    def job(self, mask_id: int) -> Job:
        request = self.request(mask_id)
        return Job(request, self.segments or (), self.tenant.salt, self.ask.exact)

    @property
    def cost(self) -> float:
        """Rows times steps of its next canvas: what it takes from others."""
        ask = self.ask
        rows = len(ask.prompt) + len(self.view.tokens) + self._size + len(ask.suffix)
        return float(rows * (self._steps or self._size))

    @property
    def _size(self) -> int:
        """Masks of its next canvas; before a suffix there is only one."""
        ask = self.ask
        left = ask.tokens - len(self.view.tokens)
        return left if len(ask.suffix) else min(ask.canvas, left)

    @property
    def _steps(self) -> int:
        """Of its next canvas; 0: one for each mask. Up to the end of each canvas the answer has had
        its share of them, rounded down, and each has one at least."""
        steps, tokens = self.ask.sampling.steps, self.ask.tokens
        begin = len(self.view.tokens)
        share = steps * (begin + self._size) // tokens - steps * begin // tokens
        return max(share, 1) if steps else 0
