# SPDX-License-Identifier: Apache-2.0
"""Throughput under every policy of reuse, beside what counting operations says.

A model with random weights (512 wide, 12 layers; what it says does not matter here) fills a block
of 32 in 16 steps behind prefixes of 0.5, 0.7 and 0.9 of the request, everything compiled before.
All policies take turns in each round, in one process; ratios are of seconds over no reuse of the
same round. Predicted ratios count multiplications: of rows by weights, of queries by keys and
values, of the head, of the rows that requests have; beside them stand those of the rows that are
computed, which are padded to the shapes' buckets. The canvas is one block, so that `prefix` and
`dual` do the same.

`full` is also what a block-causal model of this size would do, whose prefixes do not depend on what
follows: the price of seeing both ways is the distance from it.

Resumable: what was measured lies in the folder, a file for each batch, share and length.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from rich.console import Console

from geojax.bench.denoising import shared_jobs
from geojax.bench.throughput_table import (
    BLOCK,
    STEPS,
    Point,
    Row,
    notes,
    plot_throughput,
    summary,
    table,
)
from geojax.bicache.depth import Depths
from geojax.bicache.engine import Engine, Sizes
from geojax.bicache.pages import PAGE, pages_of
from geojax.bicache.policy import Policy, get_policy
from geojax.bicache.shapes import page_bucket, suffix_bucket
from geojax.bicache.slot import Job
from geojax.config import require
from geojax.diffusion.request import SamplingConfig
from geojax.diffusion.sampler import Sampler
from geojax.models.config import TransformerConfig
from geojax.models.transformer import Transformer, init_params
from geojax.track.environment import machine, made_by
from geojax.track.metrics import NewFile, NewFolder, to_json, write_atomically

SHARES = (0.5, 0.7, 0.9)
_MASK = 8191
_HEADS = 8
POLICIES: tuple[tuple[str, int | None], ...] = (
    ("refresh", 1),
    ("refresh", 4),
    ("refresh", 16),
    ("full", None),
    ("prefix", None),
    ("dual", None),
    ("bicache", 1),
    ("bicache", 4),
    ("bicache", 16),
    ("bicache-dual", None),
)


@dataclass(frozen=True)
class ThroughputOptions:
    """Throughput under every policy of reuse, on a model with random weights. Resumable."""

    out: NewFolder = Path("runs/bench-throughput")
    """Folder of what was measured, of the picture and of throughput.json."""
    batches: tuple[int, ...] = (1, 4)
    """Requests at a time."""
    length: int = 512
    """Tokens of a request."""
    layers: int = 12
    """Of the model."""
    depth: int | None = None
    """Layers that prefixes are shared in; unset: half of them."""
    shares: tuple[float, ...] = SHARES
    """Of a request, its prefix."""
    dim: int = 512
    """Of the model."""
    rounds: int = 3
    """Of all policies in turn; one more comes first, which compiles."""
    json: NewFile | None = None
    """File for the figures; unset: throughput.json in the folder."""


def run_throughput(options: ThroughputOptions) -> list[Point]:
    """Measure what is missing; a table for each batch and share, one picture, figures as JSON."""
    require(options.rounds >= 1, f"rounds {options.rounds} must be at least 1")
    require(options.layers >= 2, f"layers {options.layers} must be at least 2, of which half share")
    require(
        all(b >= 1 for b in options.batches) and options.batches,
        f"batches {options.batches} must be numbers of requests, at least 1 each",
    )
    require(
        options.shares and all(0 < share < 1 for share in options.shares),
        f"shares {options.shares} must lie between 0 and 1, one at least",
    )
    depth = options.layers // 2 if options.depth is None else options.depth
    require(
        1 <= depth <= options.layers,
        f"depth {depth} must lie in 1..{options.layers}, the model's layers",
    )
    shortest = min(options.length - round(share * options.length) for share in options.shares)
    require(
        shortest > BLOCK,
        f"length {options.length} leaves {shortest} tokens beside the longest prefix, and {BLOCK} "
        f"are to be filled; use {10 * BLOCK + 10} or more",
    )
    require(
        options.dim >= 1 and options.dim % (2 * _HEADS) == 0,
        f"dim {options.dim} must be a multiple of {2 * _HEADS}: {_HEADS} heads of an even size; "
        f"use {max(round(options.dim / 2 / _HEADS), 1) * 2 * _HEADS}",
    )
    config = TransformerConfig(
        vocab_size=_MASK + 1,
        dim=options.dim,
        layers=options.layers,
        heads=_HEADS,
        kv_heads=_HEADS,
        mlp_dim=11 * options.dim // 4,
        bidirectional=True,
    )
    console = Console(highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    sampler = None
    points = []
    for batch in options.batches:
        for share in options.shares:
            name = f"batch{batch}-share{share}-length{options.length}-depth{depth}.json"
            path = options.out / name
            asked = (batch, share, options.length, depth, options.rounds, machine())
            point = _known(path, asked, config)
            if point is None:
                if sampler is None:
                    params = init_params(config, 0)
                    forbidden = np.arange(config.vocab_size) == _MASK
                    sampler = Sampler(Transformer(config), params, _MASK, forbidden)
                point = _measure(sampler, batch, share, depth, options)
                _write(path, asdict(point) | {"model": asdict(config)})
            console.print(table(point))
            for line in notes(point):
                console.print(line)
            points.append(point)
    console.print("All of them: over no reuse, and in percent of what the rows that run predict:")
    console.print(summary(points))
    console.print(f"Measured clock, {points[-1].machine}; random weights.")
    path = options.json or options.out / "throughput.json"
    facts = {"points": [asdict(p) for p in points]}
    _write(path, made_by("measured") | facts)
    plot_throughput(points, options.out / "throughput.png")
    console.print(f"wrote {path}, a picture in {options.out}", soft_wrap=True)
    return points


def _measure(
    sampler: Sampler, batch: int, share: float, depth: int, options: ThroughputOptions
) -> Point:
    config, length = sampler.model.config, options.length
    prefix = round(share * length)
    private = length - prefix - BLOCK
    settings = SamplingConfig(steps=STEPS, block=BLOCK)
    jobs = shared_jobs(_MASK, batch, prefix, private, BLOCK, settings)
    sizes, depths = Sizes(4e8, 4e7), Depths(((0.0, depth),))
    engines = {
        (name, every): Engine(sampler, get_policy(name, every), sizes, depths)
        for name, every in [("none", None), *POLICIES]
    }
    seconds: dict[tuple[str, int | None], list[float]] = {key: [] for key in engines}
    builds = []
    for number in range(options.rounds + 1):
        for key, engine in engines.items():
            started = time.perf_counter()
            engine.answer(jobs)
            if number:  # the first compiles, and builds the prefix
                seconds[key].append(time.perf_counter() - started)
        seconds_of_build = _build_seconds(engines["bicache", 1], jobs[0])
        if number:
            builds.append(seconds_of_build)
    plain = seconds["none", None]
    none, *counted = (
        [
            operations(get_policy(name, every), config, depth, prefix, private, padded)
            for padded in (False, True)
        ]
        for name, every in (("none", None), *POLICIES)
    )
    rows = []
    for (name, every), mine in zip(POLICIES, counted, strict=True):
        ratios = [a / b for a, b in zip(plain, seconds[name, every], strict=True)]
        found = (median(ratios), min(ratios), max(ratios))
        rows.append(Row(batch, share, name, every, *found, none[0] / mine[0], none[1] / mine[1]))
    pairs = zip(seconds["refresh", 1], seconds["bicache", 1], strict=True)
    saved = median(own - shared for own, shared in pairs)
    return Point(
        batch,
        share,
        length,
        depth,
        options.rounds,
        median(plain),
        median(builds),
        saved / (STEPS * batch),
        machine(),
        tuple(rows),
    )


def _build_seconds(engine: Engine, job: Job) -> float:
    """Of a prefix that was stored before, so that its program is compiled."""
    engine.store.purge()
    started = time.perf_counter()
    engine.pin(job)
    jax.block_until_ready(engine.memory.pool)
    seconds = time.perf_counter() - started
    engine.pin(job, False)
    return seconds


def operations(
    policy: Policy,
    config: TransformerConfig,
    depth: int,
    prefix: int,
    private: int,
    padded: bool = False,
) -> float:
    """Multiplications of one request's steps; a prefix is shared in `depth` layers. `padded`: of
    all rows that are computed."""
    layers, length = config.layers, prefix + private + BLOCK
    a_row = 4 * config.dim**2 + 3 * config.dim * config.mlp_dim
    depth = layers if policy.whole else depth if policy.shared else 0
    if policy.name == "none":
        prefix, private = 0, prefix + private
    suffix = private + BLOCK
    if padded:
        prefix = PAGE * page_bucket(pages_of(prefix, PAGE))
        suffix = suffix_bucket(suffix)
        length = prefix + suffix
    window = {"suffix": suffix, "rest": BLOCK, "block": BLOCK}[policy.window]
    total = 0.0
    for step in range(STEPS):
        refresh = step == 0 or (policy.every and step % policy.every == 0)
        own = suffix if refresh else window
        again = prefix * (layers - depth) if refresh else 0  # row-layers
        total += (own * layers + again) * (a_row + 2 * length * config.dim)
        masks = BLOCK - step * BLOCK // STEPS
        total += max(masks, 1) * config.dim * config.padded_vocab
    return total


def _known(path: Path, asked: tuple[Any, ...], config: TransformerConfig) -> Point | None:
    """What was measured before, with the same options on this machine; what cannot be read, or is
    of another form, is measured again."""
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        model = content.pop("model")
        point = Point(**content | {"rows": tuple(Row(**r) for r in content["rows"])})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if model != to_json(asdict(config)):
        return None
    same = (point.batch, point.share, point.length, point.depth, point.rounds, point.machine)
    return point if same == asked else None


def _write(path: Path, content: dict[str, Any] | Sequence[Any]) -> None:
    write_atomically(path, json.dumps(to_json(content), indent=2) + "\n")
