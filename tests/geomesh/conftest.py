# SPDX-License-Identifier: Apache-2.0
"""Trainers that tests look into."""

from typing import ClassVar

import pytest

import geojax.geomesh.trainer as trainer_module
from geojax.geomesh.trainer import Trainer


@pytest.fixture
def trainers(monkeypatch):
    """Trainers of the runs that a test starts, in order; `hooks` are called with each new one."""

    class Kept(Trainer):
        hooks = ()
        made: ClassVar[list[Trainer]] = []

        def __init__(self, *args):
            super().__init__(*args)
            Kept.made.append(self)
            for hook in Kept.hooks:
                hook(self)

    monkeypatch.setattr(trainer_module, "Trainer", Kept)
    return Kept
