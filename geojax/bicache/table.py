# SPDX-License-Identifier: Apache-2.0
"""`geojax profile depth`: profiles of a model, the table of depths that follows, as a file.

Invariant: a table names the weights and the builder that it was made with, and is refused for
others; it names the kinds of prefixes that it covers, and an engine warns of others.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import tyro
from jaxtyping import Int, Int32
from rich.console import Console

from geojax.bicache.depth import Covered, Depths, Guard, ShareProfile
from geojax.bicache.depth_report import depth_lines, depth_table, plot_profiles
from geojax.bicache.profile import by_cosine, by_output, doubling, profile_share, worst_of
from geojax.bicache.store import Builder
from geojax.config import ConfigError, DataConfig, SourceConfig, TokenizerConfig, require
from geojax.data import both_splits, prepare, tasks
from geojax.diffusion.exact import is_of_tasks
from geojax.diffusion.load import Model, load
from geojax.models.transformer import Transformer
from geojax.models.weights.special import TOKENIZER
from geojax.track.environment import machine
from geojax.track.metrics import NewFile, to_json, write_atomically

_BOUNDS = {"cosine": 0.97, "output": 0.05}
_MARGIN = 1.5  # of a guard's bound over what 99 of 100 profiled requests do not exceed


@dataclass(frozen=True)
class DepthOptions:
    """How deep prefixes of a model may be shared."""

    model: tyro.conf.Positional[Path]
    """Folder of a diffusion run, or of weights that `geojax convert` wrote."""
    out: NewFile = Path("depths.json")
    """File for the table; a picture goes beside it."""
    shares: tuple[float, ...] = (0.5, 0.7, 0.9)
    """Of the prefix in a request."""
    length: int = 128
    """Tokens of a request."""
    count: int = 64
    """Requests of each share; of tasks as many of each, and the worst of them counts."""
    criterion: Literal["cosine", "output"] = "output"
    """cosine: of keys and values, as published; output: of what the model predicts."""
    least_cosine: float | None = None
    """cosine: every layer's below the depth; unset: 0.97."""
    most_kl: float | None = None
    """output: the 95th percentile of the divergence of predictions, in nats, under the share of
    masks where it is worst; unset: 0.05."""
    builder: Builder = "prefix"
    """prefix: keys and values of the prefix alone; canvas: with masks behind it."""
    segments: Covered = "both"
    """whole: prefixes built in one piece; chained: in segments that double in length, each after
    those before it, as `geojax serve` builds them; both: the worse of the two at each depth."""
    source: SourceConfig = SourceConfig()
    """Text of the requests; a run of tasks takes those."""


def run_depth(options: DepthOptions) -> None:
    """Profile, print, and write the table. Raises ConfigError on bad input."""
    require(options.count >= 1, f"count {options.count} must be at least 1")
    require(options.length >= 2, f"length {options.length} must be at least 2")
    require(
        options.shares and all(0 < share < 1 for share in options.shares),
        f"shares {options.shares} must lie between 0 and 1; use 0.5 0.7 0.9",
    )
    require(
        len(set(options.shares)) == len(options.shares),
        f"shares {options.shares} name one twice; leave one of them out",
    )
    picture = options.out.with_suffix(".png")
    require(
        picture != options.out,
        f"out {options.out} is where the picture goes; name the table something.json",
    )
    by_cosines = options.criterion == "cosine"
    given = options.most_kl if by_cosines else options.least_cosine
    require(
        given is None,
        f"{'most-kl' if by_cosines else 'least-cosine'} {given} means nothing to criterion "
        f"{options.criterion!r}; leave it out, or change the criterion",
    )
    bound = options.least_cosine if by_cosines else options.most_kl
    bound = _BOUNDS[options.criterion] if bound is None else bound
    options.out.parent.mkdir(parents=True, exist_ok=True)
    model, console = load(options.model), Console(highlight=False)
    profiles = []
    for share in sorted(options.shares):
        sequences, first_mask, kinds = _requests(model, options, share)
        # No more than the share, so that what is shared as deep has as much.
        prefix = max(math.floor(share * options.length + 1e-9), 1)
        found = [
            profile_share(
                Transformer(model.config),
                model.params,
                sequences,
                prefix,
                model.mask_id,
                canvas=options.builder == "canvas",
                first_mask=first_mask,
                kinds=kinds,
                ends=ends,
            )
            for ends in _chains(options.segments, prefix)
        ]
        profiles.append(replace(worst_of(found), share=share))
    depths = by_cosine(profiles, bound) if by_cosines else by_output(profiles, bound)
    for profile in profiles:
        console.print(depth_table(profile))
    for line in depth_lines(depths, model.config.layers):
        console.print(f"  {line}")
    content: dict[str, Any] = {
        "revision": model.revision,
        "builder": options.builder,
        "criterion": options.criterion,
        "segments": options.segments,
        "bound": bound,
        "steps": depths.steps,
        "guard": guard_of(profiles, depths).bounds,
        "length": options.length,
        "count": options.count,
        "machine": machine(),
        "profiles": [asdict(profile) for profile in profiles],
    }
    write_atomically(options.out, json.dumps(to_json(content), indent=2) + "\n")
    plot_profiles(profiles, picture)
    console.print(f"wrote {options.out} and {picture}", soft_wrap=True)


