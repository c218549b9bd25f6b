# SPDX-License-Identifier: Apache-2.0
"""The one place that sets how many CPU devices tests see, and which examples properties try."""

import os

from hypothesis import HealthCheck, settings

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    # Most of the time of a small model is compiling it; unoptimised code computes the same.
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

for _name in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # of rich: what is printed is compared
    os.environ.pop(_name, None)

# The same examples on every machine, however slow; GEOJAX_RANDOM_EXAMPLES tries others.
_random = bool(os.environ.get("GEOJAX_RANDOM_EXAMPLES"))
settings.register_profile(
    "geojax",
    deadline=None,
    derandomize=not _random,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("geojax")

_LONGEST = ("test_readme.py", "test_kill.py", "test_two_processes.py", "test_chain_run.py")


def pytest_collection_modifyitems(items):
    """The longest files first: one that begins last is waited for alone."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)
