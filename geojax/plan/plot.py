# SPDX-License-Identifier: Apache-2.0
"""A plan as a picture: throughput over the global batch, and the memory of what leads."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from geojax.meshes.candidates import Candidate, Job, frontier


def plot_plan(candidates: Sequence[Candidate], job: Job, title: str, path: Path) -> None:
    """Write a PNG: every candidate as a dot, the fastest of each batch joined and named; below it
    the memory of those, against what can be used."""
    best = frontier(candidates)
    figure = Figure(figsize=(9, 7), layout="constrained")
    speed, memory = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    batches = [c.strategy.global_batch for c in candidates]
    speed.scatter(
        batches, [c.samples_per_second for c in candidates], s=10, color="0.7", label="fits"
    )
    x = [c.strategy.global_batch for c in best]
    speed.plot(x, [c.samples_per_second for c in best], "o-", color="C0", label="fastest")
    for candidate in best:
        s = candidate.strategy
        name = str(s).replace(f"-gb{s.global_batch}", "")
        place = (s.global_batch, candidate.samples_per_second)
        above = {"textcoords": "offset points", "fontsize": 7, "ha": "center"}
        speed.annotate(name.replace("-mb", "\nmb"), place, (0, 7), **above)
    speed.set_xscale("log", base=2)
    speed.set_ylim(0, 1.2 * max(c.samples_per_second for c in best))
    speed.set_xlim(x[0] / 1.5, x[-1] * 1.5)  # a single batch would have no width
    speed.set_ylabel("samples a second (modelled)")
    speed.set_title(title)
    speed.legend(loc="lower left")
    sizes = [c.memory_bytes / 1e9 for c in best]
    colors = ["C0" if c.exact else "C1" for c in best]
    memory.vlines(x, 0, sizes, color=colors, linewidth=6)
    memory.axhline(job.usable_bytes / 1e9, color="0.3", linestyle="--", label="usable")
    memory.plot([], [], color="C0", linewidth=6, label="counted by the compiler")
    memory.plot([], [], color="C1", linewidth=6, label="estimated")
    memory.set_ylim(0, 1.5 * job.usable_bytes / 1e9)
    memory.set_ylabel("GB a GPU")
    memory.set_xlabel("global batch (sequences)")
    memory.set_xticks(x, [str(batch) for batch in x])
    memory.minorticks_off()
    memory.legend(loc="upper right", fontsize=8, ncols=3)
    figure.savefig(path, dpi=120)
