# SPDX-License-Identifier: Apache-2.0
"""By how much CONA shortens a run: three small models trained for real, against what else one might
do, with the times of published models on eight A100s.

Invariant: every part is a run folder, or a checkpoint, of its own; what is finished is kept, and
the report is of whatever there is. Learning rates are tuned on other held-out sequences than those
that are reported. One setting was chosen by a figure that is: `noise.metric`, by gpt, seed 0.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from geojax.bench.cona_curves import crossed_at, fixed_curve, hindsight, noise_curve, vertex
from geojax.bench.cona_greedy import run_greedy
from geojax.bench.cona_methods import (
    MODELS,
    TUNE_SHARE,
    Decay,
    Setting,
    by_cona,
    by_goodput,
    by_hand,
    by_option,
    by_prediction,
    next_rates,
    predicted_legs,
    setting,
    tune_config,
    tuned,
    with_decay,
)
from geojax.bench.cona_report import report
from geojax.bench.jobs import run_all, run_here, stay_on_one_core
from geojax.config import RunConfig, require
from geojax.track.console import format_count, format_seconds, format_share
from geojax.track.summary import load_run

INTERVALS = 25
"""Of a run's time, at each of which the greedy oracle chooses."""
# On one core of an AMD EPYC, for the models here: a run's start, a step, and a million tokens.
_START_SECONDS, _STEP_SECONDS, _MTOKEN_SECONDS = 8.0, 0.004, 28.0


class Part(NamedTuple):
    """A row of the plan."""

    what: str
    runs: int
    tokens: float
    """Of all its runs."""
    seconds: float
    """Expected of one core."""


def run_cona(
    folder: Path,
    jobs: int,
    models: Sequence[str],
    seeds: Sequence[int],
    json_path: Path | None,
    decay: Decay = "cosine",
) -> None:
    """The experiment on these models and seeds, all models of one seed before the next seed.

    `decay`: of the learning rate.
    """
    require(models and seeds, "name at least one model and one seed")
    for model in models:
        require(model in MODELS, f"no model {model!r} in the experiment; use {list(MODELS)}")
    require(
        min(seeds) >= 0 and len(set(seeds)) == len(seeds),
        f"seeds {list(seeds)} must be at least 0, each once",
    )
    console = Console(highlight=False)
    settings = [with_decay(setting(model), decay) for model in models]
    console.print(cost_table(settings, len(seeds)))
    console.print(
        "Convergence: real training. Times in all that follows: modelled clock, published models "
        "on A100s."
    )
    ready: dict[str, Setting] = {}
    for seed in seeds:
        for base in settings:
            if base.name not in ready:
                ready[base.name] = _tune(base, folder / base.name / "tune", jobs, console)
            _one(ready[base.name], folder / base.name / f"seed{seed}", seed, jobs, console)
            report(folder, list(ready.values()), seeds, json_path, console)


