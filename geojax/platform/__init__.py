# SPDX-License-Identifier: Apache-2.0
"""The process and its platform: what is set before JAX starts, and what watches over it.

In this order: `apply`, `initialize`, then anything that runs on JAX, inside a `Watchdog`. Nothing
here imports JAX until it is called.
"""

from geojax.platform.cluster import first_host, initialize
from geojax.platform.environment import Rows, apply, why_no_gpu
from geojax.platform.mfu import detect_gpu, mfu
from geojax.platform.trace import OpTime, Trace, TraceSummary, summarize, trace_steps
from geojax.platform.watchdog import EXIT_CODE, Watchdog

__all__ = [
    "EXIT_CODE",
    "OpTime",
    "Rows",
    "Trace",
    "TraceSummary",
    "Watchdog",
    "apply",
    "detect_gpu",
    "first_host",
    "initialize",
    "mfu",
    "summarize",
    "trace_steps",
    "why_no_gpu",
]
