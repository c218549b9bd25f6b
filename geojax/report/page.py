# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML file.

Invariant: the file loads nothing else and is whole whenever it is read; every text in it is escaped
by the template, pictures apart, whose writer escapes; tables are those that a terminal prints.
"""

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from geojax.report.svg import inline_svg
from geojax.track.metrics import write_atomically
from geojax.track.section import Section

_RELOAD = "setInterval(() => { if (!document.hidden) location.reload(); }, %d);"


@dataclass(frozen=True)
class Cell:
    text: str
    style: str
    """Classes of the element."""


def write_page(
    path: Path, sections: Sequence[Section], waiting: Sequence[str], reload_seconds: float | None
) -> None:
    """Write `sections`, and what is waited for, as a page that loads itself again every
    `reload_seconds`, unless they are None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(sections, waiting, reload_seconds))


def page(
    sections: Sequence[Section], waiting: Sequence[str] = (), reload_seconds: float | None = None
) -> str:
    """The HTML."""
    script = "" if reload_seconds is None else _RELOAD % max(round(1000 * reload_seconds), 100)
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.from_string(files("geojax.report").joinpath("page.html").read_text())
    shown = [_shown(section, number) for number, section in enumerate(sections, 1)]
    return template.render(
        sections=shown,
        waiting=list(waiting),
        now=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        live=script != "",
        script=Markup(script),
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
    )


def _shown(section: Section, number: int) -> dict[str, Any]:
    """What the template shows of a section."""
    return {
        "id": f"section-{number}",
        "title": section.title,
        "live": section.live,
        "inner": bool(section.lead),
        "facts": section.facts,
        "config": section.config,
        "blocks": [
            {"heading": b.heading, "notes": b.notes, "table": b.table and _table(b.table)}
            for b in section.blocks
        ],
        "pictures": [
            {"about": p.about, "svg": Markup(inline_svg(p, f"s{number}-{i}-"))}
            for i, p in enumerate(section.pictures)
        ],
    }


def _table(table: Table) -> dict[str, Any]:
    """Its texts as a terminal shows them, but for where lines break."""
    styles = [
        " ".join(["right"] * (c.justify == "right") + ["whole"] * c.no_wrap) for c in table.columns
    ]
    columns = [[_plain(cell) for cell in column.cells] for column in table.columns]
    return {
        "title": _plain(table.title or ""),
        "caption": _plain(table.caption or ""),
        "head": _row((_plain(c.header) for c in table.columns), styles),
        "rows": [_row(cells, styles) for cells in zip(*columns, strict=True)],
    }


def _row(cells: Iterable[str], styles: Sequence[str]) -> list[Cell]:
    return [Cell(text, style) for text, style in zip(cells, styles, strict=True)]


def _plain(cell: Any) -> str:
    text = cell.plain if isinstance(cell, Text) else str(cell)
    return re.sub(r"\s+", " ", text).strip()
