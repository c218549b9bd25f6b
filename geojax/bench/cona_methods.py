# SPDX-License-Identifier: Apache-2.0
"""The runs that the experiment on CONA compares, as settings of one config.

Invariant: all of a model and a seed see the same sequences in the same order, follow the same
schedule by tokens and the same table of learning rates by batch, and are timed by the same clock;
only who says which strategy is in force differs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from geojax.cona.rules import rate_factor
from geojax.cona.score import Leg, Option, envelope, fastest, predict_chain
from geojax.config import ChainLeg, EvalConfig, RunConfig, ScalingConfig, with_chain, with_seed
from geojax.configs.cona import cona_bench
from geojax.train.steering import candidates

MODELS = {"gpt": "gpt-tiny", "bert": "bert-tiny", "llama": "llama-tiny"}
TUNE_SHARE = 0.4
"""Length of a run of the search for learning rates, over that of the runs compared."""
_FIRST_FACTORS = (0.5, 1.0, 2.0)  # around the square root of the batch over the base batch
_MOST_FACTORS = 6
_ROUND_SEQUENCES = 256  # of a fixed strategy, whose rounds decide nothing: few enough to evaluate


type Decay = Literal["cosine", "linear", "constant"]


class Setting(NamedTuple):
    """A model of the experiment."""

    name: str
    config: RunConfig
    """Of its run by CONA, seed 0; before tuning, without the table."""
    options: tuple[Option, ...]
    """The fastest strategy of each batch of the ladder on the clock's cluster."""

    @property
    def line(self) -> list[tuple[float, Option]]:
        """Those that are ever best, with the noise from which on they are."""
        return envelope(self.options)

    @property
    def total_samples(self) -> int:
        return -(-self.config.train.total_tokens // self.config.data.seq_len)


def setting(name: str, config: RunConfig | None = None) -> Setting:
    """The model of that name; `config`: another run by CONA under the modelled clock in its
    place."""
    config = config or cona_bench(MODELS[name])
    found = candidates(config, ())  # the clock's cluster, whatever is here
    pairs = [Option(str(c.strategy), c.strategy.global_batch, c.step_seconds) for c in found]
    return Setting(name, config, tuple(fastest(pairs)))


def with_decay(base: Setting, decay: Decay) -> Setting:
    """With that learning rate after the warm-up; constant: at its peak to the end."""
    train = base.config.train
    schedule = replace(
        train.schedule,
        decay=decay,
        final_fraction=1.0 if decay == "constant" else train.schedule.final_fraction,
    )
    config = replace(base.config, train=replace(train, schedule=schedule))
    return base._replace(config=config)


def tuned(base: Setting, rates: Mapping[int, float]) -> Setting:
    """With the best learning rates by batch."""
    assert base.config.scaling, "every config by cona scales"
    peak = base.config.train.optimizer.learning_rate
    table = tuple((batch, rates[batch] / peak) for batch in sorted(rates))
    scaling = ScalingConfig(base.config.scaling.base_batch, "table", table=table)
    return base._replace(config=replace(base.config, scaling=scaling))


def tuned_rates(base: Setting) -> dict[int, float]:
    """Learning rate by batch of the ladder; empty before tuning."""
    scaling, peak = base.config.scaling, base.config.train.optimizer.learning_rate
    if scaling is None or scaling.rule != "table":
        return {}
    rule = scaling.rate_rule()  # a table does not look at the noise
    return {o.batch: peak * rate_factor(rule, o.batch, 0.0) for o in base.options}


def tune_config(base: Setting, batch: int, rate: float) -> RunConfig:
    """A run of the search: shorter, on held-out sequences that no reported figure looks at."""
    config = by_option(tuned(base, {batch: rate}), _option(base, batch), 0)
    shown = config.eval
    return replace(
        config,
        name=f"tune-gb{batch}-rate{rate:.3g}",
        train=replace(config.train, total_tokens=round(TUNE_SHARE * config.train.total_tokens)),
        eval=EvalConfig(sequences=shown.sequences, first=shown.sequences, batch=shown.batch),
        noise=None,
    )


def next_rates(base: Setting, batch: int, losses: Mapping[float, float]) -> list[float]:
    """Learning rates that are still to be tried: the first three, then a factor of 2 beyond the
    best while that has none on a side; none when the best lies between two."""
    assert base.config.scaling, "every config by cona scales"
    middle = base.config.train.optimizer.learning_rate
    middle *= math.sqrt(batch / base.config.scaling.base_batch)
    if not losses:
        return [factor * middle for factor in _FIRST_FACTORS]
    rates = sorted(losses)
    best = min(rates, key=lambda rate: (losses[rate], rate))
    if len(rates) >= _MOST_FACTORS or best not in (rates[0], rates[-1]):
        return []
    return [best / 2 if best == rates[0] else best * 2]


def by_option(base: Setting, option: Option, seed: int) -> RunConfig:
    """One strategy all along; the curve of every other of the same batch."""
    steps = max(_ROUND_SEQUENCES // option.batch, 1)
    config = replace(
        base.config,
        name=f"gb{option.batch}",
        train=replace(base.config.train, round_steps=steps),
        cona=None,
        strategy=option.name,
    )
    return with_seed(config, seed)


def by_cona(base: Setting, seed: int) -> RunConfig:
    return with_seed(base.config, seed)


def by_goodput(base: Setting, seed: int) -> RunConfig:
    """As Pollux: throughput times statistical efficiency, which is CONA's score, over the batches
    of data parallelism alone."""
    assert base.config.cona, "a setting's config is CONA's"
    config = replace(base.config, name="goodput-dp", cona=replace(base.config.cona, layouts="dp"))
    return with_seed(config, seed)


def by_hand(base: Setting, seed: int) -> RunConfig:
    """A batch warm-up by a rule that was fixed beforehand: from the smallest batch of the ladder it
    doubles, or takes the next larger one, at equal shares of the tokens, up to the largest."""
    stages = [base.options[0]]
    for option in base.options:
        if option.batch >= 2 * stages[-1].batch:
            stages.append(option)
    total = base.config.train.total_tokens
    legs = [ChainLeg(i * total // len(stages), o.name) for i, o in enumerate(stages)]
    return _chain(base, "warm-up", legs, seed)


def predicted_legs(base: Setting, noise: Callable[[float], float]) -> list[Leg]:
    """The chain that would have been predicted, had the noise been known by samples."""
    assert base.config.scaling, "every config by cona scales"
    rule, switch_seconds = base.config.scaling.rate_rule(), base.config.clock.switch_seconds
    return predict_chain(base.options, noise, base.total_samples, rule, switch_seconds)


def by_prediction(base: Setting, legs: Sequence[Leg], seed: int) -> RunConfig:
    seq_len = base.config.data.seq_len
    return _chain(
        base,
        "predicted",
        [ChainLeg(leg.begin_sample * seq_len, leg.option.name) for leg in legs],
        seed,
    )


def _chain(base: Setting, name: str, legs: Sequence[ChainLeg], seed: int) -> RunConfig:
    return with_seed(replace(with_chain(base.config, tuple(legs)), name=name), seed)


def _option(base: Setting, batch: int) -> Option:
    return next(option for option in base.options if option.batch == batch)
