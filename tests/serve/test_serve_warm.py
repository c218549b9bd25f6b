# SPDX-License-Identifier: Apache-2.0
"""A server at its defaults is warm in few programs."""

from pathlib import Path

import pytest

from geojax.bicache.depth import Depths, Guard
from geojax.bicache.engine import Engine, Job, Sizes
from geojax.bicache.policy import get_policy
from geojax.diffusion.request import Request, SamplingConfig
from geojax.serve.command import warm
from geojax.serve.options import Limits, Pace, ServeOptions


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
    # A request that says nothing of sizes is among them, in batches of any number of rows.
    sampling = SamplingConfig(steps=4)
    for prompt in (1, 30, 64):
        ids = [*[1] * prompt, *[model.mask_id] * Limits().default_tokens]
        slot = engine.admit(Job(Request(ids, sampling)))
        for rows in range(1, Pace().rows + 1):
            assert engine.shapes.of([slot] * rows) in {c[0] for c in called}
        engine.leave(slot)


def test_who_stops_a_warm_up_waits_for_one_program_only(model, monkeypatch):
    """What `done` raises ends it before the next one, also between those of one size."""

    class StopError(Exception):
        pass

    def done(text):
        if len(called) == 3:
            raise StopError

    called = []
    policy, depths = get_policy("bicache"), Depths(((0.0, 1),))
    engine = Engine(model.sampler(), policy, Sizes(1e6, 1e6), depths)
    monkeypatch.setattr(engine, "_call", lambda *args: called.append(args))
    monkeypatch.setattr(engine._builds, "_run", lambda *args: called.append(args))
    with pytest.raises(StopError):
        warm(engine, ServeOptions(Path("model")), lambda text: None, done)
    assert len(called) == 3
    called.clear()
    with pytest.raises(StopError):
        engine._builds.warm(256, 128, 2, lambda: done(""))
    assert len(called) == 3
