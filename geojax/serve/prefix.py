# SPDX-License-Identifier: Apache-2.0
"""Which part of a prompt is built as a shared prefix.

What a client marks, or the messages of a conversation, are segments as they are. Of any other
prompt, the part that was seen before is; and of what is new, pages that double in number, so that
whatever request comes next finds the longest of them that it has in common with this one.

Invariant: what is chosen depends on requests of the same salt alone.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from geojax.bicache.engine import Engine
from geojax.diffusion.request import Request


def segments_of(
    engine: Engine, request: Request, salt: str, ends: Sequence[int] | None
) -> tuple[int, ...]:
    """Tokens of each segment; () where nothing is shared. `ends`: as in Ask.prefix_ends.

    ConfigError where `ends` are not within the prompt.
    """
    if ends is not None:
        return engine.segments(request, salt, ends) if ends else ()
    if engine.policy.name == "none" or engine.builder != "prefix":
        return ()
    found = engine.segments(request, salt)
    known = sum(found)
    prompt = _prompt(engine, request)
    if len(found) == 1 and engine.policy.shared:
        # A longer prefix than is stored: what is stored stays a part of it.
        stored = [n for n in engine.store.longest(prompt, salt, engine.builder) if n < known]
        found = tuple(np.diff([0, *stored, known]).tolist())
    ends = list(np.cumsum(found))
    while (end := max(2 * (ends[-1] if ends else 0), engine.page)) <= len(prompt):
        ends.append(end)
    return tuple(np.diff([0, *ends]).tolist())


def _prompt(engine: Engine, request: Request) -> Int32[np.ndarray, " n"]:
    """What of the request a prefix may hold."""
    tokens = np.asarray(request.tokens, np.int32)
    first = int((tokens == engine.sampler.mask_id).argmax())
    return tokens[: max(first - engine.sampler.model.config.shifted, 0)]
