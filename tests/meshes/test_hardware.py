# SPDX-License-Identifier: Apache-2.0
"""GPUs are found by name."""

import pytest

from geojax.meshes.hardware import GPUS, get_gpu


def test_unknown_gpu_gives_the_nearest():
    assert get_gpu("h100") is GPUS["h100"]
    with pytest.raises(ValueError, match="did you mean 'h100'"):
        get_gpu("H100")
