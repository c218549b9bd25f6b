# SPDX-License-Identifier: Apache-2.0
"""The published tables of GeoMesh made again on the modelled clock, beside the published figures.

Step times are the demo's: such that DiLoCo idles as published at 150M; at other sizes they follow
the FLOPs of a token. One figure of each table is set equal to the published one (DiLoCo at 150M),
since neither the steps of a round nor the GPUs' speeds were published; all others follow. Hours are
for 20 tokens a parameter, the same for all methods. Where runs are given, hours to the target
perplexity are those times the share of its tokens that each method needed in real training, of a
model that is much smaller. Invariant: nothing is fitted to any other published figure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from geojax.bench.published import ABOUT, PUBLISHED_HOURS, PUBLISHED_IDLE, PUBLISHED_TO_TARGET
from geojax.config import RunConfig, require
from geojax.configs import BASELINES, METHODS, demo
from geojax.meshes.wan import get_wan
from geojax.models.config import get_model
from geojax.simulate.baselines import baseline_outcome
from geojax.simulate.command import simulate
from geojax.simulate.outcome import Outcome, outcome
from geojax.simulate.report import write_figures
from geojax.simulate.setting import make_setting
from geojax.track.console import format_share
from geojax.track.metrics import NewFile
from geojax.track.section import new_table
from geojax.track.summary import common_target, load_run, summarise

SIZES = ("150m", "300m", "500m")
_ROUNDS = 400  # stand for the whole run, as a round is like the one before
_SEQ_LEN = 1024

SIZE_NOTE = (
    "Hours for 20 tokens a parameter, scaled so that DiLoCo at 150M takes the published 3.7 "
    "(published: hours to the target perplexity)."
)
ABLATION_NOTE = (
    "Hours for the same tokens, scaled so that DiLoCo takes the published 12.0. Idle: share of the "
    "run, of the slice with most."
)

BY_SIZE = ("diloco", "halos", "streaming-diloco", "geomesh", "geomesh, overlapped")
ABLATION = ("diloco", "balancing-only", "signs-only", "geomesh", "fp16", "int8")


@dataclass(frozen=True)
class TablesOptions:
    """The published tables made again on the modelled clock; nothing is trained."""

    runs: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders of finished demo runs, as `geojax bench geomesh` makes: of DiLoCo and others; then
    hours to the target perplexity are shown, too."""
    wan: str = "geomesh-azure-no-latency"
    """The published setting says nothing of latency; geomesh-azure adds it."""
    json: NewFile | None = None
    """File for the figures."""


def run_tables(options: TablesOptions) -> None:
    """Print the tables. ConfigError for a WAN or runs that do not do."""
    console = Console(highlight=False)
    shares = tokens_to_target(options.runs) if options.runs else {}
    sizes = {size: {name: timed(name, size, options.wan) for name in BY_SIZE} for size in SIZES}
    ablation = {name: timed(name, "150m", options.wan) for name in ABLATION}
    content = tables_content(options.wan, sizes, ablation, shares)
    console.print(size_table(content))
    console.print(SIZE_NOTE)
    console.print(ablation_table(content))
    console.print(ABLATION_NOTE)
    for line in disagreements(content["ablation_hours"]):
        console.print(line)
    console.print(f"Times: modelled clock, {options.wan}; nothing was trained.")
    if options.json:
        write_figures(options.json, content, console)


