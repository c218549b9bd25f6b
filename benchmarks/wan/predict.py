# SPDX-License-Identifier: Apache-2.0
"""What the planner and the modelled clock say of runs here, beside what the runs took.

Nothing of the runs themselves is in a prediction: steps and the fixed part of an exchange are the
calibration's, five rounds of DiLoCo over links that are not scaled; links are those of the WAN
file, scaled. Plans and rounds are those of `geojax plan` and `geojax simulate`. One thing differs:
here every pair of slices has links of its own, so an exchange takes what its slowest link takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.wan.calibrate import Calibration, link_seconds
from benchmarks.wan.preset import method
from benchmarks.wan.world import read_wan
from geojax.config import RunConfig
from geojax.configs.geomesh import DEMO_INNER_STEPS
from geojax.geomesh.balance import Option, SliceProfile, make_plan
from geojax.geomesh.clock import traffic
from geojax.simulate.rounds import run_rounds
from geojax.simulate.speeds import Speeds
from geojax.track.section import new_table
from geojax.track.summary import Run


@dataclass(frozen=True)
class Rounds:
    """Of a run, predicted or measured."""

    seconds: float
    """Of the whole run."""
    round_seconds: float
    """Mean over rounds."""
    straggler_idle: float
    """Share of the run, of the slice with most."""
    wan_idle: float
    sent_bytes: float
    """In messages by all slices in a round, mean over rounds."""


def predict(calibration: Calibration, config: RunConfig) -> Rounds:
    """ConfigError where no plan fits."""
    aim, batches = calibration.aim, config.slice_batches
    shares, timed = aim.shares, max(method("diloco", slices=aim.slices).slice_batches)
    slowest = calibration.compute_seconds / DEMO_INNER_STEPS / timed  # a sequence
    profiles = [
        SliceProfile(
            s.name, tuple(Option(b, slowest * b * min(shares) / share, 0) for b in batches), None
        )
        for s, share in zip(config.slices, shares, strict=True)
    ]
    moved, wan = traffic(config), read_wan(aim.wan)
    link = link_seconds(config, wan, moved.payload_bytes) / calibration.rate_scale
    outer = calibration.outer_seconds
    exchange = calibration.fixed_seconds - outer + link
    plan = make_plan(profiles, config.balance, exchange)
    rounds = run_rounds(
        plan,
        -(-config.train.total_tokens // config.data.seq_len),
        lambda number: exchange,
        Speeds([s.name for s in config.slices], ()),
        config.exchange.overlap,
    )
    # With overlap too the outer step is nobody's wait, and takes a slice's time.
    whole, count = rounds[-1].end + outer * len(rounds), len(config.slices)
    return Rounds(
        whole,
        whole / len(rounds),
        max(sum(r.straggler[i] for r in rounds) for i in range(count)) / whole,
        max(sum(r.wan[i] for r in rounds) for i in range(count)) / whole,
        moved.payload_bytes * count * (count - 1),
    )


def measured(run: Run) -> Rounds:
    count, shares = len(run.rounds), run.shares().values()
    return Rounds(
        run.seconds,
        run.seconds / count,
        max(parts["straggler"] for parts in shares),
        max(parts["wan"] for parts in shares),
        sum(record["sent_bytes"] for record in run.slices) / count,
    )


def prediction_table(pairs: Mapping[str, tuple[Rounds, Rounds]]) -> Table:
    """A method a line: predicted, then measured, then how far off."""
    shown = new_table(
        "method", "round", "straggler idle", "WAN idle", "bytes a round", "furthest off"
    )
    for name, (said, found) in pairs.items():
        shown.add_row(
            name,
            f"{said.round_seconds:.2f} / {found.round_seconds:.2f} s",
            f"{said.straggler_idle:.1%} / {found.straggler_idle:.1%}",
            f"{said.wan_idle:.1%} / {found.wan_idle:.1%}",
            f"{said.sent_bytes:,.0f} / {found.sent_bytes:,.0f}",
            f"{furthest(said, found):.1%}",
        )
    return shown


def furthest(said: Rounds, found: Rounds) -> float:
    """The largest of the relative differences of seconds and bytes, and of the differences of
    shares of the run's time."""
    return max(
        abs(said.round_seconds / found.round_seconds - 1),
        abs(said.sent_bytes / found.sent_bytes - 1),
        abs(said.straggler_idle - found.straggler_idle),
        abs(said.wan_idle - found.wan_idle),
    )


def mean_of(runs: Sequence[Rounds]) -> Rounds:
    """Over seeds."""
    columns = zip(*(vars(r).values() for r in runs), strict=True)
    return Rounds(*(sum(column) / len(runs) for column in columns))
