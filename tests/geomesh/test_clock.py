# SPDX-License-Identifier: Apache-2.0
"""Every second of every slice is accounted for, and the demo's frozen setting is the paper's."""

from dataclasses import replace

import pytest

from geojax.config import BalanceConfig, SliceConfig
from geojax.configs import METHODS, demo
from geojax.geomesh.balance import Plan, SliceWork, make_plan
from geojax.geomesh.clock import (
    Happened,
    MeasuredClock,
    ModelledClock,
    modelled_exchange_seconds,
    modelled_profiles,
    traffic,
)
from geojax.geomesh.timeline import RoundTimes
from geojax.meshes.hardware import get_gpu


def happened(seconds: float, slices: int) -> Happened:
    """A round here, of so many seconds in each of its parts."""
    zeros = [0] * slices
    return Happened([seconds] * slices, seconds, seconds, seconds, zeros, zeros, zeros)


def modelled(method: str) -> tuple[Plan, RoundTimes]:
    """The plan of a method in the demo's setting, and the times of one of its rounds."""
    config = METHODS[method](demo())
    seconds = modelled_exchange_seconds(config, traffic(config).payload_bytes)
    plan = make_plan(modelled_profiles(config), config.balance, seconds)
    return plan, ModelledClock(seconds).round(plan, happened(0.0, 4))


def straggler_idle(times: RoundTimes) -> float:
    """Largest share over slices."""
    return max(times.straggler) / times.total


def wan_idle(times: RoundTimes) -> float:
    return times.wan / times.total


@pytest.mark.parametrize("method", METHODS)
def test_the_parts_of_a_modelled_round_sum_to_it(method):
    _, times = modelled(method)
    for compute, straggler, outer in zip(times.compute, times.straggler, times.outer, strict=True):
        parts = (compute, straggler, times.wan, outer)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(times.total)


def test_the_measured_clock_says_what_was_measured():
    plan = Plan((SliceWork("a", 4, 10, 100.0), SliceWork("b", 4, 10, 100.0)))
    times = MeasuredClock().round(plan, Happened([3.0, 5.0], 6.0, 2.0, 1.0, [0, 0], [0, 0], [0, 0]))
    # Slices that share a device wait for each other: 6 seconds pass until both are done.
    assert times == RoundTimes(9.0, [3.0, 5.0], [3.0, 1.0], 2.0, [1.0, 1.0], [0.0, 0.0])


def test_the_modelled_clock_does_not_look_at_the_machine():
    plan = Plan((SliceWork("a", 4, 10, 0.5), SliceWork("b", 8, 3, 1.0)))
    clock = ModelledClock(7.0)
    times = [clock.round(plan, happened(x, 2)) for x in (0.0, 99.0)]
    wanted = RoundTimes(12.0, [5.0, 3.0], [0.0, 2.0], 7.0, [0.0, 0.0], [0.0, 0.0])
    assert times[0] == times[1] == wanted


def test_diloco_in_the_demo_idles_as_published():
    plan, times = modelled("diloco")
    assert wan_idle(times) == pytest.approx(0.658, abs=1e-3)
    assert straggler_idle(times) == pytest.approx(0.209, abs=1e-3)
    wanted = demo().balance
    assert {(w.batch, w.inner_steps) for w in plan.work} == {
        (max(wanted.batch_sizes), wanted.inner_steps)
    }


def test_geomesh_in_the_demo_idles_less_by_the_promised_factors():
    (_, diloco), (_, geomesh) = modelled("diloco"), modelled("geomesh")
    assert straggler_idle(diloco) / straggler_idle(geomesh) >= 8
    assert wan_idle(diloco) / wan_idle(geomesh) >= 5.6


def test_the_slowest_slice_does_the_same_steps_under_every_method():
    names = ("diloco", "geomesh", "balancing-only", "signs-only")
    steps = {modelled(name)[0].work[-1].inner_steps for name in names}
    assert steps == {demo().balance.inner_steps}


@pytest.mark.parametrize(
    ("method", "hours"),
    # Published for time to target: 7.6, 6.5 and 2.8. For equal tokens the model gives these; that
    # signs alone would come to 4.5 rather than 6.5 was predicted.
    [("balancing-only", 7.8), ("signs-only", 4.5), ("geomesh", 2.9)],
)
def test_hours_for_the_same_tokens_beside_dilocos_12(method, hours):
    plans = {name: modelled(name) for name in ("diloco", method)}
    a_token = {name: times.total / plan.sequences for name, (plan, times) in plans.items()}
    assert 12.0 * a_token[method] / a_token["diloco"] == pytest.approx(hours, abs=0.15)


def test_traffic_is_of_the_clocked_model():
    config = METHODS["geomesh"](demo())
    counted = traffic(config)
    assert counted.params == config.clocked_model().num_params > 100 * config.model.num_params
    assert counted.fp32_bytes == 4 * counted.params
    assert counted.payload_ratio == counted.fp32_bytes / counted.payload_bytes
    assert counted.wire_bytes == 3 * counted.payload_bytes  # gather among four
    exact = traffic(METHODS["diloco"](demo()))
    # An all-reduce: 2 (K-1)/K of the parameters.
    assert exact.wire_bytes == pytest.approx(2 * 3 / 4 * exact.fp32_bytes, rel=1e-6)


GPUS = ("h100", "a100-40gb", "l40s")


def on_gpus(config, gpus=GPUS, **changes):
    slices = tuple(
        SliceConfig(gpu, region=s.region, gpu=gpu)
        for gpu, s in zip(gpus, config.slices, strict=False)
    )
    return replace(
        config,
        slices=slices,
        train=replace(config.train, compute_dtype="bfloat16", **changes),
        clock=replace(config.clock, base_step_seconds=None, base_batch=None),
    )


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_profiles_of_gpus_know_speed_and_memory(optimizer):
    config = on_gpus(METHODS["diloco" if optimizer == "adamw" else "geomesh"](demo()))
    config = replace(config, balance=BalanceConfig(inner_steps=20, batch_sizes=(4, 16, 64)))
    profiles = modelled_profiles(config)
    for gpu, profile in zip(GPUS, profiles, strict=True):
        assert 0.8 * get_gpu(gpu).memory_bytes < profile.memory_limit_bytes
        assert profile.memory_limit_bytes < get_gpu(gpu).memory_bytes
        assert [o.batch for o in profile.options] == [4, 16, 64]
        slots = {"lion": 3, "adamw": 4}[optimizer]  # parameters, gradients, optimizer
        least = 4 * slots * config.clocked_model().num_params
        assert all(least < o.memory_bytes <= profile.memory_limit_bytes for o in profile.options)
        seconds = [o.seconds_per_step for o in profile.options]
        assert seconds == sorted(seconds)
    fastest = [p.options[-1].seconds_per_step for p in profiles]
    assert min(fastest) == fastest[0]  # the H100's
    plan = make_plan(profiles, config.balance, 1.0)
    for profile, work in zip(profiles, plan.work, strict=True):
        (option,) = [o for o in profile.options if o.batch == work.batch]
        assert option.memory_bytes <= profile.memory_limit_bytes
    seconds = [p.options[0].seconds_per_step for p in profiles]
    assert seconds[0] == min(seconds)
