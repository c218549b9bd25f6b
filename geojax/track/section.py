# SPDX-License-Identifier: Apache-2.0
"""A part of a report: tables, notes and pictures, before anything is printed or drawn.

Invariant: a figure is turned into text once, in the cell or the note that holds it. Terminal and
page show those; neither computes any.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

type Target = Path | str | BinaryIO


@dataclass(frozen=True)
class Picture:
    """Drawn when it is asked for."""

    name: str
    """Of its file, without an ending."""
    about: str
    """What it shows."""
    draw: Callable[[Target], None]


@dataclass(frozen=True)
class Block:
    """A table and what to know of it."""

    heading: str = ""
    table: Table | None = None
    notes: tuple[str, ...] = ()
    aside: bool = False
    """On the page alone."""


@dataclass(frozen=True)
class Section:
    """What there is to say of one run, of runs side by side, or of one file of results."""

    title: str
    blocks: tuple[Block, ...]
    pictures: tuple[Picture, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    """(label, value): of what it is and what made it, on the page alone."""
    config: str = ""
    """JSON, on the page alone."""
    lead: str = ""
    """What a terminal, where sections have no frame, writes before headings and notes."""
    live: bool = False
    """Whether it may change."""


def new_table(*headings: str) -> Table:
    """Names on the left, then figures."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def new_console() -> Console:
    """What is printed is shown as it is: no name in it is markup."""
    return Console(highlight=False, markup=False, emoji=False)


def print_sections(sections: Iterable[Section], console: Console) -> None:
    for section in sections:
        for block in section.blocks:
            if block.aside:
                continue
            if block.heading:
                console.print(Text(f"\n{section.lead}{block.heading}", style="bold"))
            if block.table is not None:
                console.print(block.table)
            for note in block.notes:
                console.print(Text(section.lead + note))


def save_pictures(sections: Sequence[Section], folder: Path) -> list[Path]:
    """PNG files in `folder`, which is made; of two of one name the second gets a number."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for picture in (p for section in sections for p in section.pictures):
        name, number = re.sub(r"[^\w.+ -]", "-", picture.name), 1
        path = folder / f"{name}.png"
        while path in written:
            number += 1
            path = folder / f"{name}-{number}.png"
        picture.draw(path)
        written.append(path)
    return written
