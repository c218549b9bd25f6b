# SPDX-License-Identifier: Apache-2.0
"""The command `geojax simulate`: a config's times with more slices, other links and other speeds.

Nothing is trained and no step is taken. Invariant: every figure that it prints or writes is of the
modelled clock, and says so.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from geojax.config import RunConfig, require
from geojax.simulate.baselines import baseline_outcome
from geojax.simulate.outcome import UNITS, Outcome, budget_sequences, outcome, outcome_table
from geojax.simulate.report import write_figures
from geojax.simulate.rounds import Replanner, Round, run_rounds
from geojax.simulate.scaling import plot_scaling, print_scaling, scaling, scaling_content
from geojax.simulate.setting import How, Setting, make_setting, with_modelled_clock
from geojax.simulate.speeds import Change, Speeds, parse_change
from geojax.track.console import format_count, format_seconds, format_share
from geojax.track.metrics import NewFile, NewFolder

_SHOWN = 6  # rounds that are shown after a change of speed


@dataclass(frozen=True)
class SimulateOptions:
    """Any field of the config can be set; nothing is trained."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    copies: Annotated[int | None, tyro.conf.arg(name="slices", metavar="K")] = None
    """How many slices, 2 to 256: copies of the config's, one after another; unset: its own."""
    wan: str | None = None
    """geomesh-azure, azure-many, azure-single, azure-constrained or a CSV file; unset: the
    config's."""
    regions: tuple[str, ...] = ()
    """Where the slices are, one after another; unset: where the config has them."""
    gpus: tuple[str, ...] = ()
    """What the config's slices run on, one after another, by the timing model; unset: as the
    config says."""
    by: Annotated[How, tyro.conf.arg(name="exchange")] = "config"
    """The pattern of the exchange; auto: the one of the least modelled time."""
    jitter_ms: float = 0.0
    """Mean of what comes on top of each transfer's latency."""
    loss: float = 0.0
    """Share of packets lost between regions."""
    jitter_seed: int = 0
    changes: tuple[str, ...] = ()
    """Speeds that change: SLICE@SECONDS=FACTOR, such as h100@3600=0.5."""
    replan: bool = False
    """Also with a plan that follows the speeds."""
    overlap: bool = False
    """Also with exchanges beside all of the next round's steps (exchange.overlap 1)."""
    rounds: int | None = None
    """Rounds to simulate; unset: to the token budget."""
    scaling: bool = False
    """Bytes and round times over 2 to 256 slices by each pattern, in place of a run."""
    out: NewFolder | None = None
    """Folder for the picture of --scaling."""
    json: NewFile | None = None
    """File for the figures."""


def run_simulate(options: SimulateOptions) -> None:
    """Print a simulated run; ConfigError where the options make no sense."""
    console = Console(highlight=False)
    config = with_modelled_clock(options.config, options.wan, options.gpus, options.regions)
    network = {
        "regions": options.regions,
        "loss": options.loss,
        "jitter_seconds": options.jitter_ms / 1e3,
        "seed": options.jitter_seed,
    }
    own_loop = config.halos or config.streaming
    if options.scaling:
        require(not own_loop, f"{config.name} has its own loop and no patterns to compare by K")
        given = [
            name for name in ("changes", "replan", "overlap", "rounds") if _given(options, name)
        ]
        require(
            not given and options.copies is None,
            f"--scaling shows all numbers of slices, without {given or 'slices'}; leave that unset",
        )
        rows, changes = scaling(config, **network)
        print_scaling(scaling_content(rows, changes, config), console)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            plot_scaling(scaling_content(rows, changes, config), options.out / "scaling.png")
            console.print(f"wrote {options.out / 'scaling.png'}")
        if options.json:
            write_figures(options.json, scaling_content(rows, changes, config), console)
        return
    require(
        options.out is None, "--out is for the picture of --scaling; give that, or leave it out"
    )
    require(
        options.rounds is None or options.rounds >= 2, f"rounds {options.rounds} must be at least 2"
    )
    setting = make_setting(config, options.by, options.copies, **network)
    if own_loop:
        _run_baseline(setting, options, console)
    else:
        _run(setting, options, console)


