# SPDX-License-Identifier: Apache-2.0
"""A run's `metrics.jsonl`: one strict JSON object a line, with the field `kind`.

Kinds are `start`, `slice`, `round`, `eval` and `end`, and where strategies change `decision` (of
slices: `plan`), `switch` and `refused`; all but `start` carry the number of their `round`.
Invariant: whatever kills a run, its file holds whole records, but for a last line without its
newline, which readers pass over and the next writer removes.
"""

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args

from geojax.config import ConfigError, require

type Record = dict[str, Any]
_NUMBERS = {
    "slice": ("round", "compute_seconds", "straggler_seconds", "wan_seconds", "outer_seconds"),
    "round": ("round", "tokens", "seconds", "round_seconds"),
    "eval": ("round", "tokens", "seconds"),
    "switch": ("round", "switch_seconds"),
}
_OTHERS = {
    "start": ("method", "clock", "seed"),
    "slice": ("slice",),
    "eval": ("loss", "perplexity"),
    **dict.fromkeys(("refused", "decision", "plan"), ("round",)),
}
_NEW_FILE = "a file that a command writes when it has done its work"
NewFile = Annotated[Path, _NEW_FILE]
"""An option of such a file; `require_writable` looks at it before the work."""
_NEW_FOLDER = "a folder that a command writes files into"
NewFolder = Annotated[Path, _NEW_FOLDER]


class MetricsWriter:
    """Appends records to a JSONL file, each flushed when `write` returns."""

    def __init__(self, path: Path | str):
        """Open `path`, new or not, and remove a torn last line.

        Raises ConfigError where the file holds a bad line.
        """
        self._path = Path(path)
        if self._path.exists() and not self._path.read_bytes().endswith(b"\n"):
            self._replace(read_records(self._path))
        else:
            self._open()

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record. NumPy and JAX scalars become numbers; NaN and infinities null."""
        self._file.write(_line({"kind": kind, **fields}))
        self._file.flush()

    def rewind(self, round: int, slices: Sequence[str] | None = None) -> None:
        """Forget what came after `round`: keep the first start record and records up to `round`.

        Called on resume from the checkpoint of `round`, so that each round is recorded once; the
        end is forgotten too, for a resumed run ends again. `slices`: names of the checkpoint's;
        where the run went on with others from there, and nothing of that was saved, this is
        forgotten too. The file is replaced in one step.
        """
        records = read_records(self._path)
        start = next((r for r in records if r["kind"] == "start"), None)
        kept = [
            r
            for r in records
            if r is start or (r["kind"] != "end" and r.get("round", math.inf) <= round)
        ]
        changes = [i for i, r in enumerate(kept) if r["kind"] == "slices" and r["round"] == round]
        while slices is not None and changes and kept[changes[-1]]["to"] != list(slices):
            del kept[changes.pop()]
        self._file.close()
        self._replace(kept)

    def clear(self) -> None:
        """Forget everything; called by a run that starts over."""
        self._file.close()
        self._replace([])

    def close(self) -> None:
        """Close the file; a closed writer cannot write."""
        self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        self._file = self._path.open("a", encoding="utf-8")

    def _replace(self, records: list[Record]) -> None:
        write_atomically(self._path, "".join(map(_line, records)))
        self._open()


def read_records(path: Path | str) -> list[Record]:
    """Records of a JSONL file in order, without a last line that was cut in the middle of a write.

    Raises ConfigError, naming file and line, for any other line that is not a record.
    """
    *lines, last = Path(path).read_bytes().split(b"\n")
    records = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
    if last:
        with suppress(ConfigError):  # torn
            records.append(_parse(last, ""))
    return records


def check_records(records: Sequence[Record], path: Path | str) -> None:
    """ConfigError, naming file and line, for a record of these that lacks a field which all of its
    kind have, or has no number there. `records`: all of the file, in order."""
    for line, record in enumerate(records, 1):
        numbers = _NUMBERS.get(record["kind"], ())
        for name in (*numbers, *_OTHERS.get(record["kind"], ())):
            found = record.get(name)
            good = isinstance(found, int | float) and not isinstance(found, bool)
            require(
                good if name in numbers else name in record,
                f"{path}:{line} is a record of kind {record['kind']}, and its {name!r} is "
                f"{'missing' if name not in record else f'{found!r}, no number'}; put the file "
                "back from a copy",
            )


def write_atomically(path: Path | str, text: str) -> None:
    """Give `path` the content `text`; a reader, or a crash, sees the old content or the new."""
    path = Path(path)
    scratch = _scratch(path)
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def require_writable(options: Any) -> None:
    """Make the folders that `options`, a dataclass, names as `NewFolder`, and those of the files
    that it names as `NewFile`.

    ConfigError where `write_atomically` could not write one.
    """
    folders = []
    for field in fields(options):
        path = getattr(options, field.name)
        hints = {m for h in (field.type, *get_args(field.type)) for m in _metadata(h)}
        option = f"--{field.name.replace('_', '-')} {path}"
        if path is not None and _NEW_FILE in hints:
            require(not path.is_dir(), f"{option} is a folder; name a file in it")
            require_file(path, option, "name a file in a folder that can")
        elif path is not None and _NEW_FOLDER in hints:
            folders.append((path / "figures", option))
    for path, option in folders:  # last, as they stay
        require_file(path, option, "name a folder that can")


def _metadata(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__metadata__", ())


def require_file(path: Path, option: str, fix: str) -> None:
    """Make its folder; ConfigError, which names `option`, where `path` could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _scratch(path).open("a").close()
        _scratch(path).unlink()
    except OSError as error:
        raise ConfigError(f"{option} cannot be written ({error}); {fix}") from error


def _scratch(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def to_json(value: Any) -> Any:
    """`value` as strict JSON can hold it: scalars as Python numbers, NaN and infinities as None."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(record: Record) -> str:
    return json.dumps(to_json(record), allow_nan=False) + "\n"


def _parse(line: bytes, place: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:  # also covers bytes that are not UTF-8
        raise ConfigError(f"{place} is not JSON ({error}); repair or remove the line") from None
    if not isinstance(record, dict) or "kind" not in record:
        raise ConfigError(f"{place} is not a record with a 'kind'; repair or remove the line")
    return record
