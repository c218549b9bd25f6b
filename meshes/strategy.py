# SPDX-License-Identifier: Apache-2.0
"""Strategies: how one training step is laid over devices, which of them are legal, and why others
are not.

Invariant: `problems` knows every constraint; a strategy without problems compiles and computes what
one device would. Importable without JAX.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, cast

from geojax.models.config import TransformerConfig

Remat = Literal["none", "matmuls", "full"]
Sharding = Literal["none", "optimizer", "all"]

_UNSHARDED: Sequence[Sharding] = ("none",)
_SHORT = {"dp": "dp", "tp": "tp", "pp": "pp", "micro_batch": "mb", "global_batch": "gb"}
_TEXT = re.compile(
    r"dp(\d+)-tp(\d+)-pp(\d+)(?:x(\d+))?-mb(\d+)-gb(\d+)(?:-(zero|fsdp))?(?:-(matmuls|full))?"
)


@dataclass(frozen=True, order=True)
class Strategy:
    """One point of the space that planners search.

    Data parallelism x tensor parallelism (Shoeybi et al. 2019, "Megatron-LM") x pipeline
    parallelism (Huang et al. 2019, "GPipe"; Narayanan et al. 2021 for interleaved stages), on
    dp * tp * pp devices.
    """

    dp: int
    """Copies of the model, each with its share of the batch."""
    tp: int
    """Devices that share every layer's heads, MLP width and vocabulary."""
    pp: int
    """Pipeline stages, each with its share of the layers."""
    micro_batch: int
    """Sequences that one copy computes at once."""
    global_batch: int
    """Sequences a step."""
    interleave: int = 1
    """Chunks of layers a stage: 1 is GPipe; more shorten the bubble by that factor."""
    remat: Remat = "none"
    """What the backward pass computes again: nothing, all but matrix products, or whole layers."""
    sharding: Sharding = "none"
    """What is also spread over dp: nothing; optimizer state (ZeRO-1); parameters and gradients too
    (FSDP). Rajbhandari et al. 2019, "ZeRO"."""

    def __post_init__(self):
        for name in (*_SHORT, "interleave"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"strategy {name} {value!r} must be a whole number, at least 1")
        if self.remat not in ("none", "matmuls", "full"):
            raise ValueError(f"strategy remat {self.remat!r}; use none, matmuls or full")
        if self.sharding not in ("none", "optimizer", "all"):
            raise ValueError(f"strategy sharding {self.sharding!r}; use none, optimizer or all")

    def __str__(self) -> str:
        """Such as dp2-tp2-pp2-mb1-gb16, dp2-tp1-pp4x2-mb1-gb16-fsdp-full."""
        stages = f"pp{self.pp}" + (f"x{self.interleave}" if self.interleave > 1 else "")
        parts = [f"dp{self.dp}-tp{self.tp}-{stages}-mb{self.micro_batch}-gb{self.global_batch}"]
        if self.sharding != "none":
            parts.append({"optimizer": "zero", "all": "fsdp"}[self.sharding])
        if self.remat != "none":
            parts.append(self.remat)
        return "-".join(parts)

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step and copy of the model; whole where the strategy is legal."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage waits for others (Narayanan et al. 2021)."""
        ticks = self.micro_batches * self.interleave + self.pp - 1
        return (self.pp - 1) / ticks


def parse_strategy(text: str) -> Strategy:
    """The strategy that `str` wrote so; ValueError with an example where there is none."""
    found = _TEXT.fullmatch(text.strip())
    if not found:
        raise ValueError(
            f"{text!r} is no strategy; write it like dp2-tp2-pp2-mb1-gb16, with pp2x3 for 3 chunks "
            "a stage, and -zero or -fsdp, -matmuls or -full at the end"
        )
    dp, tp, pp, interleave, micro, batch, sharding, remat = found.groups()
    kept: dict[str | None, Sharding] = {None: "none", "zero": "optimizer", "fsdp": "all"}
    return Strategy(
        int(dp),
        int(tp),
        int(pp),
        int(micro),
        int(batch),
        int(interleave or 1),
        cast(Remat, remat or "none"),
        kept[sharding],
    )


