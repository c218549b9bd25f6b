# SPDX-License-Identifier: Apache-2.0
"""Figures of the modelled clock as JSON, with what is needed to read them."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from geojax.track.environment import made_by
from geojax.track.metrics import to_json, write_atomically


def write_figures(path: Path, content: dict[str, Any], console: Console) -> None:
    """Write `content`, and say where."""
    content = made_by("modelled") | content
    write_atomically(path, json.dumps(to_json(content), indent=2, allow_nan=False) + "\n")
    console.print(f"wrote {path}", soft_wrap=True)
