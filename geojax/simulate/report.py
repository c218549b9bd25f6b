# SPDX-License-Identifier: Apache-2.0
"""Figures of the modelled clock as JSON, with what is needed to read them."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from geojax.track.environment import versions
from geojax.track.metrics import to_json, write_atomically


def write_figures(path: Path, content: dict[str, Any], console: Console) -> None:
    """Write `content`, and say where."""
    about = {
        "generated": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "clock": "modelled",
    }
    write_atomically(path, json.dumps(to_json(about | content), indent=2, allow_nan=False) + "\n")
    console.print(f"wrote {path}", soft_wrap=True)