def _chains(covered: Covered, prefix: int) -> list[tuple[int, ...]]:
    """Where segments end, in each way of building a prefix."""
    ways = {"whole": (prefix,), "chained": doubling(prefix)}
    return [ends for name, ends in ways.items() if covered in (name, "both")]


def guard_of(profiles: Sequence[ShareProfile], depths: Depths) -> Guard:
    """Bounds for the depths of a table: somewhat above what the profiled requests show."""
    bounds: dict[int, float] = {}
    for profile in profiles:
        depth = depths.at(profile.share)
        if 0 < depth < len(profile.drift):
            bounds[depth] = max(bounds.get(depth, 0.0), _MARGIN * profile.drift[depth])
    return Guard(tuple(sorted(bounds.items())))


def read_table(path: Path, revision: str, builder: Builder) -> tuple[Depths, Guard]:
    """What `geojax profile depth` wrote into a file for these weights and this builder;
    ConfigError where it is of others, or is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
        steps = tuple((float(share), int(depth)) for share, depth in found["steps"])
        bounds = tuple((int(depth), float(drift)) for depth, drift in found["guard"])
        theirs = (found["revision"], found["builder"])
        covers = found.get("segments", "whole")
        if covers not in get_args(Covered):
            raise ValueError(f"segments {covers!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{path} is no table of depths ({error}); make one with `geojax profile depth`"
        ) from error
    require(
        theirs == (revision, builder),
        f"{path} is of weights {theirs[0]} and builder {theirs[1]!r}, not of {revision} and "
        f"{builder!r}; make one of these with `geojax profile depth`",
    )
    return Depths(steps, covers), Guard(bounds)


def _requests(
    model: Model, options: DepthOptions, share: float
) -> tuple[Int32[np.ndarray, "n s"], int | None, Int[np.ndarray, " n"] | None]:
    """Whole requests, where their masks may begin, and what kind each is of."""
    if is_of_tasks(options.model):
        names = [task.name for task in tasks.TASKS]
        return task_requests(names, share, options.count, options.length)
    path = model.folder / TOKENIZER
    require(
        model.tokenizer is not None and path.is_file(),
        f"{model.folder} has no {TOKENIZER} beside its weights; convert the run with `geojax "
        "convert`, and profile what that wrote",
    )
    tokenizer = TokenizerConfig(kind="file", path=str(path))
    data = DataConfig(options.source, tokenizer, options.length)
    corpus = prepare(data, model.config.vocab_size)
    _, held_out = both_splits(corpus, data, False)
    found = [batch.tokens for batch in held_out.batches(1, options.count)]
    require(
        len(found) > 1,
        f"the held-out text has {len(found)} sequences of {options.length} tokens; lower length",
    )
    return np.concatenate(found[:-1]), None, None  # the last one may be padded


def task_requests(
    names: Sequence[str], share: float, each: int, length: int
) -> tuple[Int32[np.ndarray, "n s"], int, Int[np.ndarray, " n"]]:
    """`each` requests of every task, blanks masked and answers not, where those begin, and which
    task each is of."""
    rows = [tasks.make_examples(name, share, each, 1, length) for name in names]
    at = np.arange(length)
    tokens = [np.where(at < r.answer_start[:, None], tasks.asked(r), r.tokens) for r in rows]
    kinds = np.repeat(np.arange(len(names)), each)
    return np.concatenate(tokens), int(rows[0].answer_start[0]), kinds
