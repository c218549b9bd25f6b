# SPDX-License-Identifier: Apache-2.0
"""A server at its defaults is warm in few programs."""

from pathlib import Path

import pytest

from geojax.bicache.depth import Depths, Guard
from geojax.bicache.engine import Engine, Sizes
from geojax.bicache.policy import get_policy
from geojax.serve.command import warm
from geojax.serve.options import ServeOptions


@pytest.mark.parametrize("name", ["bicache", "bicache-dual", "refresh"])
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("builder", ["prefix", "canvas"])
def test_the_defaults_are_64_programs_at_most(model, name, watched, builder, monkeypatch):
    depths, guard = Depths(((0.0, 1),)), Guard(((1, 0.1),)) if watched else None
    policy = get_policy(name)
    engine = Engine(model.sampler(), policy, Sizes(1e6, 1e6), depths, builder, guard=guard)
    called, said = [], []
    monkeypatch.setattr(
        engine, "_call", lambda shape, _, probes, __: called.append((shape, probes))
    )
    monkeypatch.setattr(engine._builds, "_run", lambda *sizes: called.append(sizes))
    warm(engine, ServeOptions(Path("model")), said.append, said.append)
    assert 8 <= len(set(called)) <= 64
    looks = {shape for shape, probes in (c for c in called if len(c) == 2) if probes}
    assert bool(looks) == (watched and policy.shared)
