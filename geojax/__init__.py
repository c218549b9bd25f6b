# SPDX-License-Identifier: Apache-2.0
"""Train and serve language models across regions, strategies and shared prefixes, in JAX.

The names below are the public interface; docs/api.md describes them, docs/examples/ uses them.
A name's module is imported when it is first asked for: `import geojax` alone starts nothing, so
that a run can still set what JAX reads when it starts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geojax.bicache.depth import Depths
    from geojax.bicache.engine import Engine, Sizes
    from geojax.bicache.policy import get_policy
    from geojax.bicache.slot import Job
    from geojax.config import ConfigError, RunConfig, RunError
    from geojax.config.own import reference
    from geojax.configs import load_config
    from geojax.diffusion.choose import Reading
    from geojax.diffusion.load import load as load_model
    from geojax.diffusion.request import Request, SamplingConfig, prompt
    from geojax.diffusion.sampler import Answer, Sampler
    from geojax.models.config import TransformerConfig, get_model
    from geojax.models.transformer import Transformer, init_params
    from geojax.runs import resume, start
    from geojax.track.metrics import read_records
    from geojax.trained import read_run

_PLACES = {
    "RunConfig": "geojax.config",
    "load_config": "geojax.configs",
    "start": "geojax.runs",
    "resume": "geojax.runs",
    "read_records": "geojax.track.metrics",
    "read_run": "geojax.trained",
    "reference": "geojax.config.own",
    "ConfigError": "geojax.config",
    "RunError": "geojax.config",
    "TransformerConfig": "geojax.models.config",
    "get_model": "geojax.models.config",
    "Transformer": "geojax.models.transformer",
    "init_params": "geojax.models.transformer",
    "load_model": "geojax.diffusion.load",
    "Sampler": "geojax.diffusion.sampler",
    "Reading": "geojax.diffusion.choose",
    "Request": "geojax.diffusion.request",
    "SamplingConfig": "geojax.diffusion.request",
    "prompt": "geojax.diffusion.request",
    "Answer": "geojax.diffusion.sampler",
    "Engine": "geojax.bicache.engine",
    "Sizes": "geojax.bicache.engine",
    "Depths": "geojax.bicache.depth",
    "Job": "geojax.bicache.slot",
    "get_policy": "geojax.bicache.policy",
}
_RENAMED = {"load_model": "load"}

__all__ = [
    "Answer",
    "ConfigError",
    "Depths",
    "Engine",
    "Job",
    "Reading",
    "Request",
    "RunConfig",
    "RunError",
    "Sampler",
    "SamplingConfig",
    "Sizes",
    "Transformer",
    "TransformerConfig",
    "get_model",
    "get_policy",
    "init_params",
    "load_config",
    "load_model",
    "prompt",
    "read_records",
    "read_run",
    "reference",
    "resume",
    "start",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'geojax' has no attribute {name!r}")
    found = getattr(import_module(_PLACES[name]), _RENAMED.get(name, name))
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
