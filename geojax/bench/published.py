# SPDX-License-Identifier: Apache-2.0
"""Figures that were published of GeoMesh, as several tables set them beside ours."""

ABOUT = 0.1
"""Relative distance within which a figure counts as the published one."""

PUBLISHED_HOURS = {
    "diloco": 12.0,
    "balancing-only": 7.6,
    "signs-only": 6.5,
    "geomesh": 2.8,
    "fp16": 10.0,
    "int8": 8.0,
}
"""For the same tokens, of the ablation."""
PUBLISHED_TO_TARGET = {"diloco": 3.7, "halos": 2.0, "geomesh": 1.1}
"""Hours to the target perplexity at 150M."""
PUBLISHED_IDLE = {"diloco": (0.209, 0.658), "geomesh": (0.026, 0.118)}
"""(straggler, WAN) shares of the run's time; of DiLoCo for the straggler's of the fastest GPU."""
