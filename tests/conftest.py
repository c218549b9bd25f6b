# SPDX-License-Identifier: Apache-2.0
"""The one place that sets how many CPU devices tests see, and where they cache."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
