# SPDX-License-Identifier: Apache-2.0
"""The one place that sets how many CPU devices tests see, and where they cache."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    # Most of the time of a small model is compiling it; unoptimised code computes the same.
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

_LONGEST = ("test_readme.py", "test_kill.py", "test_two_processes.py", "test_chain_run.py")


def pytest_collection_modifyitems(items):
    """The longest files first: one that begins last is waited for alone."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)
