# SPDX-License-Identifier: Apache-2.0
"""A predicted chain of strategies as tables, a picture, JSON, and a file to train by.

Invariant: all of them show the same figures, in tokens of the plan's sequence length.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from geojax.plan.chain import FIRST_SHARE, Chain, Choice, Noise
from geojax.track.console import format_count, format_seconds

_SHOWN_POINTS = 6  # of measured noise


def columns(name: str, *headings: str) -> Table:
    """An empty table: names on the left, then figures."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(name, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_chain(
    chain: Chain, choices: list[Choice], noise: Noise, seq_len: int, console: Console
) -> None:
    """Its legs, what other choices would take, and what all that rests on."""
    total = format_count(chain.legs[-1].end_sample * seq_len)
    console.print(Text(f"\nChain of a run of {total} tokens, predicted", style="bold"))
    console.print(_leg_table(chain, seq_len))
    console.print(_choice_table(choices, seq_len))
    if noise.points:
        console.print(_noise_table(noise, seq_len))
    for line in _chain_notes(chain, noise, seq_len):
        console.print(Text(line))


def chain_file(chain: Chain, seq_len: int) -> str:
    """The chain as `geojax train --chain` reads it."""
    legs = [
        {"tokens": leg.begin_sample * seq_len, "strategy": leg.option.name} for leg in chain.legs
    ]
    return json.dumps(legs, indent=2) + "\n"


def _sequences(noise: float) -> str:
    """A noise scale to three digits, or one below 0.01."""
    return f"{noise:,.0f}" if noise >= 100 else f"{noise:.{3 if noise >= 0.01 else 1}g}"


def _leg_table(chain: Chain, seq_len: int) -> Table:
    table = columns("strategy", "batch", "tokens", "noise", "step", "time")
    for leg in chain.legs:
        begin, end = (format_count(s * seq_len) for s in (leg.begin_sample, leg.end_sample))
        table.add_row(
            leg.option.name,
            str(leg.option.batch),
            f"{begin}-{end}",
            f"{_sequences(leg.noise_begin)}-{_sequences(leg.noise_end)}",
            format_seconds(leg.option.seconds),
            format_seconds(leg.seconds),
        )
    return table


def _choice_table(choices: list[Choice], seq_len: int) -> Table:
    headings = ("\nbatch", "\ntokens", "time\nmodelled", "over\nchain")
    table = columns("\nfor the same progress", *headings)
    for choice in choices:
        first, last = choice.options[0].batch, choice.options[-1].batch
        table.add_row(
            choice.name,
            str(first) if len(choice.options) == 1 else f"{first} to {last}",
            format_count(choice.samples * seq_len),
            format_seconds(choice.seconds),
            f"{choice.seconds / choices[0].seconds:.3f}",
        )
    return table


def _noise_table(noise: Noise, seq_len: int) -> Table:
    """Some of the points that the noise was fitted to, at equal ratios of their number."""
    table = columns("measured by", "noise", "interval", "fitted")
    shown = np.geomspace(1, len(noise.points), _SHOWN_POINTS).round().astype(int) - 1
    for point in (noise.points[i] for i in np.unique(shown)):
        table.add_row(
            f"{format_count(point.samples * seq_len)} tokens",
            _sequences(point.value),
            f"{_sequences(point.low)}-{'?' if point.high is None else _sequences(point.high)}",
            _sequences(noise.at(point.samples)),
        )
    return table


def _chain_notes(chain: Chain, noise: Noise, seq_len: int) -> list[str]:
    scatter = f"; rounds lie off it by a factor of {noise.spread:.2f}" if noise.points else ""
    lines = [
        "A prediction: step times are modelled, learning rates the best at every batch, and noise "
        f"is {noise.source}: a power law of samples seen{scatter}.",
        f"Progress: {chain.progress[-1]:,.0f} noise-free steps, at a mean noise of "
        f"{_sequences(chain.mean_noise)} sequences; at equal progress all meet the same noise. "
        f"A switch takes {format_seconds(chain.switch_seconds)}.",
    ]
    if noise.points and noise.points[-1].samples < chain.legs[-1].end_sample:
        measured = format_count(noise.points[-1].samples * seq_len)
        lines.append(f"The noise is extrapolated from {measured} tokens on.")
    return lines


def chain_content(
    chain: Chain, choices: list[Choice], noise: Noise, seq_len: int
) -> dict[str, Any]:
    """The same for JSON."""
    total = chain.legs[-1].end_sample
    return {
        "total_tokens": total * seq_len,
        "switch_seconds": chain.switch_seconds,
        "progress": float(chain.progress[-1]),
        "mean_noise": chain.mean_noise,
        "noise": {
            "source": noise.source,
            "first": noise.at(FIRST_SHARE * total),
            "last": noise.at(total),
            "spread": noise.spread if noise.points else None,
            "points": [p._asdict() for p in noise.points],
        },
        "legs": [
            {
                "strategy": leg.option.name,
                "batch": leg.option.batch,
                "step_seconds": leg.option.seconds,
                "begin_tokens": leg.begin_sample * seq_len,
                "end_tokens": leg.end_sample * seq_len,
                "leg_seconds": leg.seconds,
                "noise_begin": leg.noise_begin,
                "noise_end": leg.noise_end,
            }
            for leg in chain.legs
        ],
        "choices": [
            {
                "name": choice.name,
                "strategies": [option.name for option in choice.options],
                "tokens": choice.samples * seq_len,
                "seconds": choice.seconds,
                "ratio": choice.seconds / choices[0].seconds,
            }
            for choice in choices
        ],
    }


def plot_chain(chain: Chain, noise: Noise, seq_len: int, title: str, path: Path) -> None:
    """Write a PNG: the batch in force and the noise scale, over tokens."""
    from matplotlib.figure import Figure

    legs, total = chain.legs, chain.legs[-1].end_sample
    first = max(min(legs[0].end_sample, FIRST_SHARE * total) / 10, 1)
    batches = [leg.option.batch for leg in legs]
    borders = [first * seq_len, *(leg.end_sample * seq_len for leg in legs)]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.step(borders, [batches[0], *batches], color="C0", label="batch of the chain")
    for leg, end in zip(legs, borders[1:], strict=True):
        name = leg.option.name.replace(f"-gb{leg.option.batch}", "")
        place = {"textcoords": "offset points", "fontsize": 7, "ha": "right"}
        axes.annotate(name, (end, leg.option.batch), (-2, 3), **place)
    seen = np.geomspace(first, total, 200)
    scales = [noise.at(s) for s in seen.tolist()]
    axes.plot(seen * seq_len, scales, "--", color="C1", label=f"noise scale, {noise.source}")
    dots = [p for p in noise.points if first <= p.samples <= total]
    x, y = ([p.samples * seq_len for p in dots], [p.value for p in dots])
    axes.plot(x, y, ".", color="0.6", zorder=1, label="measured" if dots else None)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_ylim(
        min([min(batches) / 2, *y]) / 2, 8 * max(*batches, *scales)
    )  # room for the legend
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="tokens seen", ylabel="sequences", title=title)
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(path, dpi=120)