def tables_content(
    wan: str,
    sizes: Mapping[str, Mapping[str, Outcome]],
    ablation: Mapping[str, Outcome],
    shares: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """What tables and JSON show."""
    return {
        "wan": wan,
        "units": {
            "hours_by_size": "for 20 tokens a parameter; DiLoCo at 150M set to 3.7",
            "hours_to_target": "hours_by_size at 150M times tokens_to_target, mean over seeds",
            "tokens_to_target": "share of DiLoCo's, in the runs given, by seed",
            "ablation_hours": "for the same tokens; DiLoCo set to 12.0",
            "idle": "shares of the run's time, of the slice with most",
        },
        "hours_by_size": {s: hours(row, 3.7, sizes["150m"]) for s, row in sizes.items()},
        "tokens_to_target": shares,
        "hours_to_target": _to_target(sizes["150m"], shares),
        "published_to_target": PUBLISHED_TO_TARGET,
        "ablation_hours": hours(ablation, 12.0, ablation),
        "published_ablation_hours": PUBLISHED_HOURS,
        "idle": {n: [o.straggler_idle, o.wan_idle] for n, o in ablation.items()},
        "published_idle": PUBLISHED_IDLE,
    }


def timed(name: str, size: str, wan: str) -> Outcome:
    """A method at a published size; `name, overlapped` with exchanges beside the next steps."""
    method, _, variant = name.partition(", ")
    config = at_size((METHODS | BASELINES)[method](demo()), size, wan)
    setting = make_setting(config)
    if method not in BASELINES:
        overlap = float(variant == "overlapped")
        return outcome(setting, simulate(setting, overlap=overlap, rounds=_ROUNDS), overlap)
    whole = config.train.total_tokens
    tokens = min(whole, _ROUNDS * setting.plan.sequences * _SEQ_LEN)
    part = replace(config, train=replace(config.train, total_tokens=tokens))
    found = baseline_outcome(replace(setting, config=part))
    return replace(found, hours=found.hours * whole / tokens)


def at_size(config: RunConfig, size: str, wan: str) -> RunConfig:
    """A demo's config for the times of a published size, with its tokens."""
    try:
        get_wan(wan)
    except ValueError as error:
        require(False, f"--wan {wan}: {error}")
    model, before = get_model(f"llama-{size}"), config.clocked_model()
    flops = [m.train_flops_per_token(_SEQ_LEN) for m in (model, before)]
    seconds = config.clock.base_step_seconds
    assert seconds is not None, "the demo's slices are given by speed"
    return replace(
        config,
        model=model,
        data=replace(config.data, seq_len=_SEQ_LEN),
        train=replace(config.train, total_tokens=20 * model.num_params),
        clock=replace(
            config.clock,
            model=f"llama-{size}",
            seq_len=_SEQ_LEN,
            wan=wan,
            base_step_seconds=seconds * flops[0] / flops[1],
        ),
    )


def hours(
    found: Mapping[str, Outcome], published: float, base: Mapping[str, Outcome]
) -> dict[str, float]:
    """Of `found`, on the scale on which DiLoCo's of `base` are `published`."""
    return {name: published * o.hours / base["diloco"].hours for name, o in found.items()}


def tokens_to_target(folders: Sequence[str]) -> dict[str, list[float]]:
    """Tokens that each method needed to a common target over those that DiLoCo did, by seed.
    ConfigError where a seed has no run of DiLoCo, or one that did not come to the target."""
    by_seed: dict[int, dict[str, Any]] = {}
    for folder in folders:
        run = load_run(folder)
        by_seed.setdefault(run.start["seed"], {})[run.start["method"]] = run
    found: dict[str, list[float]] = {}
    for seed, runs in sorted(by_seed.items()):
        require("diloco" in runs, f"seed {seed} has no run of diloco to compare with; give one")
        target = common_target(list(runs.values()))
        needed = {name: summarise(run, target).tokens_to_target for name, run in runs.items()}
        diloco = needed["diloco"]
        for name, tokens in needed.items():
            require(tokens, f"{name} of seed {seed} never came to perplexity {target:.4g}")
            assert tokens is not None
            assert diloco is not None
            found.setdefault(name, []).append(tokens / diloco)
    return found


def disagreements(ablation_hours: Mapping[str, float]) -> list[str]:
    """Where the model and the published hours are more than a tenth apart."""
    lines = []
    for name, value in ablation_hours.items():
        published = PUBLISHED_HOURS[name]
        if abs(value / published - 1) > ABOUT:
            lines.append(
                f"{name}: {value:.1f} h here, {published:.1f} published "
                f"({value / published - 1:+.0%}); not explained by compute and bytes alone."
            )
    return lines


def _to_target(
    outcomes: Mapping[str, Outcome], shares: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    found = hours(outcomes, 3.7, outcomes)
    return {n: h * mean(shares[n]) for n, h in found.items() if n in shares}


def size_table(content: Mapping[str, Any]) -> Table:
    """Hours by method and size, and to the target where runs were given."""
    columns: dict[str, Mapping[str, float]] = {
        f"\n{size.upper()}": row for size, row in content["hours_by_size"].items()
    }
    if content["hours_to_target"]:
        columns["to target\n150M"] = content["hours_to_target"]
    columns["published\n150M"] = content["published_to_target"]
    table = new_table("\nhours", *columns)
    for name in BY_SIZE:
        values = [column.get(name) for column in columns.values()]
        table.add_row(name, *("-" if v is None else f"{v:.2f}" for v in values))
    return table


def ablation_table(content: Mapping[str, Any]) -> Table:
    """Hours and idle shares by method, beside the published ones."""
    table = new_table(
        "\nablation",
        "\nhours",
        "\npublished",
        "straggler\nidle",
        "\npublished",
        "WAN\nidle",
        "\npublished",
    )
    for name, value in content["ablation_hours"].items():
        idle, published = content["idle"][name], content["published_idle"].get(name)
        table.add_row(
            name,
            f"{value:.1f}",
            f"{content['published_ablation_hours'][name]:.1f}",
            format_share(idle[0]),
            format_share(published[0]) if published else "-",
            format_share(idle[1]),
            format_share(published[1]) if published else "-",
        )
    return table
