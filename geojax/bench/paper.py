# SPDX-License-Identifier: Apache-2.0
"""Every published claim, tried: the parts that make the figures, and the page that shows them.

Each part is a command of its own, resumable, which writes one file of figures. The page and
`results.json` are made of those files and of `claims.py`, whatever is there; what is missing is
named. Invariant: no figure of ours is typed by hand.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from geojax.bench.claims import CLAIMS, Claim, Figure
from geojax.config import RunError, require
from geojax.track.metrics import NewFile, NewFolder, to_json, write_atomically
from geojax.track.section import new_table

SEEDS = 3


@dataclass(frozen=True)
class Part:
    """Some figures, and the command that makes them."""

    clock: str
    costs: str
    """Roughly, on two cores."""
    commands: tuple[tuple[str, ...], ...]
    """Arguments of geojax, one after another. {out} is the folder of all parts, {file} that of the
    figures, {model} the model of tasks."""
    figures: str
    """File under the folder."""


def _runs(methods: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{{out}}/geomesh/{m}-seed{seed}" for m in methods for seed in range(SEEDS))


_BASELINES = ("geomesh", "halos", "streaming-diloco")
PARTS: dict[str, Part] = {
    "geomesh": Part(
        "modelled (convergence is real)",
        "20 minutes",
        (("bench", "geomesh", "--out", "{out}/geomesh", "--json", "{file}"),),
        "geomesh.json",
    ),
    "tables": Part(
        "modelled (convergence is real)",
        "10 minutes, after geomesh",
        (
            (
                *("bench", "geomesh", "--out", "{out}/geomesh"),
                *("--json", "{out}/baselines.json", "--methods", *_BASELINES),
            ),
            ("simulate", "tables", *_runs(("diloco", *_BASELINES)), "--json", "{file}"),
        ),
        "tables.json",
    ),
    "latency": Part(
        "modelled",
        "a minute",
        (("simulate", "tables", "--wan", "geomesh-azure", "--json", "{file}"),),
        "latency.json",
    ),
    "cona": Part(
        "modelled (convergence is real)",
        "5 hours of one core",
        (("bench", "cona", "--out", "{out}/cona", "--jobs", "1", "--json", "{file}"),),
        "cona.json",
    ),
    "throughput": Part(
        "measured",
        "70 minutes",
        (("bench", "throughput", "--out", "{out}/throughput", "--json", "{file}"),),
        "throughput.json",
    ),
    "bicache": Part(
        "none (accuracy)",
        "4 hours of one core, and two more where the model has to be trained",
        (
            (
                *("profile", "depth", "{model}", "--length", "80"),
                *("--out", "{out}/depths.json"),
            ),
            (
                *("bench", "bicache", "{model}", "--depths", "{out}/depths.json"),
                *("--out", "{out}/bicache", "--json", "{file}"),
            ),
        ),
        "bicache.json",
    ),
}


@dataclass(frozen=True)
class PaperOptions:
    """Every published claim: what can be tried here is run, and one page says what came of it.
    Resumable: start it again to go on."""

    parts: tyro.conf.Positional[tuple[str, ...]] = ()
    """Some of geomesh, tables, latency, cona, throughput, bicache; unset: all."""
    out: NewFolder = Path("runs/paper")
    """Folder of runs and figures."""
    page: NewFile | None = None
    """Markdown file to write, results.json beside it; unset: results.md in the folder."""
    collect: bool = False
    """Run nothing; make the page of what is there."""
    model: Path | None = None
    """Model of tasks for part bicache; unset: trained first, by preset dlm-tasks."""


def run_paper(options: PaperOptions) -> None:
    """ConfigError for an unknown part; RunError where a part fails."""
    names = options.parts or tuple(PARTS)
    for name in names:
        require(name in PARTS, f"no part {name!r}; use some of {list(PARTS)}")
    require(
        not (options.collect and options.parts),
        f"--collect runs no part, and {', '.join(options.parts)} are named; leave one out",
    )
    page = options.page or options.out / "results.md"
    require(
        page.suffix == ".md",
        f"--page {page} must end in .md: its figures go beside it as .json; rename it",
    )
    console = Console(highlight=False)
    if not options.collect:
        for name in names:
            console.print(f"{name}: about {PARTS[name].costs}; {PARTS[name].clock} clock")
        for name in names:
            _run(name, options)
    results = collect(options.out)
    require(
        any(claim["value"] is not None for claim in results["claims"]),
        f"{options.out} holds no figures yet; run `geojax bench paper` without --collect first",
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=2, allow_nan=False)
    write_atomically(page.with_suffix(".json"), text + "\n")
    write_atomically(page, render(results))
    counts = {v: sum(c["verdict"] == v for c in results["claims"]) for v in VERDICTS}
    console.print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    console.print(f"wrote {page} and {page.with_suffix('.json')}", soft_wrap=True)


VERDICTS = (
    "reproduced",
    "not reproduced",
    "cannot be tested here",
    "not run yet",
    "no figure yet",
)


def commands(name: str, out: Path, model: Path | None = None) -> list[list[str]]:
    """Arguments of geojax that make a part's figures, in turn."""
    part = PARTS[name]
    found = [list(c) for c in part.commands]
    if any("{model}" in c for c in found) and model is None:
        model = out / "dlm-tasks"
        known = (model / "config.json").exists()
        train = ["--resume", str(model)] if known else ["dlm-tasks", "--out", str(model)]
        found.insert(0, ["train", *train])
    places = {"out": out, "file": out / part.figures, "model": model}
    return [[word.format(**places) for word in command] for command in found]


