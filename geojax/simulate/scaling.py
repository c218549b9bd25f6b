# SPDX-License-Identifier: Apache-2.0
"""Bytes and round times over the number of slices, by each pattern, and where the fastest changes.

Slices keep their work, so that more of them take in more tokens a round. Invariant: every K from 2
to 256 is looked at for where the planner changes its choice; table and picture show some of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from geojax.config import RunConfig
from geojax.meshes.network import PATTERNS, Network, Pattern
from geojax.simulate.setting import make_setting
from geojax.track.console import format_bytes
from geojax.track.plots import as_text
from geojax.track.section import Target, new_table

SHOWN = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_COLOURS: Mapping[Pattern, str] = {"gather": "#0072B2", "two_phase": "#D55E00", "hub": "#009E73"}

UNITS = {
    "slices": "how many; of the config's, one after another",
    "round_seconds": "modelled: the slowest slice's compute and the exchange",
    "exchange_seconds": "modelled",
    "sent_bytes": "by a slice in a round, mean over slices",
    "most_sent_bytes": "by the slice that sends most, in a round",
    "wan_bytes": "of the bytes sent, those to other regions; mean over slices",
}


@dataclass(frozen=True)
class Row:
    """One pattern among one number of slices; units in `UNITS`."""

    slices: int
    pattern: Pattern
    round_seconds: float
    exchange_seconds: float
    sent_bytes: float
    most_sent_bytes: int
    wan_bytes: float
    fastest: bool


@dataclass(frozen=True)
class Crossing:
    """From `slices` on another pattern is the fastest."""

    slices: int
    before: Pattern
    after: Pattern


def scaling(
    config: RunConfig,
    regions: Sequence[str] = (),
    loss: float = 0.0,
    jitter_seconds: float = 0.0,
    seed: int = 0,
    counts: Sequence[int] = SHOWN,
) -> tuple[list[Row], list[Crossing]]:
    """Rows for each of `counts` and pattern, and where the fastest pattern changes up to the
    largest of them."""
    largest = make_setting(config, "config", max(counts), regions, loss, jitter_seconds, seed)
    message, compute = largest.traffic.payload_bytes, largest.plan.compute_seconds
    rows: list[Row] = []
    fastest: dict[int, Pattern] = {}
    for count in range(2, max(counts) + 1):
        network = Network(
            largest.network.wan, largest.network.regions[:count], jitter_seconds, seed
        )
        fastest[count] = network.fastest(message)
        for pattern in PATTERNS if count in counts else ():
            took = network.exchange(pattern, message)
            rows.append(
                Row(
                    count,
                    pattern,
                    compute + took.seconds,
                    took.seconds,
                    float(took.sent_bytes.mean()),
                    int(took.sent_bytes.max()),
                    float(took.wan_bytes.mean()),
                    pattern == fastest[count],
                )
            )
    steps = zip(fastest, list(fastest)[1:], strict=False)
    changes = [
        Crossing(after, fastest[before], fastest[after])
        for before, after in steps
        if fastest[before] != fastest[after]
    ]
    return rows, changes


def scaling_content(
    rows: Sequence[Row], changes: Sequence[Crossing], config: RunConfig
) -> dict[str, Any]:
    """For JSON."""
    return {
        "method": config.name,
        "wan": config.clock.wan,
        "codec": config.exchange.codec,
        "units": UNITS,
        "changes": [asdict(change) for change in changes],
        "results": [asdict(row) for row in rows],
    }


def print_scaling(content: Mapping[str, Any], console: Console) -> None:
    """Of what `scaling_content` gave."""
    console.print(scaling_table(content))
    for line in scaling_lines(content):
        console.print(line)


def scaling_table(content: Mapping[str, Any]) -> Table:
    """A line a number of slices."""
    rows = content["results"]
    table = new_table()
    table.add_column("\nslices", justify="right")
    for pattern in PATTERNS:
        table.add_column(f"{pattern}\nround", justify="right", no_wrap=True)
        table.add_column("sent\na slice", justify="right", no_wrap=True)
    table.add_column("\nfastest", no_wrap=True)
    for count in sorted({row["slices"] for row in rows}):
        of = {row["pattern"]: row for row in rows if row["slices"] == count}
        cells = [
            (f"{of[p]['round_seconds']:.3g} s", format_bytes(of[p]["sent_bytes"])) for p in PATTERNS
        ]
        best = next(p for p in PATTERNS if of[p]["fastest"])
        table.add_row(str(count), *(cell for pair in cells for cell in pair), best)
    return table


def scaling_lines(content: Mapping[str, Any]) -> list[str]:
    """Where the fastest pattern changes, and what times and bytes are of."""
    lines = [
        f"From {c['slices']} slices on, {c['after']} takes over from {c['before']}."
        for c in content["changes"]
    ]
    return [
        *lines,
        f"Times: modelled clock, {content['wan']}, {content['codec']}; a slice's work stays the "
        "same. Bytes: means over slices.",
    ]


def plot_scaling(content: Mapping[str, Any], path: Target) -> None:
    """Bytes sent and round time over K, a line a pattern; dashed where the fastest one changes."""
    from matplotlib.figure import Figure

    rows, changes = content["results"], content["changes"]
    figure = Figure(figsize=(10, 4.6), dpi=150, layout="constrained")
    figure.suptitle(
        as_text(f"{content['method']}, {content['codec']} over {content['wan']} (modelled clock)")
    )
    sent, seconds = figure.subplots(1, 2)
    for pattern in PATTERNS:
        of = [row for row in rows if row["pattern"] == pattern]
        counts = [row["slices"] for row in of]
        look: dict[str, Any] = {"color": _COLOURS[pattern], "marker": "o", "markersize": 3}
        sent.plot(counts, [row["sent_bytes"] / 1e6 for row in of], label=pattern, **look)
        seconds.plot(counts, [row["round_seconds"] for row in of], label=pattern, **look)
        outside = [row["wan_bytes"] / 1e6 for row in of]
        sent.plot(counts, outside, label=f"{pattern}, to other regions", linestyle=":", **look)
    for axes in (sent, seconds):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.25)
        axes.set(xlabel="slices")
        for change in changes:
            axes.axvline(change["slices"], color="#808080", linewidth=1, linestyle=(0, (4, 3)))
    for change in changes:
        seconds.annotate(
            f" {change['after']} from {change['slices']}",
            (change["slices"], 0.97),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            fontsize="small",
        )
    sent.set(ylabel="MB sent in a round, mean over slices")
    seconds.set(ylabel="seconds a round")
    sent.legend(frameon=False, fontsize="small")
    figure.savefig(path)
