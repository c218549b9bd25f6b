# SPDX-License-Identifier: Apache-2.0
"""Pictures of runs, as files: PNG, or what matplotlib is set to.

Invariant: a picture shows all its runs on the same axes, in the same order and colours, and says
which clock its times are from. Figures belong to no global state, so any thread may draw. Names
are drawn as they are: none is read as a formula, or left out.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from geojax.track.chain import Score, scores, stays
from geojax.track.console import format_seconds
from geojax.track.section import Target
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
    "straggler": ("straggler wait", "#E69F00", "#111111"),
    "wan": ("WAN wait", "#CC79A7", "#111111"),
    "outer": ("outer step", "#707070", "white"),
}
_LINE = "#808080"  # of what is no run: seen on white and on black
_LEGEND_COLUMNS = 2
_TOP_OVER_BEST = 6  # perplexities above this many times the best are not shown: the first drop
_MOST_POINTS = 1000  # of a line: more are no wider than a pixel
_NAME_WIDTH = 0.18  # of a strategy, as a share of the chain's axis
_SCORES = (0.2, 5.0)  # over the present strategy's, that are shown


def plot_perplexity(
    runs: Sequence[Run], path: Target, target: float, names: Sequence[str] = ()
) -> None:
    """Held-out perplexity over time and over tokens; a star where a run reaches `target`.

    Of all pictures: `names` of the runs, by default the shortest that tell them apart.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    legend_rows = -(-len(runs) // _LEGEND_COLUMNS)
    figure = _figure(10, 4.8 + 0.2 * legend_rows, f"Held-out perplexity ({_clock(runs)})")
    over_time, over_tokens = figure.subplots(1, 2, sharey=True)
    unit_seconds, unit = _time_unit(max(run.seconds for run in runs))
    for index, (run, label) in enumerate(zip(runs, _texts(runs, names), strict=True)):
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
        axes.axhline(target, color=_LINE, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
    over_time.set_yscale("log")
    over_time.set_ylim(*_perplexity_limits(runs, target))
    over_time.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 7)))
    over_time.yaxis.set_minor_locator(NullLocator())
    over_time.yaxis.set_major_formatter("{x:g}")
    over_time.set(xlabel=f"time ({unit})", ylabel="perplexity")
    over_tokens.set(xlabel="tokens, over all slices")
    over_tokens.xaxis.set_major_formatter(_thousands())
    figure.legend(
        *over_time.get_legend_handles_labels(),
        title=f"time to perplexity {target:.4g}",
        loc="outside lower center",
        ncols=_LEGEND_COLUMNS,
        frameon=False,
        fontsize="small",
    )
    figure.savefig(path)


def plot_chain(run: Run, path: Target) -> None:
    """The batch in force over the run's tokens, and the noise scale with its interval; where
    decisions were made, below it what the best strategy of each batch scored in them."""
    scored = scores(run)
    figure = _figure(9, 7.6 if scored else 4.8, as_text(f"{run.name}: chain of strategies"))
    panels = figure.subplots(2 if scored else 1, sharex=True, squeeze=False).flat
    _draw_chain(panels[0], run)
    if scored:
        _draw_scores(panels[1], scored, run)
    panels[-1].set(xlabel="tokens", xlim=(0, run.rounds[-1]["tokens"]))
    panels[-1].xaxis.set_major_formatter(_thousands())
    figure.savefig(path)


def _draw_chain(axes: "Axes", run: Run) -> None:
    batches = [record["batch"] for record in run.slices]
    tokens = [record["tokens"] for record in run.rounds]
    axes.step([0, *tokens], [batches[0], *batches], color=_RUN_COLOURS[0], label="batch")
    known = [(t, r["noise"]) for t, r in zip(tokens, run.rounds, strict=True) if r.get("noise")]
    known = _thin(known)
    at = [t for t, _ in known]
    noise = [n["value"] or n["low"] for _, n in known]
    axes.plot(at, noise, color=_RUN_COLOURS[1], label="noise scale of the gradient")
    low, high = ([n[end] or n["low"] for _, n in known] for end in ("low", "high"))
    axes.fill_between(at, low, high, color=_RUN_COLOURS[1], alpha=0.2, label="its 95 % interval")
    # Names of stays that last, where they have room; trials are seen as spikes.
    room, free = _NAME_WIDTH * tokens[-1], dict.fromkeys(batches, 0.0)
    for stay in stays(run):
        late = stay.begin_tokens > tokens[-1] - room  # its name ends with it, inside the picture
        begin = stay.end_tokens - room if late else stay.begin_tokens
        if stay.end_tokens - stay.begin_tokens > tokens[-1] / 10 and begin >= free[stay.batch]:
            free[stay.batch] = begin + room
            axes.annotate(
                as_text(re.sub(r"-gb\d+", "", stay.strategy)),
                (stay.end_tokens if late else stay.begin_tokens, stay.batch),
                (-3 if late else 3, 4),
                textcoords="offset points",
                ha="right" if late else "left",
                fontsize=7,
            )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(ylabel="sequences")
    axes.legend(loc="upper left", fontsize=8)


