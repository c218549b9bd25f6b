# SPDX-License-Identifier: Apache-2.0
"""Slices get the devices they ask for, and share them only where there are too few."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.meshes.axes import (
    DATA,
    PIPELINE,
    SLICE,
    TENSOR,
    assign_devices,
    data_mesh,
    slice_mesh,
    strategy_mesh,
)
from geojax.meshes.strategy import Strategy

wishes = st.lists(st.integers(1, 8), min_size=1, max_size=6)


@settings(deadline=None)
@given(wanted=wishes, count=st.integers(8, 20))
def test_each_slice_has_as_many_distinct_devices_as_it_wants(wanted, count):
    devices = [f"device{i}" for i in range(count)]
    assigned = assign_devices(wanted, devices)
    assert [len(row) for row in assigned] == wanted
    assert all(len(set(row)) == len(row) and set(row) <= set(devices) for row in assigned)
    assert assigned == assign_devices(wanted, devices)


@settings(deadline=None)
@given(wanted=wishes, spare=st.integers(0, 3))
def test_no_device_is_shared_where_there_are_enough(wanted, spare):
    assigned = assign_devices(wanted, range(sum(wanted) + spare + 8))
    used = [device for row in assigned for device in row]
    assert len(set(used)) == len(used)


@settings(deadline=None)
@given(slices=st.integers(1, 30), count=st.integers(1, 8))
def test_single_device_slices_share_evenly(slices, count):
    used = [row[0] for row in assign_devices([1] * slices, range(count))]
    loads = [used.count(device) for device in range(count)]
    assert max(loads) - min(loads) <= 1


def test_a_slice_that_wants_more_than_there_are_is_told_the_fix():
    with pytest.raises(ValueError, match=r"wants 3 devices, and there are 2; lower .*count=3"):
        assign_devices([1, 3], range(2))


def test_meshes_hold_their_devices_in_order():
    devices = jax.devices()[2:6]
    for mesh, axis in ((data_mesh(devices), DATA), (slice_mesh(devices), SLICE)):
        assert mesh.shape == {axis: 4}
        np.testing.assert_array_equal(mesh.devices, devices)


def test_neighbours_of_a_strategy_share_layers():
    devices = jax.devices()
    mesh = strategy_mesh(Strategy(2, 2, 2, 1, 4), devices)
    assert mesh.shape == {PIPELINE: 2, DATA: 2, TENSOR: 2}
    assert mesh.devices.ravel().tolist() == devices
    for stage in mesh.devices:
        for shared in stage:  # what sends most lies side by side, then copies, then stages
            assert [d.id for d in shared] == [shared[0].id, shared[0].id + 1]


def test_another_number_of_devices_than_the_strategy_wants_is_refused():
    with pytest.raises(ValueError, match="dp2-tp1-pp1-mb1-gb2 wants 2 devices, and was given 3"):
        strategy_mesh(Strategy(2, 1, 1, 1, 2), jax.devices()[:3])
