# SPDX-License-Identifier: Apache-2.0
"""Profiles of depth as tables and a picture.

Invariant: both show what `geojax profile depth` writes into its file, and nothing else.
"""

from collections.abc import Sequence

from rich.table import Table

from geojax.bicache.depth import Depths, ShareProfile
from geojax.track.section import Target, new_table

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_LEAST_KL = 1e-8  # on a logarithmic axis


def depth_table(profile: ShareProfile) -> Table:
    """What reuse below each depth does, at one share of the prefix."""
    table = new_table(
        "depth",
        "key cosine",
        "value cosine",
        "KL",
        "KL, 95 %",
        "same token",
        "worst masks",
    )
    table.title = f"prefix {profile.share:.0%}: cosines of the layer below the depth"
    table.title_justify = "left"
    for depth, effect in enumerate(profile.effects):
        cosines = (profile.key_cosine, profile.value_cosine)
        table.add_row(
            str(depth),
            *(f"{c[depth - 1]:.4f}" if depth else "" for c in cosines),
            f"{effect.kl:.2e}",
            f"{effect.kl_p95:.2e}",
            f"{effect.agreement:.1%}",
            f"{profile.worst_masked[depth]:.0%}",
        )
    return table


def depth_lines(depths: Depths, layers: int) -> list[str]:
    """How deep prefixes are shared, from which share on."""
    return [
        f"prefix of {share:.0%} or more: {depth} of {layers} layers"
        for share, depth in depths.steps
    ]


def plot_profiles(profiles: Sequence[ShareProfile], path: Target) -> None:
    """Cosines by layer, and divergence of predictions by depth, a line a share."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), dpi=120, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for i, profile in enumerate(profiles):
        look = {"label": f"prefix {profile.share:.0%}", "color": _COLOURS[i % len(_COLOURS)]}
        left.plot(profile.key_cosine, "o-", **look)
        middle.plot(profile.value_cosine, "o-", **look)
        right.plot([max(e.kl_p95, _LEAST_KL) for e in profile.effects], "o-", **look)
    left.set(title="keys", xlabel="layer", ylabel="cosine, prefix alone to whole")
    middle.set(title="values", xlabel="layer")
    right.set(title="predictions", xlabel="depth of reuse", ylabel="95th percentile of KL, nats")
    right.set_yscale("log")
    for axes in (left, middle, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
    left.legend()
    figure.savefig(path)
