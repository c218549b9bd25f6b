# SPDX-License-Identifier: Apache-2.0
"""Random walks through the space of run configs, made from the types of their fields.

A walk starts at a preset of a few layers and changes some fields of one part at a time, to whatever
their type allows. A change that is refused ends up among the refusals, any other is taken: so every
walk ends at a config that exists, and leaves refusals on its way.
"""

import dataclasses
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from geojax.config import BalanceConfig, RunConfig, SliceConfig
from geojax.configs import PRESETS
from geojax.models.config import MODELS

BASES = (
    "quickstart",
    "demo-geomesh",
    "demo-int8",
    "demo-data-parallel",
    "demo-halos",
    "demo-streaming-diloco",
    "llama-tiny",
    "gpt-tiny",
    "bert-tiny",
    "llada-tiny",
    "dream-tiny",
    "dlm-tasks",
    "cona-gpt-tiny",
    "cona-bert-tiny",
)
_STRATEGIES = [
    "dp1-tp1-pp1-mb4-gb8",
    "dp2-tp1-pp1-mb2-gb8-zero",
    "dp2-tp2-pp1-mb1-gb8-fsdp",
    "dp1-tp2-pp2-mb2-gb8",
    "dp2-tp1-pp2x2-mb1-gb8-full",
    "dp1-tp3-pp1-mb4-gb8-matmuls",
    "dp8-tp1-pp1-mb1-gb16",
    "dp0-tp1-pp1-mb1-gb1",
    "fast",
]
_NAMES = {  # texts that mean something, by the field's name
    "name": ["run", "a", "b", "../up", ""],
    "strategy": [*_STRATEGIES, ""],
    "start": [*_STRATEGIES, ""],
    "gpu": ["", "h100", "l40s", "h1", "a100-80gb"],
    "wan": ["", "geomesh-azure", "geomesh-azure-no-latency", "none.csv"],
    "region": ["", "eastus", "westus2", "mars"],
    "model": ["", "llama-tiny", "gpt-tiny", "lama"],
    "bind": ["127.0.0.1", "0.0.0.0", ""],
    "coordinator": ["", "auto", "host:1", "host"],
    "interface": ["", "eth0", "=x"],
    "function": ["", "mine.py:make", "optax:make", "mine"],
    "block": ["", "mine.py:Block", "?"],
}
_NUMBERS = [0, 1, 2, 3, 4, 6, 8, 16, -1]
_LARGE = {"vocab_size": [257, 258, 512, 600], "total_tokens": [1, 1000], "context": [0, 64, 256]}
_SHARES = [0.0, 0.1, 0.5, 0.9, 1.0, 2.0, 16.0, -0.5, math.inf, math.nan]


@dataclass
class Walk:
    """Where a walk ended, and what was refused on the way."""

    config: RunConfig
    refused: list[tuple[str, Exception]] = field(default_factory=list)
    """What was changed, and what came of it."""


@st.composite
def walks(draw, most_changes: int = 12, bases: tuple[str, ...] = BASES) -> Walk:
    walk = Walk(PRESETS[draw(st.sampled_from(bases))].make())
    for _ in range(draw(st.integers(1, most_changes))):
        places = list(parts(walk.config))
        place, part = draw(st.sampled_from(places))
        changes = draw(changed_fields(part))
        said = f"{'.'.join(map(str, place)) or 'run'}: {changes}"
        try:
            walk.config = put(walk.config, place, changes)
        except ValueError as error:  # ConfigError is one; anything else is what tests look for
            walk.refused.append((said, error))
    return walk


def parts(value: Any, place: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Every dataclass in `value`, itself first, and where it stands."""
    if is_dataclass(value):
        yield place, value
        for f in fields(value):
            yield from parts(getattr(value, f.name), (*place, f.name))
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from parts(item, (*place, number))


def put(value: Any, place: tuple, changes: dict[str, Any]) -> Any:
    """`value` with changes to the part at `place`."""
    if not place:
        return replace(value, **changes)
    first, *rest = place
    if isinstance(value, tuple):
        new = put(value[first], tuple(rest), changes)
        return (*value[:first], new, *value[first + 1 :])
    return replace(value, **{first: put(getattr(value, first), tuple(rest), changes)})


@st.composite
def changed_fields(draw, part: Any) -> dict[str, Any]:
    """One to three of a part's fields, each with a value of its type."""
    hints = get_type_hints(type(part))
    known = st.sampled_from(sorted(f.name for f in fields(part)))
    names = draw(st.lists(known, min_size=1, max_size=3, unique=True))
    return {name: draw(values(hints[name], name)) for name in names}


def values(kind: Any, name: str) -> st.SearchStrategy:
    """Values of a type, good ones and others."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, types.UnionType):
        return st.one_of(*(values(a, name) for a in args))
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(values(args[0], name), max_size=3).map(tuple)
        return st.tuples(*(values(a, name) for a in args))
    if kind is type(None):
        return st.none()
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.sampled_from([*_LARGE.get(name, ()), *_NUMBERS])
    if kind is float:
        return st.sampled_from(_SHARES)
    if kind is str:
        return st.sampled_from(_NAMES.get(name, ["", "x"]))
    assert is_dataclass(kind), kind
    return made(kind)


def made(kind: Any) -> st.SearchStrategy:
    """Instances of a part that can be made, by what it wants and its defaults."""
    if kind is SliceConfig:
        names = st.sampled_from(["a", "b", "c"])
        return st.builds(SliceConfig, names, region=st.sampled_from(["", "eastus", "westus2"]))
    if kind is BalanceConfig:
        steps, batches = st.sampled_from([1, 2, 5]), st.sampled_from([(4,), (8, 4), (16,)])
        return st.builds(BalanceConfig, inner_steps=steps, batch_sizes=batches)
    if name := _PRESET_MODELS.get(kind.__name__):
        return st.sampled_from([MODELS[n] for n in name])
    hints = get_type_hints(kind)
    wanted = {
        f.name: values(hints[f.name], f.name)
        for f in fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    return st.builds(_or_none, st.just(kind), st.fixed_dictionaries(wanted)).filter(
        lambda found: found is not None
    )


_PRESET_MODELS = {"TransformerConfig": ("llama-tiny", "gpt-tiny", "bert-tiny", "llada-tiny")}


def _or_none(kind: Any, settings: dict[str, Any]) -> Any:
    try:
        return kind(**settings)
    except ValueError:
        return None
