# SPDX-License-Identifier: Apache-2.0
"""The methods of the experiment on CONA in one picture.

Invariant: all on the same axes, over the modelled clock, which the title names.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from geojax.bench.cona_curves import Curve
from geojax.bench.cona_methods import Setting

_COLOURS = ("#D55E00", "#000000", "#CC79A7", "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#7F7F7F")
_FIRST_SHARE = 0.03  # of the longest run's time, before which curves fall too far to be told apart


def plot_methods(curves: Mapping[str, Curve], path: Path, base: Setting) -> None:
    """Held-out perplexity over time, a line a method, CONA's on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), dpi=150, layout="constrained")
    clock = base.config.clock
    figure.suptitle(
        f"{base.name}: real training, times of {clock.model} on {clock.gpus_per_node} A100s "
        "(modelled clock)"
    )
    axes = figure.subplots()
    begin = _FIRST_SHARE * max(curve.end for curve in curves.values())
    for (name, curve), colour in zip(curves.items(), _COLOURS, strict=False):
        points = [(s, math.exp(x)) for s, x in zip(curve.seconds, curve.losses, strict=True)]
        x, y = zip(*[p for p in points if p[0] >= begin], strict=True)
        axes.plot(
            x,
            y,
            color=colour,
            label=name,
            marker="o",
            markersize=2.5,
            linewidth=2.4 if name == "CONA" else 1.2,
            zorder=3 if name == "CONA" else 2,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set(xlabel="seconds of the modelled clock", ylabel="held-out perplexity", xlim=(0, None))
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path)
