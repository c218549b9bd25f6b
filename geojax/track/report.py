# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: a table, pictures and `report.json`.

Invariant: every figure is computed from runs whose accounting holds; runs stand in one table where
they are on one clock and were evaluated on the same text, against one target perplexity. The table,
the pictures, the page and the JSON show the same figures.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from geojax.config import require
from geojax.track.chain import chain_notes, chain_table, score_table
from geojax.track.console import format_count, format_share
from geojax.track.facts import config_of, facts_of
from geojax.track.metrics import to_json, write_atomically
from geojax.track.plots import plot_chain, plot_gantt, plot_idle, plot_perplexity
from geojax.track.section import (
    Block,
    Picture,
    Section,
    new_console,
    new_table,
    print_sections,
    save_pictures,
)
from geojax.track.summary import (
    PARTS,
    UNITS,
    Run,
    Summary,
    check_accounting,
    common_target,
    labels,
    load_run,
    summarise,
)
from geojax.track.summary_table import slowest, summary_table, target_notes


@dataclass(frozen=True)
class Comparison:
    """Runs whose times and perplexities compare."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    target: float
    """Perplexity."""
    rule: str
    """Where the target is from."""

    @property
    def summaries(self) -> list[Summary]:
        return [summarise(run, self.target) for run in self.runs]


def report(
    folders: Sequence[Path | str], out: Path | None, json_path: Path | None, target: float | None
) -> None:
    """Compare the runs in `folders` on standard output.

    Pictures go into the folder `out` and the figures into `json_path`, where given. Without a
    `target` perplexity it is 1.02 times the worst final one. Raises ConfigError for a folder that
    is not a run with results, and for accounts that do not add up.
    """
    require(folders, "there is nothing to report; give at least one run folder")
    compared = compare([load_run(folder) for folder in folders], target)
    publish(sections_of(compared), compared, out, json_path, new_console())


def publish(
    sections: Sequence[Section],
    compared: Sequence[Comparison],
    out: Path | None,
    json_path: Path | None,
    console: Console,
) -> None:
    """Print `sections`, and write their pictures and the figures of the runs."""
    if json_path is not None:
        require(
            len(compared) == 1,
            f"--json is for runs that compare, and here are {len(compared)} groups of them that do "
            "not; report each apart",
        )
    print_sections(sections, console)
    written = [] if out is None else save_pictures(sections, out)
    if json_path is not None:
        _write_comparison(json_path, compared[0])
        written.append(json_path)
    for path in written:
        console.print(Text(f"wrote {path}"), soft_wrap=True)


def compare(runs: Sequence[Run], target: float | None) -> list[Comparison]:
    """Groups of runs on one clock that were evaluated on the same text, in order.

    ConfigError for accounts that do not add up, a folder given twice, and a target that is none.
    """
    for run in runs:
        check_accounting(run)
    require(target is None or target > 1, f"target perplexity {target} must be above 1")
    rule = "as given" if target is not None else "1.02 times the worst final perplexity"
    groups: dict[str, list[tuple[Run, str]]] = {}
    for run, name in zip(runs, labels(runs), strict=True):
        groups.setdefault(_comparable(run), []).append((run, name))
    found = []
    for pairs in groups.values():
        of = tuple(run for run, _ in pairs)
        names = tuple(name for _, name in pairs)
        found.append(Comparison(of, names, common_target(of) if target is None else target, rule))
    return found


def sections_of(
    compared: Sequence[Comparison], more: Callable[[Run], Sequence[Block]] = lambda run: ()
) -> list[Section]:
    """Comparisons, each with its runs behind it; `more`: what else there is to say of a run."""
    found = []
    for group in compared:
        found.append(_comparison_section(group, alone=len(compared) == 1))
        for run, name in zip(group.runs, group.names, strict=True):
            found.append(_run_section(run, name, more(run)))
    return found


def write_json(
    path: Path | str,
    results: Sequence[Summary],
    *,
    clock: str,
    target_perplexity: float | None,
    machine: str,
    versions: dict[str, str],
) -> None:
    """Write `results` with what is needed to read them; `machine` and `versions` made the runs."""
    content = {
        "generated": datetime.now(UTC).date().isoformat(),
        "versions": versions,
        "machine": machine,
        "clock": clock,
        "target_perplexity": target_perplexity,
        "units": UNITS,
        "results": [asdict(result) for result in results],
    }
    write_atomically(path, json.dumps(to_json(content), indent=2, allow_nan=False) + "\n")


def _comparison_section(group: Comparison, alone: bool) -> Section:
    runs, names, summaries = group.runs, group.names, group.summaries
    last = slowest(names, summaries)
    first, *others = target_notes(group.target, group.rule, last, len(runs) > 1)
    notes = [first, _provenance(runs), *others]
    for run, name in zip(runs, names, strict=True):
        if run.end is None:
            notes.append(f"{name} has not ended: its figures are up to round {len(run.rounds)}.")
    clock, text = runs[0].start["clock"], _held_out(runs[0])
    if clock == "modelled":
        clock = f"modelled, {format_count(runs[0].start['clocked_params'])} parameters"
    title = "Runs" if alone else f"Runs: {clock}" + (f"; {text}" if text else "")
    table = summary_table(names, summaries, last[0] if last else None)
    target = group.target
    pictures = [
        Picture(
            "perplexity",
            f"Held-out perplexity over time ({clock}) and over tokens; a star where a run reaches "
            f"{target:.4g}.",
            lambda path: plot_perplexity(runs, path, target, names),
        )
    ]
    waits = [
        Picture(
            "gantt",
            f"What each slice did in the first rounds, on one time axis ({clock}).",
            lambda path: plot_gantt(runs, path, names=names),
        ),
        Picture(
            "idle",
            f"How each slice's time divides into compute and waits ({clock}).",
            lambda path: plot_idle(runs, path, names),
        ),
    ]
    return Section(
        title,
        (Block("" if alone else title, table, tuple(notes)),),
        tuple(pictures if all(_one_cluster(run) for run in runs) else pictures + waits),
        live=any(run.end is None for run in runs),
    )


def _run_section(run: Run, name: str, more: Sequence[Block]) -> Section:
    note = "Batch, steps and loss: of the last round. Shares: of the run's time."
    blocks = [Block("each slice", _slice_table(run), (note,), aside=True)]
    pictures = []
    if _chained(run):
        blocks.append(Block("its chain of strategies", chain_table(run)))
        about = "Batch and noise scale over tokens, and what each batch scored in every decision."
        pictures.append(Picture(f"chain-{name}", about, partial(plot_chain, run)))
    scored = score_table(run)
    if scored is not None:
        note = "Score: progress a second over the present strategy's; interval: over the noise's."
        blocks.append(Block("scores in its last decision", scored, (note,)))
    notes = chain_notes(run)
    if notes:
        blocks.append(Block(notes=tuple(notes)))
    return Section(
        name,
        (*blocks, *more),
        tuple(pictures),
        facts_of(run),
        config_of(run),
        lead=f"{name}: ",
        live=run.end is None,
    )


def _slice_table(run: Run) -> Table:
    """How the time of each slice divides, and what it did in its last round."""
    waits = {"wan": "WAN"}
    table = new_table("slice", "batch", "steps", "loss", "tokens", *PARTS)
    for column in table.columns[-len(PARTS) :]:
        column.header = waits.get(str(column.header), str(column.header))
    tokens: dict[str, int] = {}
    for record in run.slices:
        tokens[record["slice"]] = tokens.get(record["slice"], 0) + record.get("tokens", 0)
    last = {record["slice"]: record for record in run.slices}
    for name, parts in run.shares().items():
        record = last[name]
        loss = record.get("loss")
        table.add_row(
            name,
            str(record.get("batch", "-")),
            str(record.get("steps", "-")),
            "-" if loss is None else f"{loss:.4f}",
            format_count(tokens[name]),
            *(format_share(parts[part]) for part in PARTS),
        )
    return table


def _write_comparison(path: Path, group: Comparison) -> None:
    runs = group.runs
    packages = dict.fromkeys(package for run in runs for package in run.start["versions"])
    write_json(
        path,
        group.summaries,
        clock=runs[0].start["clock"],
        target_perplexity=group.target,
        machine=_distinct(run.start["machine"] for run in runs),
        versions={
            package: _distinct(run.start["versions"].get(package, "none") for run in runs)
            for package in packages
        },
    )


def _chained(run: Run) -> bool:
    """Whether it is of one cluster whose strategy changed."""
    return bool(run.switches) and _one_cluster(run)


def _one_cluster(run: Run) -> bool:
    return {record["slice"] for record in run.slices} == {"all"}


def _comparable(run: Run) -> str:
    """What runs have in common whose times and perplexities compare: clock, what that stands for,
    and the text that they were evaluated on."""
    clock = run.start["clock"]
    clocked = run.start["clocked_params"] if clock == "modelled" else None
    data, shown = run.config.get("data"), run.config.get("eval")
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if key != "seed"}
    first = shown.get("first") if isinstance(shown, dict) else None
    return json.dumps([clock, clocked, _set(data), first or 0], sort_keys=True)


def _set(value: Any) -> Any:
    """`value` without fields that are empty, as those are that an older config does not have."""
    if isinstance(value, dict):
        return {key: kept for key, item in value.items() if (kept := _set(item))}
    return value


def _held_out(run: Run) -> str:
    """Which text, where that is known."""
    return next((value for label, value in facts_of(run) if label == "text"), "")


def _provenance(runs: Sequence[Run]) -> str:
    """Which clock the times are from, and what was really trained."""
    clock = runs[0].start["clock"]
    timed = _distinct(format_count(run.start["clocked_params"]) for run in runs)
    trained = _distinct(format_count(run.start["params"]) for run in runs)
    source = (
        f"hardware and WAN model, {timed} parameters"
        if clock == "modelled"
        else f"wall time on {_distinct(run.start['machine'] for run in runs)}"
    )
    return f"Times: {clock} clock ({source}); convergence: real training of {trained} parameters."


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
