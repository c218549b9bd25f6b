# SPDX-License-Identifier: Apache-2.0
"""What every part of a config shares: strictness, and errors that say what to change."""

from typing import Any

STRICT: dict[str, Any] = {"extra": "forbid", "ser_json_inf_nan": "strings"}
"""Pydantic settings: an unknown field in a stored config is an error, not ignored."""


class ConfigError(ValueError):
    """A setting, a file or a run folder that cannot be used; the message says what to change."""


class RunError(RuntimeError):
    """A run that cannot go on, though its settings are sound; the message says what to do."""


class LostRunError(RunError):
    """No good step for too long."""


def require(condition: object, message: str) -> None:
    """Raise ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)
