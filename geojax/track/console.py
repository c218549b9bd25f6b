# SPDX-License-Identifier: Apache-2.0
"""What a run says while it goes on, and how numbers read everywhere.

Invariant: on anything but a terminal the output is plain lines of at most 80 columns, without
control characters, each whole when it appears.
"""

from collections.abc import Iterable, Sequence
from itertools import count

from rich.console import Console
from rich.filesize import decimal, pick_unit_and_suffix
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from geojax.track.metrics import Record

_COLUMNS = (  # heading, over two lines, and width
    ("", "round", 5),
    ("", "tokens", 6),
    ("", "loss", 6),
    ("payload", "a slice", 8),
    ("vs", "fp32", 5),
    ("straggler", "wait", 9),
    ("WAN", "wait", 5),
    ("signs", "agree", 5),
    ("energy", "kept", 6),
    ("tokens/s", "", 8),  # the second line names the clock
    ("time", "left", 7),
)
_STEP_COLUMNS = (
    ("", "step", 7),
    ("", "tokens", 7),
    ("", "loss", 7),
    ("gradient", "norm", 9),
    ("", "skipped", 8),
    ("seconds", "a step", 8),
    ("tokens/s", "", 9),  # the second line names the clock
    ("", "MFU", 6),
    ("time", "left", 8),
)
_NOISE_COLUMNS = (("", "batch", 5), ("", "noise", 6))
_LINES_A_HEADING = 20


class RunConsole:
    """Prints a run: a header, one aligned line an outer step, evaluations and warnings.

    As a context manager it keeps, on a terminal, a progress bar below the lines.
    """

    def __init__(
        self, total_tokens: int, clock: str, tokens: int = 0, console: Console | None = None
    ):
        """`tokens` of `total_tokens` are done already; `clock` is the one that times come from."""
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._lines = count()
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[done]} tokens, time left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
            speed_estimate_period=3600,  # seconds; a round across regions takes minutes
        )
        self._task = self._progress.add_task(
            "training", total=total_tokens, completed=tokens, done=format_count(tokens)
        )

    def __enter__(self) -> "RunConsole":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def header(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Print `title` and, aligned below it, rows of (label, value)."""
        grid = Table.grid(padding=(0, 2))
        for label, value in rows:
            grid.add_row(Text(f"  {label}", style="dim"), Text(value))
        self._print(title, style="bold")
        self._console.print(grid)

    def round_line(self, record: Record, slices: Sequence[Record]) -> None:
        """Print a round's record, with its slices' records, as one line.

        Loss is the mean over tokens; payload and the energy that the codec captured are means over
        slices; waits are the longest of any slice; time left is real time.
        """
        done = self._advance(record["tokens"])
        self._heading(_COLUMNS)
        seconds = record["round_seconds"]
        tokens = sum(s["tokens"] for s in slices)
        losses = [(s["loss"], s["tokens"]) for s in slices if s["loss"] is not None]
        weight = sum(n for _, n in losses)
        energies = [s["captured_energy"] for s in slices if s["captured_energy"] is not None]
        cells = [
            str(record["round"]),
            done,
            f"{sum(x * n for x, n in losses) / weight:.3f}" if weight else "-",
            format_bytes(sum(s["payload_bytes"] for s in slices) / len(slices)),
            "-" if record["payload_ratio"] is None else f"{record['payload_ratio']:.1f}x",
            *(
                format_share(
                    max(s[f"{part}_seconds"] for s in slices) / seconds if seconds else 0.0
                )
                for part in ("straggler", "wan")
            ),
            _percent(record["sign_agreement"]),
            _percent(sum(energies) / len(energies) if energies else None),
            format_count(tokens / seconds) if seconds else "-",
            self._left(),
        ]
        self._print(_row(cells, _COLUMNS))

    def step_line(self, record: Record, work: Record) -> None:
        """Print a round of steps: its record, and the record of the work in it, as one line.

        Loss is the mean over tokens, the gradient norm over steps, before clipping; MFU is the
        share of the GPUs' peak, where that is known.
        """
        done = self._advance(record["tokens"])
        noise = record.get("noise")
        columns = _STEP_COLUMNS if noise is None else (*_STEP_COLUMNS, *_NOISE_COLUMNS)
        self._heading(columns)
        loss, norm = work["loss"], work["grad_norm"]
        cells = [
            str(record["step"]),
            done,
            "-" if loss is None else f"{loss:.4f}",
            "-" if norm is None else f"{norm:.3g}",
            str(work["skipped"]),
            format_seconds(record["round_seconds"] / work["steps"]),
            format_count(record["tokens_per_second"]),
            "-" if record["mfu"] is None else format_share(record["mfu"]),
            self._left(),
        ]
        if noise is not None:
            value = noise["value"]
            known = f">{noise['low']:.3g}" if value is None else f"{value:.3g}"
            cells += [str(work["batch"]), known]
        self._print(_row(cells, columns))

    def eval_line(self, record: Record) -> None:
        """Print an evaluation."""
        loss, perplexity = record["loss"], record["perplexity"]
        bound = f" +- {record['standard_error']:.4f} (a bound)" if record.get("bound") else ""
        self._print(
            f"  held-out after round {record['round']}, {format_seconds(record['seconds'])} "
            f"{self._clock}: loss {'-' if loss is None else f'{loss:.4f}'}{bound}, perplexity "
            f"{'-' if perplexity is None else f'{perplexity:.2f}'}"
        )

    def note(self, text: str) -> None:
        """Print something that happened: a switch of strategy."""
        self._print(f"  {text}", style="cyan")

    def warn(self, text: str) -> None:
        """Print something that the user should know: a slice left out, steps skipped."""
        self._print(f"  warning: {text}", style="yellow")

    def _advance(self, tokens: int) -> str:
        done = format_count(tokens)
        self._progress.update(self._task, completed=tokens, done=done)
        return done

    def _heading(self, columns: Sequence[tuple[str, str, int]]) -> None:
        """The names of `columns`, every so many lines."""
        if next(self._lines) % _LINES_A_HEADING:
            return
        low = [name or (self._clock if top == "tokens/s" else "") for top, name, _ in columns]
        self._print(_row([top for top, _, _ in columns], columns), style="bold")
        self._print(_row(low, columns), style="bold")

    def _left(self) -> str:
        left = self._progress.tasks[0].time_remaining
        return "-" if left is None else format_seconds(left)

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)


def format_bytes(size_bytes: float) -> str:
    """`18.9 MB`, in powers of 1,000."""
    return decimal(round(size_bytes))


def format_count(number: float) -> str:
    """`1.2M`, in powers of 1,000."""
    unit, suffix = pick_unit_and_suffix(round(number), ["", "K", "M", "B", "T"], 1000)
    return f"{number / unit:.1f}{suffix}" if suffix else f"{number:.0f}"


def format_seconds(seconds: float) -> str:
    """`12.4 h`, `8.5 min`, `42 s`, `7 ms` or `3 us`."""
    for unit_seconds, unit in ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if (number := seconds / unit_seconds) >= 1:
            digits = 1 if unit == "h" or number < 10 else 0
            return f"{number:.{digits}f}".removesuffix(".0") + f" {unit}"
    return "0 s"


def format_share(share: float) -> str:
    """`20.9%` for 0.209."""
    return f"{share:.1%}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _row(cells: Iterable[str], columns: Sequence[tuple[str, str, int]]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, (*_, width) in zip(cells, columns, strict=True))
