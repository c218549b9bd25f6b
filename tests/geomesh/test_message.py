# SPDX-License-Identifier: Apache-2.0
"""A frame that opens is the one that was sent, whole, by that slice for that round."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.geomesh.message import FRAME_BYTES, Header, MessageError, pack, unpack

HEADER = Header(round=7, slice=2, tokens=12_345, steps=20)
BODY = np.arange(100, dtype=np.uint8)


def open_frame(frame, round_=7, slice_=2):
    return unpack(frame, round_, slice_, "koreacentral")


@settings(deadline=None)  # the machine may be busy
@given(
    st.builds(
        Header,
        round=st.integers(0, 2**32 - 1),
        slice=st.integers(0, 2**32 - 1),
        tokens=st.integers(0, 2**64 - 1),
        steps=st.integers(0, 2**64 - 1),
    ),
    st.binary(max_size=64),
)
def test_what_is_packed_is_unpacked(header, content):
    body = np.frombuffer(content, np.uint8)
    frame = pack(header, body)
    assert frame.size == FRAME_BYTES + body.size
    opened, received = unpack(frame, header.round, header.slice, "a")
    assert opened == header
    assert received.tobytes() == content


@pytest.mark.parametrize(("round_", "slice_"), [(6, 2), (8, 2), (7, 1)])
def test_another_round_or_slice_is_refused(round_, slice_):
    with pytest.raises(MessageError, match=r"slice koreacentral: .*round 7, slice 2"):
        open_frame(pack(HEADER, BODY), round_, slice_)


def test_every_flipped_bit_is_refused():
    # Bits of the token and step counts too: they decide the merge as much as the body does.
    frame = pack(HEADER, BODY)
    for bit in range(8 * frame.size):
        damaged = frame.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MessageError, match="slice koreacentral"):
            open_frame(damaged)


@pytest.mark.parametrize("size", [FRAME_BYTES + 99, FRAME_BYTES, FRAME_BYTES - 1, 3, 0])
def test_a_truncated_frame_is_refused(size):
    with pytest.raises(MessageError, match="slice koreacentral"):
        open_frame(pack(HEADER, BODY)[:size])


def test_garbage_is_refused():
    garbage = np.random.default_rng(0).integers(0, 256, 200, np.uint8)
    with pytest.raises(MessageError, match="slice koreacentral"):
        open_frame(garbage)
