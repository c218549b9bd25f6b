# SPDX-License-Identifier: Apache-2.0
"""Configs as JSON and back, and chains from JSON."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from geojax.config.base import ConfigError, require
from geojax.config.cona import ChainLeg
from geojax.config.folder import require_local
from geojax.config.run import RunConfig

_ADAPTER = TypeAdapter(RunConfig)


def to_json(config: RunConfig) -> str:
    """As `config.json` of a run has it."""
    return _ADAPTER.dump_json(config, indent=2).decode()


def read_config(path: Path) -> RunConfig:
    """Read what `to_json` made, from a file; ConfigError where it is missing or not a config."""
    require_local(path.parent)
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path.parent} is not a run folder: cannot read {path.name} ({error.strerror})"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {place}: {first['msg']}") from error


def read_chain(path: Path) -> tuple[ChainLeg, ...]:
    """A fixed chain from JSON: a list of {"tokens": seen when it begins, "strategy": text}.

    ConfigError where it cannot be read, or is none.
    """
    try:
        legs = TypeAdapter(tuple[ChainLeg, ...]).validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the chain {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{path}: {place}: {first['msg']}; a chain is a list like "
            '[{"tokens": 0, "strategy": "dp2-tp1-pp1-mb1-gb8"}]'
        ) from error
    require(legs, f"{path} has no leg; give one at least, which begins at 0 tokens")
    return legs
