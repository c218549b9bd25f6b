# SPDX-License-Identifier: Apache-2.0
"""Pictures of runs, as PNG files.

Invariant: a picture shows all its runs on the same axes, in the same order and colours, and says
which clock its times are from. Figures belong to no global state, so any thread may draw.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geojax.track.console import format_seconds
from geojax.track.summary import PARTS, Run, crossing, labels

if TYPE_CHECKING:  # at run time imported where drawn: it takes most of a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_RUN_LINES = ("-", "--", ":", "-.")
_RUN_MARKERS = "osD^vPX"
_PARTS = {  # name, colour, and colour of text upon it
    "compute": ("compute", "#0072B2", "white"),
    "straggler": ("straggler wait", "#E69F00", "black"),
    "wan": ("WAN wait", "#CC79A7", "black"),
    "outer": ("outer step", "#404040", "white"),
}
_LEGEND_COLUMNS = 2
_TOP_OVER_BEST = 6  # perplexities above this many times the best are not shown: the first drop


def plot_perplexity(runs: Sequence[Run], path: Path | str, target: float) -> None:
    """Held-out perplexity over time and over tokens; a star where a run reaches `target`."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    legend_rows = -(-len(runs) // _LEGEND_COLUMNS)
    figure = _figure(10, 4.8 + 0.2 * legend_rows, f"Held-out perplexity ({_clock(runs)})")
    over_time, over_tokens = figure.subplots(1, 2, sharey=True)
    unit_seconds, unit = _time_unit(max(run.seconds for run in runs))
    for index, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        points = [e for e in run.evals if e["perplexity"] is not None]
        perplexities = [e["perplexity"] for e in points]
        seconds, tokens = crossing(run, target) or (None, None)
        look: dict[str, Any] = {
            "color": _RUN_COLOURS[index % len(_RUN_COLOURS)],
            "marker": _RUN_MARKERS[index % len(_RUN_MARKERS)],
            "linestyle": _RUN_LINES[index // len(_RUN_COLOURS) % len(_RUN_LINES)],
            "markersize": 3.5,
            "label": f"{label}: {'not reached' if seconds is None else format_seconds(seconds)}",
        }
        over_time.plot([e["seconds"] / unit_seconds for e in points], perplexities, **look)
        over_tokens.plot([e["tokens"] for e in points], perplexities, **look)
        if seconds is not None:
            star = {"s": 220, "color": look["color"], "edgecolor": "white", "zorder": 3}
            over_time.scatter(seconds / unit_seconds, target, marker="*", **star)
            over_tokens.scatter(tokens, target, marker="*", **star)
    for axes in (over_time, over_tokens):
        axes.axhline(target, color="#404040", linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
    over_time.set_yscale("log")
    over_time.set_ylim(*_perplexity_limits(runs, target))
    over_time.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 7)))
    over_time.yaxis.set_minor_locator(NullLocator())
    over_time.yaxis.set_major_formatter("{x:g}")
    over_time.set(xlabel=f"time ({unit})", ylabel="perplexity")
    over_tokens.set(xlabel="tokens, over all slices")
    over_tokens.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(
        *over_time.get_legend_handles_labels(),
        title=f"time to perplexity {target:.4g}",
        loc="outside lower center",
        ncols=_LEGEND_COLUMNS,
        frameon=False,
        fontsize="small",
    )
    figure.savefig(path)


def plot_chain(run: Run, path: Path | str) -> None:
    """The batch in force over the run's tokens, and the noise scale with its interval."""
    batches = [record["batch"] for record in run.slices]
    tokens = [record["tokens"] for record in run.rounds]
    figure = _figure(9, 4.8, f"{run.name}: chain of strategies")
    axes = figure.subplots()
    axes.step([0, *tokens], [batches[0], *batches], color=_RUN_COLOURS[0], label="batch")
    known = [(t, r["noise"]) for t, r in zip(tokens, run.rounds, strict=True) if r.get("noise")]
    at = [t for t, _ in known]
    noise = [n["value"] or n["low"] for _, n in known]
    axes.plot(at, noise, color=_RUN_COLOURS[1], label="noise scale of the gradient")
    low, high = ([n[end] or n["low"] for _, n in known] for end in ("low", "high"))
    axes.fill_between(at, low, high, color=_RUN_COLOURS[1], alpha=0.2, label="its 95 % interval")
    # Names of stays that last; trials are seen as spikes.
    shown, begin = "", 0.0
    for record, end, batch in zip(run.rounds, tokens, batches, strict=True):
        if record["strategy"] != shown:
            shown, begin = record["strategy"], end
        elif end - begin > tokens[-1] / 10:
            name, begin = shown.replace(f"-gb{batch}", ""), float("inf")
            axes.annotate(name, (end, batch), (0, 4), textcoords="offset points", fontsize=7)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="tokens", ylabel="sequences", xlim=(0, tokens[-1]))
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(path)


