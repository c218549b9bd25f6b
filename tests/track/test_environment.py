# SPDX-License-Identifier: Apache-2.0
"""What is said of the machine that a figure was made on."""

import os

import pytest

from geojax.track import environment


@pytest.mark.parametrize(
    ("used", "said"), [([0, 1, 2, 3], "4 cores"), ([3], "1 of 4 cores"), ([1, 2], "2 of 4 cores")]
)
def test_cores_are_those_that_were_used(used, said, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(environment, "usable_cores", lambda: used)
    assert f", {said}, " in environment.machine()
