# SPDX-License-Identifier: Apache-2.0
"""Code of the user's own that a config names: FILE.py:NAME, or MODULE:NAME.

Invariant: a config stays plain data, so that a run folder says all that a resumed run needs; what
it names is looked up when the run starts, and is the same object each time in a process.
"""

import importlib
import importlib.util
import sys
import threading
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from geojax.config.base import ConfigError, require

_LOCK = threading.RLock()


def reference(thing: Any) -> str:
    """How a config names a class or function: by its module where that is part of a package, else
    by its file.

    ConfigError where it is not at the top level of a module.
    """
    name = getattr(thing, "__qualname__", "")
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    require(
        module is not None and getattr(module, name, None) is thing,
        f"{thing!r} is not at the top level of a module, where a resumed run would look for it; "
        "give a class or function that a file defines, not a lambda or one inside another",
    )
    assert module is not None
    file, package = vars(module).get("__file__"), vars(module).get("__package__")
    if file is None or package:
        spec = vars(module).get("__spec__")
        return f"{spec.name if spec else module.__name__}:{name}"
    return f"{Path(file).resolve()}:{name}"


def check_form(text: str, field: str) -> None:
    """ConfigError where `text` cannot name anything; looks nothing up."""
    place, _, name = text.rpartition(":")
    good = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    require(
        name.isidentifier() and good,
        f"{field} {text!r} names nothing; write it like mine.py:Name or package.module:Name",
    )


def load_own(text: str, field: str) -> Any:
    """What `text` names, a callable; ConfigError, naming the config's `field`, where there is
    none."""
    check_form(text, field)
    place, _, name = text.rpartition(":")
    try:
        module = find_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{field} {text!r}: cannot load {place}: {reason}") from error
    found = getattr(module, name, None)
    require(
        callable(found),
        f"{field} {text!r}: {place} defines no {name} that can be called; define it at the top "
        "level there",
    )
    return found


def find_file(path: Path) -> ModuleType:
    """The file as a module: the one that is loaded already, as the running script is, or a new
    one."""
    path = path.expanduser().resolve()
    with _LOCK:
        for module in list(sys.modules.values()):
            file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
            if file and Path(file).name == path.name and Path(file).resolve() == path:
                return module
        return run_file(path)


def run_file(path: Path) -> ModuleType:
    """The file as a module, run anew; raises what it raises."""
    path = path.expanduser().resolve()
    name = f"_geojax_own_{sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None, "a .py file has one"
    module = importlib.util.module_from_spec(spec)
    with _LOCK:
        before = sys.modules.get(name)
        sys.modules[name] = module  # dataclasses look their own module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before
            raise
    return module