def problems(strategy: Strategy, model: TransformerConfig) -> list[str]:
    """Why `strategy` cannot train `model`, each with the nearest legal values; empty if it can."""
    s, found = strategy, []

    def divides(what: str, value: int, by: str, divisor: int, legal: Iterable[int]) -> None:
        if value % divisor:
            found.append(
                f"{what} {value} does not divide by {by} {divisor}; use {by} "
                f"{nearest(divisor, legal)}"
            )

    for what in ("heads", "kv_heads", "mlp_dim", "padded_vocab"):
        value = getattr(model, what)
        divides(f"model {what}", value, "tp", s.tp, _divisors(value))
    if model.layers % s.pp:
        divides("model layers", model.layers, "pp", s.pp, _divisors(model.layers))
    else:
        layers = model.layers // s.pp
        divides("layers a stage", layers, "interleave", s.interleave, _divisors(layers))
    rows = s.dp * s.micro_batch
    if s.global_batch % rows:
        legal = sorted({max(s.global_batch // rows, 1) * rows, (s.global_batch // rows + 1) * rows})
        found.append(
            f"global_batch {s.global_batch} does not divide by dp {s.dp} x micro_batch "
            f"{s.micro_batch}; use {' or '.join(map(str, legal))}"
        )
    elif s.micro_batches < s.pp:
        counts = {m: s.global_batch // (s.dp * m) for m in _divisors(s.global_batch // s.dp)}
        even = s.pp if s.interleave > 1 else 1
        legal = [m for m, n in counts.items() if n >= s.pp and n % even == 0]
        smaller = f" or micro_batch {legal[-1]}" if legal else ""
        found.append(
            f"{s.micro_batches} micro-batches are fewer than pp {s.pp} stages; use global_batch "
            f"{rows * s.pp}{smaller}"
        )
    elif s.interleave > 1 and s.micro_batches % s.pp:
        found.append(
            f"{s.micro_batches} micro-batches do not divide by pp {s.pp}, which interleaved stages "
            f"need; use global_batch {s.global_batch // (rows * s.pp) * rows * s.pp} or "
            f"{(s.global_batch // (rows * s.pp) + 1) * rows * s.pp}, or interleave 1"
        )
    if model.block and s.tp > 1:
        found.append(f"model.block {model.block!r} is layers of one's own, whole; use tp 1")
    if s.interleave > 1 and s.pp == 1:
        found.append(f"interleave {s.interleave} needs pp above 1; use interleave 1")
    if s.sharding != "none" and s.dp == 1:
        found.append(f"sharding {s.sharding!r} needs dp above 1; use sharding 'none'")
    return found


def require_legal(strategy: Strategy, model: TransformerConfig, devices: int | None = None) -> None:
    """ValueError with everything that is wrong, `devices` being those there are."""
    found = problems(strategy, model)
    if devices is not None and strategy.devices != devices:
        copies, rest = divmod(devices, strategy.tp * strategy.pp)
        fix = f"choose factors whose product is {devices}" if rest else f"use dp {copies}"
        found.insert(
            0,
            f"dp {strategy.dp} x tp {strategy.tp} x pp {strategy.pp} wants {strategy.devices} "
            f"devices, and there are {devices}; {fix}",
        )
    if found:
        raise ValueError(f"strategy {strategy}: " + "; and ".join(found))


@dataclass(frozen=True)
class Enumeration:
    """All candidates, parted."""

    legal: tuple[Strategy, ...]
    excluded: tuple[tuple[Strategy, str], ...]
    """With the reason of each."""


def enumerate_strategies(
    model: TransformerConfig,
    devices: int,
    global_batches: Sequence[int],
    micro_batches: Sequence[int] = (1, 2, 4, 8, 16),
    interleaves: Sequence[int] = (1,),
    remats: Sequence[Remat] = ("none",),
    shardings: Sequence[Sharding] = ("none",),
    also: Callable[[Strategy], str | None] = lambda strategy: None,
) -> Enumeration:
    """Every strategy of `model` on `devices`, in a fixed order.

    `also`: a further reason to exclude, such as tensor parallelism between nodes. Choices that mean
    nothing (interleave without stages, sharding without copies) are not listed as candidates.
    """
    legal, excluded = [], []
    for tp in _divisors(devices):
        for pp in _divisors(devices // tp):
            dp = devices // (tp * pp)
            for batch in global_batches:
                for micro in micro_batches:
                    base = Strategy(dp, tp, pp, micro, batch)
                    for interleave in interleaves if pp > 1 else (1,):
                        for sharding in shardings if dp > 1 else _UNSHARDED:
                            for remat in remats:
                                s = replace(
                                    base, interleave=interleave, sharding=sharding, remat=remat
                                )
                                reason = "; and ".join(problems(s, model)) or also(s)
                                if reason:
                                    excluded.append((s, reason))
                                else:
                                    legal.append(s)
    return Enumeration(tuple(legal), tuple(excluded))


def nearest(value: int, legal: Iterable[int]) -> str:
    """The legal values next to `value`, as '4' or '4 or 8'."""
    below = [x for x in legal if x <= value]
    above = [x for x in legal if x > value]
    return " or ".join(str(x) for x in [*below[-1:], *above[:1]])


@cache  # a vocabulary takes a millisecond, and each of thousands of strategies asks
def _divisors(value: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, value + 1) if value % d == 0)
