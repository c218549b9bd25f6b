# SPDX-License-Identifier: Apache-2.0
"""What a simulated run came to: rounds in figures, as a table and as JSON.

Invariant: for every slice the shares of compute, straggler wait and WAN wait sum to 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from rich.table import Table

from geojax.simulate.rounds import Round
from geojax.simulate.setting import Setting
from geojax.track.console import format_bytes, format_share
from geojax.track.plots import as_text
from geojax.track.section import Target, new_table

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")

UNITS = {
    "round_seconds": "modelled seconds, mean over rounds",
    "exchange_seconds": "modelled seconds that an exchange is under way, mean over rounds",
    "compute": "share of the run's time, mean over slices",
    "straggler_idle": "share of the run's time, of the slice with most",
    "wan_idle": "share of the run's time, of the slice with most",
    "payload_bytes": "of one slice's message",
    "sent_bytes": "by a slice in a round, mean over slices",
    "most_sent_bytes": "by the slice that sends most, in a round",
    "tokens_per_round": "predicted tokens, over all slices, of the first round",
    "rounds": "to the token budget",
    "hours": "modelled, to the token budget",
    "lag_rounds": "rounds' steps between an exchange's beginning and its result",
}


@dataclass(frozen=True)
class Outcome:
    """A simulated run; units in `UNITS`."""

    method: str
    slices: int
    regions: int
    wan: str
    pattern: str
    overlap: bool
    round_seconds: float
    exchange_seconds: float
    compute: float
    straggler_idle: float
    wan_idle: float
    payload_bytes: int
    sent_bytes: float
    most_sent_bytes: int
    tokens_per_round: int
    rounds: int
    hours: float
    lag_rounds: float


def budget_sequences(setting: Setting) -> int:
    """Sequences that the run's tokens are, rounded up."""
    config = setting.config
    return -(-config.train.total_tokens // config.data.seq_len)


def outcome(setting: Setting, rounds: Sequence[Round], overlap: float) -> Outcome:
    """Of `rounds`; where they end before the tokens do, the rest takes as long as their mean."""
    config, count = setting.config, setting.slices
    whole = rounds[-1].end
    sums = {
        part: [sum(getattr(r, part)[i] for r in rounds) / whole for i in range(count)]
        for part in ("compute", "straggler", "wan")
    }
    done = sum(r.plan.sequences for r in rounds)
    left = max(0, budget_sequences(setting) - done)
    more = -(-left // rounds[-1].plan.sequences)
    round_seconds = whole / len(rounds)
    sent = setting.exchange().sent_bytes
    return Outcome(
        method=config.name,
        slices=count,
        regions=len(set(setting.network.regions)),
        wan=config.clock.wan,
        pattern=setting.pattern,
        overlap=overlap > 0,
        round_seconds=round_seconds,
        exchange_seconds=sum(r.exchange for r in rounds) / len(rounds),
        compute=sum(sums["compute"]) / count,
        straggler_idle=max(sums["straggler"]),
        wan_idle=max(sums["wan"]),
        payload_bytes=setting.traffic.payload_bytes,
        sent_bytes=float(sent.mean()),
        most_sent_bytes=int(sent.max()),
        tokens_per_round=rounds[0].plan.sequences * config.data.seq_len,
        rounds=len(rounds) + more,
        hours=(whole + more * round_seconds) / 3600,
        lag_rounds=overlap,
    )


def outcome_table(results: Mapping[str, Outcome]) -> Table:
    """A line a variant."""
    table = new_table()
    table.add_column("\n", no_wrap=True)
    for heading in (
        "\nround",
        "\nexchange",
        "\ncompute",
        "straggler\nidle",
        "WAN\nidle",
        "sent\na slice",
        "\nrounds",
        "\nhours",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, r in results.items():
        table.add_row(
            name,
            f"{r.round_seconds:.3g} s",
            f"{r.exchange_seconds:.3g} s",
            format_share(r.compute),
            format_share(r.straggler_idle),
            format_share(r.wan_idle),
            format_bytes(r.sent_bytes),
            str(r.rounds),
            f"{r.hours:.3g}",
        )
    return table


def plot_straggler_idle(by_round: Mapping[str, Sequence[float]], path: Target) -> None:
    """A line a variant."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(8, 3.6), dpi=150, layout="constrained")
    figure.suptitle("Straggler idle (modelled clock)")
    axes = figure.subplots()
    for (name, shares), colour in zip(by_round.items(), cycle(_COLOURS)):
        axes.plot(range(1, len(shares) + 1), shares, color=colour, label=as_text(name))
    axes.set(xlabel="round", ylabel="share of the round")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path)