def _run(setting: Setting, options: SimulateOptions, console: Console) -> None:
    names = [w.name for w in setting.plan.work]
    changes = [parse_change(text, names) for text in options.changes]
    own = setting.config.exchange.overlap
    variants = {"as it is": (own, False)}
    if options.replan:
        require(
            setting.config.balance.mode == "adaptive",
            "balance.mode equal gives all slices the same work at any speed; with --replan it must "
            "be adaptive",
        )
        variants["re-planned"] = (own, True)
    if options.overlap:
        variants["overlapped"] = (1.0, False)
    if options.replan and options.overlap:
        variants["both"] = (1.0, True)
    found: dict[str, tuple[Outcome, list[Round]]] = {}
    for name, (overlap, replanned) in variants.items():
        rounds = simulate(setting, changes, overlap, replanned, options.rounds)
        found[name] = (outcome(setting, rounds, overlap), rounds)
    console.print(Text(_title(setting, setting.pattern), style="bold"))
    for line in _plan_lines(setting):
        console.print(f"  {line}", soft_wrap=True)
    console.print(outcome_table({name: result for name, (result, _) in found.items()}))
    for change in changes:
        for name, (_, rounds) in found.items():
            console.print(_after(change, name, rounds), soft_wrap=True)
    console.print("Times: modelled clock; nothing was trained.")
    if options.json:
        results = [asdict(result) | {"variant": name} for name, (result, _) in found.items()]
        idles = {name: [r.straggler_idle for r in rounds] for name, (_, rounds) in found.items()}
        content = _content(setting, options, changes) | {"results": results}
        if changes:
            content["straggler_idle_by_round"] = idles
        write_figures(options.json, content, console)


def _run_baseline(setting: Setting, options: SimulateOptions, console: Console) -> None:
    """HALoS and Streaming DiLoCo overlap by themselves, and have no plan that follows speeds."""
    unused = [name for name in ("replan", "overlap", "rounds") if _given(options, name)]
    if setting.config.halos and options.by != "config":
        unused.append("exchange")
    require(not unused, f"{setting.config.name} has its own loop, without {unused}; leave that out")
    names = [w.name for w in setting.plan.work]
    changes = [parse_change(text, names) for text in options.changes]
    found = baseline_outcome(setting, changes)
    console.print(Text(_title(setting, found.pattern), style="bold"))
    for line in _plan_lines(setting):
        console.print(f"  {line}", soft_wrap=True)
    console.print(outcome_table({"as it is": found}))
    console.print("Times: modelled clock; nothing was trained.")
    if options.json:
        content = _content(setting, options, changes)
        results = [asdict(found) | {"variant": "as it is"}]
        write_figures(options.json, content | {"results": results}, console)


def _content(
    setting: Setting, options: SimulateOptions, changes: Sequence[Change]
) -> dict[str, Any]:
    """What the figures in a file are of."""
    return {
        "units": UNITS,
        "plan": [asdict(work) for work in setting.plan.work],
        "regions": list(setting.network.regions),
        "loss": options.loss,
        "jitter_seconds": setting.network.jitter_seconds,
        "seed": setting.network.seed,
        "changes": [asdict(change) for change in changes],
    }


def simulate(
    setting: Setting,
    changes: Sequence[Change] = (),
    overlap: float | None = None,
    replanned: bool = False,
    rounds: int | None = None,
) -> list[Round]:
    """Rounds of `setting` to its token budget, or so many; `overlap` unset: the config's."""
    quiet = replace(setting.network, jitter_seconds=0.0)
    steady = quiet.exchange(setting.pattern, setting.traffic.payload_bytes).seconds
    replanner = Replanner(setting.profiles, setting.config.balance, steady) if replanned else None
    jitter = setting.network.jitter_seconds
    return run_rounds(
        setting.plan,
        budget_sequences(setting),
        (lambda number: setting.exchange(number).seconds) if jitter else lambda number: steady,
        Speeds([w.name for w in setting.plan.work], changes),
        setting.config.exchange.overlap if overlap is None else overlap,
        replanner,
        rounds,
    )


def _given(options: SimulateOptions, name: str) -> bool:
    return bool(getattr(options, name))


def _title(setting: Setting, pattern: str) -> str:
    regions = len(set(setting.network.regions))
    return (
        f"{setting.config.name}: {setting.slices} slices in {regions} regions of "
        f"{setting.config.clock.wan}, {setting.config.exchange.codec} by {pattern}, "
        f"{format_count(setting.traffic.params)} parameters"
    )


def _plan_lines(setting: Setting) -> list[str]:
    own = len(setting.config.slices)
    lines = [
        f"{w.name}: batch {w.batch}, {w.inner_steps} inner steps of "
        f"{format_seconds(w.seconds_per_step)}"
        for w in setting.plan.work[:own]
    ]
    if setting.slices > own:
        lines.append(f"and copies of these, {setting.slices} in all")
    return lines


def _after(change: Change, name: str, rounds: Sequence[Round]) -> str:
    """Straggler idle of the round in which a speed changes, and of those after it."""
    hit = next((i for i, r in enumerate(rounds) if r.end > change.at_seconds), None)
    if hit is None:
        return f"{name}: the run is over before {change.slice} changes at {change.at_seconds:g} s"
    first = max(0, hit - 1)
    shown = rounds[first : hit + _SHOWN]
    idles = ", ".join(format_share(r.straggler_idle) for r in shown)
    return (
        f"{name}: straggler idle of rounds {first + 1} to {first + len(shown)}, "
        f"{change.slice} at {change.factor:g} from round {hit + 1} on: {idles}"
    )
