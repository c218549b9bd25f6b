# SPDX-License-Identifier: Apache-2.0
"""geojax models for lm-eval (Gao et al.), which knows many tasks and fetches their data itself.

Importing this registers the model `geojax`; `python -m geojax.choice.harness` is lm-eval's own
command with it. Needs the extra `lm-eval`.
"""

from collections.abc import Sequence
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np

from geojax.choice.load import load_subject
from geojax.choice.pairs import Pair, windows
from geojax.choice.rows import BATCH_TOKENS
from geojax.config import ConfigError
from geojax.diffusion.request import SamplingConfig, prompt

try:
    from lm_eval.api.model import LM  # pyrefly: ignore[missing-import]
    from lm_eval.api.registry import register_model  # pyrefly: ignore[missing-import]
except ImportError:
    raise ConfigError("geojax.choice.harness needs lm-eval; install geojax[lm-eval]") from None

NEW_TOKENS = 256  # where a task says nothing
WINDOW = 2048  # tokens of a rolling window, of a model without a context


@register_model("geojax")
class GeojaxLM(LM):
    """The model in `folder`, a run's or one of converted weights.

    `samples` are masks of each continuation of a diffusion model (0: 32), whose log-likelihoods are
    bounds; `batch_size` is how many texts are generated at once.
    """

    def __init__(
        self,
        folder: str,
        dtype: str = "float32",
        samples: int = 0,
        batch_tokens: int = BATCH_TOKENS,
        batch_size: int | str = 1,
    ):
        super().__init__()
        self._subject = load_subject(Path(folder), dtype)
        self._score = self._subject.likelihood(samples, batch_tokens)
        self._at_once = int(batch_size)

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        pairs = self._subject.pairs([request.args for request in requests])
        return [(found.log, found.greedy) for found in self._score(pairs)]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Each token once, in windows that are as long as the model can take."""
        config = self._subject.config
        most = (config.context or WINDOW) - (not config.causal)
        texts = self._subject.tokenizer.encode_batch([request.args[0] for request in requests])
        pairs: list[Pair] = []
        owners: list[int] = []
        for i, ids in enumerate(texts):
            own = windows(ids, self._subject.empty, most)
            pairs += own
            owners += [i] * len(own)
        logs = np.zeros(len(texts))
        for i, found in zip(owners, self._score(pairs), strict=True):
            logs[i] += found.log
        return logs.tolist()

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What a diffusion model fills in, up to a stop text, greedily but for a temperature; each
        request has a seed of its own, its number."""
        model = self._subject.diffusion
        if model is None:
            raise ConfigError(
                f"a causal {self._subject.config.family} writes no text here yet; choose tasks of "
                "log-likelihoods, or a diffusion model"
            )
        sampler = model.sampler()
        texts = []
        for group in batched(enumerate(requests), self._at_once):
            asked = [self._request(*request.args[:2], seed=seed) for seed, request in group]
            for answer, (_, request) in zip(sampler.sample(asked), group, strict=True):
                text = model.decode(answer.new)
                for stop in _stops(request.args[1]):
                    text = text.split(stop, 1)[0]
                texts.append(text)
        return texts

    def _request(self, context: str, how: dict[str, Any], seed: int):
        model = self._subject.diffusion
        assert model is not None, "generate_until refuses others"
        new = int(how.get("max_gen_toks") or NEW_TOKENS)
        ids = model.encode(context)
        if model.config.context:
            new = min(new, model.config.context - 1)
            ids = ids[max(len(ids) + new - model.config.context, 0) :]
        temperature = float(how.get("temperature") or 0) if how.get("do_sample", True) else 0.0
        first = [] if len(ids) else [self._subject.empty]
        sampling = SamplingConfig(temperature=temperature, seed=seed)
        return prompt([*first, *ids.tolist()], new, model.mask_id, sampling)


def _stops(how: dict[str, Any]) -> list[str]:
    until = how.get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # pyrefly: ignore[missing-import]

    cli_evaluate()