def _draw_scores(axes: "Axes", scored: Sequence[Score], run: Run) -> None:
    """A line a batch, with the interval that the noise leaves."""
    batches = sorted({score.batch for score in scored})
    for index, batch in enumerate(batches):
        of = _thin([score for score in scored if score.batch == batch])
        at, colour = [score.tokens for score in of], _RUN_COLOURS[index % len(_RUN_COLOURS)]
        look: dict[str, Any] = {"color": colour, "marker": ".", "markersize": 3}
        axes.plot(at, [s.score for s in of], linewidth=1, label=f"batch {batch}", **look)
        axes.fill_between(
            at, [s.low for s in of], [s.high for s in of], color=colour, alpha=0.12, linewidth=0
        )
    axes.axhline(1, color=_LINE, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_yscale("log", base=2)
    seen = [score.score for score in scored]
    axes.set_ylim(max(min(seen) / 1.2, _SCORES[0]), min(max(seen) * 1.2, _SCORES[1]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(ylabel="score over the present strategy's")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)


def plot_gantt(
    runs: Sequence[Run], path: Target, rounds: int = 3, names: Sequence[str] = ()
) -> None:
    """What each slice did in the first `rounds` rounds, on one time axis for all runs."""
    until = max(run.rounds[:rounds][-1]["seconds"] for run in runs)
    unit_seconds, unit = _time_unit(until)
    figure, panels = _panels(runs, names, f"The first {rounds} rounds ({_clock(runs)})")
    for run, axes in zip(runs, panels, strict=True):
        begins = {r["round"]: r["seconds"] - r["round_seconds"] for r in run.rounds[:rounds]}
        for record in run.slices:
            if record["round"] in begins:
                parts = {part: record[f"{part}_seconds"] / unit_seconds for part in PARTS}
                begin = record.get("begin_seconds", begins[record["round"]])
                _stack(axes, as_text(record["slice"]), parts, begin / unit_seconds)
        for record in run.rounds[:rounds]:
            axes.axvline(record["seconds"] / unit_seconds, color="black", linewidth=1)
    panels[-1].set(xlabel=f"time ({unit})", xlim=(0, until / unit_seconds * 1.01))
    figure.savefig(path)


def plot_idle(runs: Sequence[Run], path: Target, names: Sequence[str] = ()) -> None:
    """How each slice's time divides into compute and waits, over the whole run."""
    from matplotlib.ticker import PercentFormatter

    figure, panels = _panels(runs, names, f"Where each slice's time goes ({_clock(runs)})")
    for run, axes in zip(runs, panels, strict=True):
        for name, parts in run.shares().items():
            _stack(axes, as_text(name), parts, shares=True)
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


def _panels(runs: Sequence[Run], names: Sequence[str], title: str) -> tuple["Figure", list["Axes"]]:
    """One panel a run, with a row a slice, above one shared axis; the legend at the bottom."""
    from matplotlib.patches import Patch

    rows = [len(run.shares()) for run in runs]
    figure = _figure(10, 1.6 + 0.32 * sum(rows) + 0.36 * len(runs), title)
    panels = list(figure.subplots(len(runs), sharex=True, height_ratios=rows, squeeze=False).flat)
    for axes, label in zip(panels, _texts(runs, names), strict=True):
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


def as_text(name: str) -> str:
    """`name` as matplotlib draws it as it is: no formula, and no label that legends leave out."""
    name = name.replace("$", r"\$").replace("\n", " ")
    return f" {name}" if name.startswith("_") else name


def _texts(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    return [as_text(name) for name in names or labels(runs)]


def _thin[T](points: Sequence[T]) -> Sequence[T]:
    """Every so many of them, and the last."""
    every = -(-len(points) // _MOST_POINTS) or 1
    return [*points[:-1:every], *points[-1:]]


def _thousands() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")


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
