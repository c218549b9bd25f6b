# SPDX-License-Identifier: Apache-2.0
"""The mesh engine delivers every byte, to the right slice, whatever shares a device."""

import jax
import numpy as np
import pytest

from geojax.geomesh.exchange import MeshExchange

# Slices over devices: one each, all on one, more slices than devices, numbers that do not divide.
CASES = [(1, 1), (2, 1), (3, 3), (4, 2), (4, 3), (5, 2), (8, 8), (9, 8), (16, 8)]


def leaders(slices: int, devices: int) -> list[jax.Device]:
    return [jax.devices()[i % devices] for i in range(slices)]


def message(rng, longest: int) -> np.ndarray:
    return rng.integers(0, 256, rng.integers(1, longest + 1), np.uint8)


@pytest.mark.parametrize(("slices", "devices"), CASES)
def test_all_gather_brings_every_message_to_every_slice(slices, devices):
    rng = np.random.default_rng(slices)
    sent = [message(rng, 40) for _ in range(slices)]
    received = MeshExchange(leaders(slices, devices)).all_gather(sent)
    assert len(received) == slices
    for row in received:
        for got, wanted in zip(row, sent, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("slices", "devices"), CASES)
def test_all_to_all_brings_each_message_to_its_receiver(slices, devices):
    rng = np.random.default_rng(slices)
    sent = [[message(rng, 40) for _ in range(slices)] for _ in range(slices)]
    received = MeshExchange(leaders(slices, devices)).all_to_all(sent)
    assert len(received) == slices
    for receiver, row in enumerate(received):
        for got, wanted in zip(row, (m[receiver] for m in sent), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_empty_messages_and_slices_that_lie_in_any_order():
    order = [jax.devices()[i] for i in (5, 0, 5, 3)]
    sent = [np.full(n, i, np.uint8) for i, n in enumerate((0, 3, 0, 1))]
    for row in MeshExchange(order).all_gather(sent):
        assert [m.tolist() for m in row] == [m.tolist() for m in sent]
