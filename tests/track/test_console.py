# SPDX-License-Identifier: Apache-2.0
"""A run's lines are aligned, plain outside a terminal, and say what the records say."""

import io

import pytest
from rich.console import Console

from geojax.track.console import RunConsole, format_bytes, format_count, format_seconds
from geojax.track.environment import machine, versions
from geojax.track.summary import load_run


def _print_rounds(run, file, rounds, **options):
    console = Console(file=file, width=80, highlight=False, **options)
    total = run.start["total_tokens"]
    with RunConsole(total, run.start["clock"], console=console) as shown:
        for record in run.rounds[:rounds]:
            shown.round_line(record, [s for s in run.slices if s["round"] == record["round"]])


@pytest.fixture
def run(make_run):
    return load_run(make_run("diloco", rounds=45, balanced=False))


def test_lines_are_aligned_and_fit_80_columns(run):
    file = io.StringIO()
    _print_rounds(run, file, 45)
    lines = file.getvalue().splitlines()
    assert {len(line) for line in lines} == {80}
    assert all(c.isprintable() for line in lines for c in line)


def test_the_heading_returns_every_20_lines(run):
    file = io.StringIO()
    _print_rounds(run, file, 45)
    headings = [i for i, line in enumerate(file.getvalue().splitlines()) if "modelled" in line]
    assert headings == [1, 23, 45]


def test_a_round_line_says_what_the_records_say(run):
    file = io.StringIO()
    _print_rounds(run, file, 2)
    cells = file.getvalue().splitlines()[-1].split()
    straggler, wan = (100 - 100 / 2.57) / 162, 60 / 162
    rate = 4 * 100 * 8 * 1024 / 162
    assert cells[:10] == [
        "2", "6.6M", "3.000", "18.9", "MB", "31.7x", f"{straggler:.1%}", f"{wan:.1%}", "55%", "64%"
    ]  # fmt: skip
    assert cells[10] == format_count(rate)


def test_what_could_not_be_measured_reads_as_a_dash(run):
    file = io.StringIO()
    record = {**run.rounds[0], "sign_agreement": None, "payload_ratio": None}
    slices = [{**s, "loss": None, "captured_energy": None} for s in run.slices[:4]]
    RunConsole(10**9, "measured", console=Console(file=file, width=80)).round_line(record, slices)
    assert file.getvalue().splitlines()[-1].split().count("-") == 5  # and time left, of one round


def test_a_terminal_shows_progress_and_a_log_does_not(run):
    terminal, log = io.StringIO(), io.StringIO()
    _print_rounds(run, terminal, 3, force_terminal=True)
    _print_rounds(run, log, 3, force_terminal=False)
    assert "training" in terminal.getvalue()
    assert "training" not in log.getvalue()
    assert "\x1b" not in log.getvalue()


def test_events_are_printed_as_given(run):
    file = io.StringIO()
    shown = RunConsole(10, "modelled", console=Console(file=file, width=40))
    shown.header("geomesh [seed 0]", [("model", "1.2M"), ("slices [4]", "a, b, c, d")])
    shown.warn("slice [b] was left out of round 3: its update was not finite")
    shown.eval_line(run.evals[-1])
    shown.eval_line({**run.evals[-1], "loss": None, "perplexity": None})
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines[:3] == ["geomesh [seed 0]", "  model       1.2M", "  slices [4]  a, b, c, d"]
    assert lines[3] == "  warning: slice [b] was left out of round 3: its update was not finite"
    assert lines[4] == "  held-out after round 45, 2 h modelled: loss 3.1355, perplexity 23.00"
    assert lines[5].endswith("loss -, perplexity -")


def test_numbers_read_well():
    assert [format_seconds(s) for s in (0, 0.0071, 4.21, 42.3, 510, 3600, 13320)] == [
        "0 s", "7.1 ms", "4.2 s", "42 s", "8.5 min", "1 h", "3.7 h"
    ]  # fmt: skip
    assert [format_count(n) for n in (0, 999, 1.2e6, 3e9)] == ["0", "999", "1.2M", "3.0B"]
    assert format_bytes(18_900_000) == "18.9 MB"


def test_the_environment_is_described():
    assert "cores" in machine()
    assert set(versions()) == {
        "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "geojax"
    }  # fmt: skip
