# SPDX-License-Identifier: Apache-2.0
"""The one place that sets how many CPU devices tests see, and where they cache."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    # Most of the time of a small model is compiling it; unoptimised code computes the same.
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
