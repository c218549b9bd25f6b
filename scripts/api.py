# SPDX-License-Identifier: Apache-2.0
"""Write docs/api.md from the docstrings of what `geojax` and `geojax.config` export.

`python scripts/api.py` writes the file; with --check it says, by its exit code, whether the file is
what it would write.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import geojax
import geojax.config

TARGET = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """# API

Written by `python scripts/api.py` from docstrings. `docs/examples/` uses these names. What is not
listed may change without notice.

"""


def reference() -> str:
    """The whole page."""
    names = sorted(geojax.__all__, key=lambda name: (not inspect.isfunction(_get(name)), name))
    parts = sorted(name for name in geojax.config.__all__ if name not in geojax.__all__)
    body = [HEAD, "## geojax\n\n", *(_entry(name, _get(name)) for name in names)]
    body += ["## geojax.config\n\nParts of a `RunConfig`, and what goes with them.\n\n"]
    body += [_entry(name, getattr(geojax.config, name)) for name in parts]
    return "".join(body).rstrip() + "\n"


def _get(name: str) -> Any:
    return getattr(geojax, name)


def _entry(name: str, thing: Any) -> str:
    text = _text(thing)
    if inspect.isfunction(thing):
        return f"### `{name}{_signature(thing)}`\n\n{text}"
    fields, made = _fields(thing), vars(thing).get("__init__")
    if fields or made is None:
        lines = [f"### class `{name}`\n\n{text}"]
    else:
        lines = [f"### class `{name}{_signature(made)}`\n\n{text}{_text(made)}"]
    if fields:
        lines.append("| field | type | default | |\n|---|---|---|---|\n")
        lines += [f"| {' | '.join(field)} |\n" for field in fields]
        lines.append("\n")
    for method, found in vars(thing).items():
        if inspect.isfunction(found) and not method.startswith("_") and found.__doc__:
            lines.append(f"- **`{method}{_signature(found)}`**\n")
            lines.append(textwrap.indent(_text(found).rstrip(), "  ") + "\n")
    return "".join(lines).rstrip() + "\n\n"


def _text(thing: Any) -> str:
    own = thing.__doc__ if "__doc__" in vars(thing) or inspect.isfunction(thing) else ""
    if isinstance(thing, type) and own and own.startswith(f"{thing.__name__}("):
        own = ""  # made by dataclass or NamedTuple
    return f"{inspect.cleandoc(own)}\n\n" if own else ""


def _signature(function: Any) -> str:
    found = inspect.signature(function)
    kept = [p for p in found.parameters.values() if p.name != "self"]
    shown = found.replace(parameters=[p.replace(annotation=p.empty) for p in kept])
    text = re.sub(r"<(?:function|class) '?([\w.]+)'?[^>]*>", r"\1", str(shown))
    return re.sub(r" -> .*", "", text)


def _fields(kind: type) -> list[tuple[str, str, str, str]]:
    """(name, type, default, the string under it) of a dataclass's or named tuple's fields."""
    names = getattr(kind, "_fields", None) or [
        f.name for f in (dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ())
    ]
    if not names:
        return []
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found = []
    for place, node in enumerate(tree.body):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if node.target.id not in names:
            continue
        after = tree.body[place + 1] if place + 1 < len(tree.body) else None
        about = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            about = " ".join(str(after.value.value).split()).replace("|", "\\|")
        kind_text, default = (_code(node.annotation), _code(node.value))
        found.append((f"`{node.target.id}`", kind_text, default, about))
    return found


def _code(node: ast.expr | None) -> str:
    return f"`{ast.unparse(node)}`".replace("|", "\\|") if node else ""


def main(args: list[str]) -> int:
    page = reference()
    if args == ["--check"]:
        return int(not TARGET.is_file() or TARGET.read_text() != page)
    TARGET.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
