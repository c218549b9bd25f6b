# SPDX-License-Identifier: Apache-2.0
"""From arguments of the command line to options: what commands share, and the options of those that
are no more than a call.

Invariant: a mistake is a ConfigError that says what is wanted.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tyro

from geojax.config import ClusterConfig, ConfigError, RunConfig, require, with_chain, with_strategy
from geojax.config.folder import require_local
from geojax.track.metrics import NewFile, require_writable


@dataclass(frozen=True)
class Resume:
    """Continue a run exactly where it stopped."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    strategy: str | None = None
    """Another strategy than before, such as dp2-tp2-pp2-mb1-gb16: on as many devices as it says."""
    cluster: ClusterConfig = ClusterConfig()
    """The processes that go on, where they are several."""


@dataclass(frozen=True)
class Prepare:
    """Any field of the config can be set; the data section decides the result."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Train:
    """Any field of the config can be set."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    out: Path | None = None
    """Run folder; unset: runs/NAME."""


@dataclass(frozen=True)
class ProfileStrategies:
    """Any field of the config can be set."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    strategies: tuple[str, ...] = ()
    """Which; unset: all legal ones of the config's global batch on the devices there are."""
    steps: int = 5
    """Steps to time of each."""
    out: NewFile | None = None
    """File for the calibration that `geojax plan --calibration` reads."""


@dataclass(frozen=True)
class ProfileTrace:
    """Any field of the config can be set."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    steps: int = 3
    """Steps to trace."""
    out: Path | None = None
    """Folder of the trace; unset: runs/trace-NAME."""


@dataclass(frozen=True)
class Convert:
    """Weights from a run, Hugging Face safetensors or GGUF, to safetensors."""

    source: tyro.conf.Positional[Path]
    """Folder of a run or of a Hugging Face checkpoint, or a .gguf file."""
    target: tyro.conf.Positional[Path]
    """New folder for safetensors, config.json and tokenizer.json."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the tensors written."""


def has(args: list[str], name: str) -> bool:
    """Whether the option `name` is among them, with its value behind it or in it."""
    return any(a == name or a.startswith(f"{name}=") for a in args)


def steered(args: list[str]) -> tuple[list[str], RunConfig]:
    """--strategy TEXT and --chain FILE take the place of whatever way the preset goes by."""
    from geojax.config.files import read_chain
    from geojax.configs import load_config

    config = load_config(args[0])
    both = has(args, "--strategy") and has(args, "--chain")
    require(not both, "--strategy and --chain are two ways to go; give one of them")
    args = [part for arg in args for part in (arg.split("=", 1) if _steers(arg) else [arg])]
    for name in ("--strategy", "--chain"):
        if name not in args:
            continue
        place = args.index(name)
        require(
            len(args) > place + 1 and not args[place + 1].startswith("-"),
            f"{name} wants a value: "
            + ("dp1-tp1-pp1-mb4-gb16" if name == "--strategy" else "a JSON file of legs"),
        )
        value, args = args[place + 1], args[:place] + args[place + 2 :]
        if name == "--strategy":
            config = with_strategy(config, value)
        else:
            config = with_chain(config, read_chain(Path(value)))
    return args, config


def _steers(arg: str) -> bool:
    return arg.startswith(("--strategy=", "--chain="))


def need_extra(extra: str, *modules: str) -> None:
    """ConfigError where an optional package is not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    require(
        not missing,
        f"this command needs {', '.join(missing)}; install it with `pip install 'geojax[{extra}]'`",
    )


def parse[T](options: type[T], args: list[str], prog: str, default: T | None = None) -> T:
    """`options`, whose fields `default` has unless they are given.

    ConfigError where a file that is to be written in the end cannot be, or a path is a URL.
    """
    found = tyro.cli(
        options,
        args=args,
        prog=prog,
        default=default,
        config=(tyro.conf.AvoidSubcommands,),
    )
    for field in fields(cast(Any, options)):
        if isinstance(path := getattr(found, field.name), Path):
            require_local(path)
    require_writable(found)
    return found


def parse_config[T](
    options: Callable[[RunConfig], T],
    args: list[str],
    command: str,
    config: RunConfig | None = None,
) -> T:
    """Options over `config`, or the one that args[0] names."""
    from geojax.configs import load_config

    default = options(config or load_config(args[0]))
    return parse(type(default), args[1:], f"geojax {command} {args[0]}", default)


def presets_help(command: str, args: list[str]) -> int:
    """What presets there are, and the exit code; ConfigError where that was not asked for."""
    from geojax.configs import PRESETS

    if args and args[0] not in ("-h", "--help"):
        raise ConfigError(f"geojax {command} wants a preset or a file first, not {args[0]!r}")
    lead = f"{command} --local N" if command == "launch" else command
    print(f"usage: geojax {lead} PRESET_OR_FILE [--any.field value ...]")
    if command in ("train", "launch", "coordinator"):
        print(f"       geojax {command} --resume RUN")
    if command == "train":
        print("       geojax train PRESET_OR_FILE --slice NAME --coordinator HOST:PORT")
    print("\npresets:")
    for name, preset in PRESETS.items():
        print(f"  {name:<23}{preset.line}")
    print(f"\n`geojax {command} PRESET --help` lists every field.")
    return 0 if args else 2