def _run(name: str, options: PaperOptions) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    for command in commands(name, options.out, options.model):
        done = subprocess.run([sys.executable, "-m", "geojax", *command], check=False)
        if done.returncode:
            raise RunError(
                f"part {name} ended with code {done.returncode} in `geojax {' '.join(command)}`; "
                "start it again to go on"
            )


def collect(out: Path) -> dict[str, Any]:
    """What each claim comes to, by the files of figures in `out`. RunError where one is none."""
    contents, parts = {}, {}
    for name, part in PARTS.items():
        path = out / part.figures
        if not path.exists():
            continue
        with _readable(path):
            content = json.loads(path.read_text())
            before = commands(name, Path("runs/paper"))[:-1]
            parts[name] = {
                "commands": [*(shlex.join(["geojax", *c]) for c in before), content["command"]],
                "clock": part.clock,
                "machine": content["machine"],
                "date": content["generated"],
            }
            contents[name] = content
    found = [_judge(claim, contents, out) for claim in CLAIMS]
    return to_json({"parts": parts, "claims": found})


@contextmanager
def _readable(path: Path) -> Generator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise RunError(
            f"{path} holds no figures of that part ({type(error).__name__}: {error}); delete it "
            "and run the part again"
        ) from error


def _judge(claim: Claim, contents: Mapping[str, Any], out: Path) -> dict[str, Any]:
    figure = None
    if claim.find is not None and claim.part in contents:
        with _readable(out / PARTS[claim.part].figures):
            figure = claim.find(contents[claim.part])
    if figure is not None:
        verdict = claim.verdict(figure)
    elif not claim.part:
        verdict = "cannot be tested here"
    else:
        verdict = "no figure yet" if claim.part in contents else "not run yet"
    why = claim.missed if verdict == "not reproduced" else ""
    return {
        "method": claim.method,
        "claim": claim.text,
        "published": f"{claim.relation} {claim.show(claim.published)}",
        "value": figure and figure.value,
        "ours": figure and claim.show(figure.value),
        "spread": figure and _spread(claim, figure),
        "verdict": verdict,
        "part": claim.part or None,
        "note": "; ".join(x for x in (claim.note, why) if x),
    }


def _spread(claim: Claim, figure: Figure) -> str:
    ends = _span(claim, figure.low, figure.high)
    return f"{ends} ({figure.basis})" if ends and figure.basis else ends or figure.basis


def _span(claim: Claim, low: float | None, high: float | None) -> str | None:
    if high is None:
        return None
    if low is None:
        return f"up to {claim.show(high)}"
    return f"{claim.show(low)} to {claim.show(high)}"


def render(results: Mapping[str, Any]) -> str:
    """The page, as Markdown."""
    lines = [
        "# What was published, and what came of it here",
        "",
        "Made by `geojax bench paper`; no figure of ours on this page is typed by hand. A bound",
        "(at least, at most) is reproduced where ours keeps it with all of its spread, a value",
        "where the mean of ours is within a tenth of it. Published figures are those of the",
        "papers' abstracts and of public notes on the papers.",
        "",
    ]
    for method in ("GeoMesh", "CONA", "BiCache"):
        mine = [c for c in results["claims"] if c["method"] == method]
        notes = list(dict.fromkeys(c["note"] for c in mine if c["note"]))
        lines += [f"## {method}", "", *_table(mine, notes), ""]
        lines += [f"{number}. {_sentence(note)}" for number, note in enumerate(notes, 1)]
        lines.append("")
    lines += [
        "## How the figures were made",
        "",
        "| part | command | clock | machine, date |",
        "|---|---|---|---|",
    ]
    for name, part in results["parts"].items():
        command = "<br>".join(f"`{c}`" for c in part["commands"])
        machines = part["machine"]
        where = "; ".join(machines) if isinstance(machines, list) else machines
        row = (name, command, part["clock"], f"{where}, {part['date']}")
        lines.append(f"| {' | '.join(row)} |")
    missing = [name for name in PARTS if name not in results["parts"]]
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def verdict_table(claims: Sequence[Mapping[str, Any]]) -> Table:
    """One line a claim."""
    found = new_table("claim", "published", "ours", "verdict")
    for c in claims:
        row = (f"{c['method']}: {c['claim']}", c["published"], c["ours"] or "", c["verdict"])
        found.add_row(*map(str, row))
    return found


def _table(claims: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> list[str]:
    lines = [
        "| claim | published | ours | spread | verdict | part | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in claims:
        note = str(notes.index(c["note"]) + 1) if c["note"] else ""
        row = (c["claim"], c["published"], c["ours"], c["spread"], c["verdict"], c["part"], note)
        lines.append(f"| {' | '.join(x or '' for x in row)} |")
    return lines


def _sentence(note: str) -> str:
    return f"{note[0].upper()}{note[1:]}."
