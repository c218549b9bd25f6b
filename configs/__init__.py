# SPDX-License-Identifier: Apache-2.0
"""Presets: runs by name, each a function that returns a full `RunConfig`."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from geojax.config import ConfigError, OptimizerConfig, RunConfig
from geojax.config.own import run_file
from geojax.configs.baselines import BASELINES
from geojax.configs.cona import MODELLED, cona_large, cona_tiny
from geojax.configs.diffusion import dlm_tasks
from geojax.configs.geomesh import METHODS, UNTUNED, demo, published
from geojax.configs.quickstart import quickstart
from geojax.configs.strategies import large, tiny
from geojax.meshes.strategy import parse_strategy
from geojax.models.config import get_model

__all__ = ["BASELINES", "METHODS", "PRESETS", "Preset", "demo", "load_config"]


# Learning rates as published: Brown et al. 2020, Devlin et al. 2019, Grattafiori et al. 2024.
_LARGE = {
    "gpt-3-1.3b": ("dp8-tp1-pp1-mb4-gb512-zero-full", 2e-4, 2048),
    "bert-large": ("dp8-tp1-pp1-mb16-gb256", 1e-4, 512),
    "llama-3.2-1b": ("dp8-tp1-pp1-mb2-gb256-zero-full", 3e-4, 4096),
}


@dataclass(frozen=True)
class Preset:
    """A named run."""

    make: Callable[[], RunConfig]
    line: str
    """What it is, in one line."""


def _presets() -> dict[str, Preset]:
    presets = {"quickstart": Preset(quickstart, _first_line(quickstart))}
    for name, method in (METHODS | BASELINES).items():
        line = _first_line(method)
        presets[f"demo-{name}"] = Preset(lambda m=method: m(demo()), f"{line} 133k, CPU.")
    for size in ("150m", "300m", "500m"):
        for name, method in METHODS.items():
            if size == "150m" or name in ("geomesh", "diloco"):
                make = partial(lambda m, s: m(published(s), UNTUNED), method, size)
                line = f"{_first_line(method)} {size.upper()}, C4, 4 GPUs."
                presets[f"{name}-{size}"] = Preset(make, line)
    for name in ("llama-tiny", "gpt-tiny", "bert-tiny", "llada-tiny", "dream-tiny"):
        line = f"{_first_line(tiny)[:-1]}; {name.removesuffix('-tiny')}."
        presets[name] = Preset(partial(tiny, name), line)
    presets["dlm-tasks"] = Preset(dlm_tasks, _first_line(dlm_tasks))
    for name, (strategy, rate, seq_len) in _LARGE.items():
        optimizer = OptimizerConfig(name="adamw", learning_rate=rate, weight_decay=0.1)
        make = partial(large, name, strategy, optimizer, seq_len)
        presets[name] = Preset(make, f"{_first_line(large)[:-1]}, by {strategy}.")
        batch = parse_strategy(strategy).global_batch
        ladder = tuple(batch * 2**i // 8 for i in range(6))
        chained = partial(lambda m, b, g: cona_large(m(), b, g), make, ladder, batch)
        presets[f"cona-{name}"] = Preset(chained, f"{_first_line(cona_large)[:-1]}; {name}.")
    for name in MODELLED:
        line = f"A tiny {get_model(name).family} by CONA, timed as {MODELLED[name]} on 8 A100s."
        presets[f"cona-{name}"] = Preset(partial(cona_tiny, name), line)
    return presets


def _first_line(function: Callable[..., RunConfig]) -> str:
    return (function.__doc__ or "").strip().splitlines()[0]


PRESETS: dict[str, Preset] = _presets()


def load_config(name_or_file: str) -> RunConfig:
    """The preset of that name, or what `config()` returns in that Python file.

    ConfigError with the nearest name, or with what is wrong with the file.
    """
    if name_or_file in PRESETS:
        return PRESETS[name_or_file].make()
    path = Path(name_or_file)
    if path.suffix != ".py":
        near = get_close_matches(name_or_file, PRESETS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"no preset named {name_or_file!r}; {hint}`geojax train --help` lists them, and a "
            "file of your own ends in .py"
        )
    if not path.is_file():
        raise ConfigError(f"no file {name_or_file!r}; give a preset or an existing Python file")
    try:
        make = getattr(run_file(path), "config", None)
    except (Exception, SystemExit) as error:
        raise ConfigError(_one_line(path, error)) from error
    if not callable(make):
        raise ConfigError(f"{path}: it must define a function config() that returns a RunConfig")
    try:
        config = make()
    except (Exception, SystemExit) as error:
        raise ConfigError(_one_line(path, error)) from error
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{path}: config() returned {type(config).__name__}, not a RunConfig")
    return config


def _one_line(path: Path, error: BaseException) -> str:
    return f"{path}: {type(error).__name__}: {' '.join(str(error).split())}"