def plot_gantt(runs: Sequence[Run], path: Path | str, rounds: int = 3) -> None:
    """What each slice did in the first `rounds` rounds, on one time axis for all runs."""
    until = max(run.rounds[:rounds][-1]["seconds"] for run in runs)
    unit_seconds, unit = _time_unit(until)
    figure, panels = _panels(runs, f"The first {rounds} rounds ({_clock(runs)})")
    for run, axes in zip(runs, panels, strict=True):
        begins = {r["round"]: r["seconds"] - r["round_seconds"] for r in run.rounds[:rounds]}
        for record in run.slices:
            if record["round"] in begins:
                parts = {part: record[f"{part}_seconds"] / unit_seconds for part in PARTS}
                begin = record.get("begin_seconds", begins[record["round"]])
                _stack(axes, record["slice"], parts, begin / unit_seconds)
        for record in run.rounds[:rounds]:
            axes.axvline(record["seconds"] / unit_seconds, color="black", linewidth=1)
    panels[-1].set(xlabel=f"time ({unit})", xlim=(0, until / unit_seconds * 1.01))
    figure.savefig(path)


def plot_idle(runs: Sequence[Run], path: Path | str) -> None:
    """How each slice's time divides into compute and waits, over the whole run."""
    from matplotlib.ticker import PercentFormatter

    figure, panels = _panels(runs, f"Where each slice's time goes ({_clock(runs)})")
    for run, axes in zip(runs, panels, strict=True):
        for name, parts in run.shares().items():
            _stack(axes, name, parts, shares=True)
    panels[-1].set(xlabel="share of the run's time", xlim=(0, 1))
    panels[-1].xaxis.set_major_formatter(PercentFormatter(1))
    figure.savefig(path)


def _figure(width_inches: float, height_inches: float, title: str) -> "Figure":
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)  # inches
    figure = Figure(figsize=(width_inches, height_inches), dpi=150, layout=layout)
    figure.suptitle(title)
    return figure


def _panels(runs: Sequence[Run], title: str) -> tuple["Figure", list["Axes"]]:
    """One panel a run, with a row a slice, above one shared axis; the legend at the bottom."""
    from matplotlib.patches import Patch

    rows = [len(run.shares()) for run in runs]
    figure = _figure(10, 1.6 + 0.32 * sum(rows) + 0.36 * len(runs), title)
    panels = list(figure.subplots(len(runs), sharex=True, height_ratios=rows, squeeze=False).flat)
    for axes, label in zip(panels, labels(runs), strict=True):
        axes.set_title(label, loc="left", fontsize="medium", fontweight="bold")
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(color=colour, label=name) for name, colour, _ in _PARTS.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure, panels


def _stack(
    axes: "Axes", name: str, parts: Mapping[str, float], left: float = 0, shares: bool = False
) -> None:
    for part, width in parts.items():
        _, colour, text = _PARTS[part]
        bar = axes.barh(name, width, left=left, height=0.76, color=colour)
        if shares and width >= 0.04:  # narrower ones have no room for a figure
            axes.bar_label(bar, [f"{width:.0%}"], label_type="center", color=text, fontsize=8)
        left += width


def _perplexity_limits(runs: Sequence[Run], target: float) -> tuple[float, float]:
    seen = [e["perplexity"] for run in runs for e in run.evals if e["perplexity"] is not None]
    low = min([*seen, target])
    top = min(max(seen), max(_TOP_OVER_BEST * low, *(run.final_perplexity for run in runs)))
    return low / 1.06, max(top, target) * 1.06


def _time_unit(seconds: float) -> tuple[int, str]:
    if seconds >= 3600:
        return 3600, "hours"
    return (60, "minutes") if seconds >= 60 else (1, "seconds")


def _clock(runs: Sequence[Run]) -> str:
    return " and ".join(dict.fromkeys(run.start["clock"] for run in runs)) + " clock"