def cost_table(settings: Sequence[Setting], seeds: int) -> Table:
    """What there is to do, and about how long one core takes."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("model", "part", "runs", "tokens", "one core"):
        table.add_column(heading, justify="left" if heading in ("model", "part") else "right")
    whole = 0.0
    for base in settings:
        for part in plan(base, seeds):
            whole += part.seconds
            cells = (str(part.runs), format_count(part.tokens), format_seconds(part.seconds))
            table.add_row(base.name, part.what, *cells)
    table.add_row("all", "", "", "", format_seconds(whole))
    return table


def plan(base: Setting, seeds: int) -> list[Part]:
    """Parts of one model, at most three rates a batch beyond the search's first."""
    total, seq_len = base.config.train.total_tokens, base.config.data.seq_len

    def part(what: str, batches: Sequence[int], share: float, times: int) -> Part:
        tokens = share * total * len(batches)
        steps = sum(share * total / (seq_len * b) for b in batches)
        seconds = len(batches) * _START_SECONDS * (share == 1 or what == "learning rates")
        seconds += steps * _STEP_SECONDS + tokens / 1e6 * _MTOKEN_SECONDS
        return Part(what, len(batches) * times, tokens * times, seconds * times)

    ladder, middle = [o.batch for o in base.options], base.options[len(base.options) // 2].batch
    return [
        part("learning rates", [b for b in ladder for _ in range(3)], TUNE_SHARE, 1),
        part("a curve a batch", ladder, 1, seeds),
        part("CONA, goodput of dp, warm-up, predicted chain", [middle] * 4, 1, seeds),
        part("greedy oracle, three branches", [middle], 3, seeds),
    ]


def _tune(base: Setting, folder: Path, jobs: int, console: Console) -> Setting:
    """With the table of learning rates, from short runs of seed 0."""
    batches = [option.batch for option in base.options]
    losses: dict[int, dict[float, float]] = {batch: {} for batch in batches}
    while True:
        asked = {b: next_rates(base, b, losses[b]) for b in batches}
        configs = {
            folder / f"gb{batch}-rate{rate:.3g}": tune_config(base, batch, rate)
            for batch, rates in asked.items()
            for rate in rates
        }
        if not configs:
            break
        _train(configs, jobs, console)
        for batch, rates in asked.items():
            for rate in rates:
                run = load_run(folder / f"gb{batch}-rate{rate:.3g}")
                losses[batch][rate] = run.evals[-1]["loss"]
    best = {batch: vertex(losses[batch]) for batch in batches}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in (base.name, "tried: held-out loss", "best rate"):
        table.add_column(heading)
    for batch in batches:
        tried = ", ".join(f"{r:.3g}: {x:.4f}" for r, x in sorted(losses[batch].items()))
        table.add_row(f"batch {batch}", tried, f"{best[batch]:.3g}")
    console.print(table)
    return tuned(base, best)


def _one(base: Setting, folder: Path, seed: int, jobs: int, console: Console) -> None:
    """All of one model and one seed."""
    middle = base.options[len(base.options) // 2]
    first = {folder / f"gb{middle.batch}": by_option(base, middle, seed)}
    _train(first, jobs, console)
    console.print(pilot_table(base, folder / f"gb{middle.batch}"))
    configs = {folder / f"gb{o.batch}": by_option(base, o, seed) for o in base.options}
    configs = {k: c for k, c in configs.items() if k not in first}
    configs |= {
        folder / "cona": by_cona(base, seed),
        folder / "goodput-dp": by_goodput(base, seed),
        folder / "warm-up": by_hand(base, seed),
    }
    _train(configs, jobs, console)
    seq_len = base.config.data.seq_len
    cona = load_run(folder / "cona")
    curves = {
        o.name: fixed_curve(load_run(folder / f"gb{o.batch}"), o, seq_len) for o in base.options
    }
    best = hindsight(list(curves.values()), cona.evals[-1]["loss"])
    batch = next(o.batch for o in base.options if o.name == best.name)
    legs = predicted_legs(base, noise_curve(load_run(folder / f"gb{batch}")))
    _train({folder / "predicted": by_prediction(base, legs, seed)}, jobs, console)
    line = [option for _, option in base.line]
    stay_on_one_core()
    run_greedy(
        by_cona(base, seed), folder / "greedy", line, cona.evals[-1]["seconds"], INTERVALS, console
    )


def _train(configs: Mapping[Path, RunConfig], jobs: int, console: Console) -> None:
    """Several at a time in processes of their own; one at a time here, where JAX starts once."""
    if jobs == 1:
        run_here(configs, console)
    else:
        run_all(configs, jobs, console)


def pilot_table(base: Setting, run: Path) -> Table:
    """Where the strategies of the ladder cross, and when the noise of `run` comes there."""
    noise = noise_curve(load_run(run))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in (f"{base.name}: best from noise", "strategy", "a step", "reached after"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for scale, option in base.line:
        share = crossed_at(noise, scale, base.total_samples)
        table.add_row(
            f"{scale:.1f}",
            option.name,
            format_seconds(option.seconds),
            "never" if share is None else format_share(share),
        )
    total = base.total_samples
    middle = [s for s, _ in base.line if 0.05 <= (crossed_at(noise, s, total) or 0) <= 0.8]
    seen = ", ".join(f"{noise(s * total):.0f} at {s:.0%}" for s in (0.02, 0.05, 0.2, 0.5, 0.8, 1))
    table.caption = (
        f"Steps: modelled clock. Noise of {run.name}: {seen}. It comes to {len(middle)} crossings "
        "between 5% and 80%" + ("." if len(middle) > 1 else ": too few to see a chain.")
    )
    return table
