# SPDX-License-Identifier: Apache-2.0
"""Layouts cover every element exactly once, whole and in shards, and are as small as promised."""

from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.config import ExchangeConfig
from geojax.geomesh.layout import make_layout
from geojax.geomesh.message import FRAME_BYTES
from geojax.geomesh.sync import payload_bytes
from geojax.meshes.wan import ring_all_reduce_bytes
from geojax.models.config import TransformerConfig, get_model
from geojax.models.transformer import abstract_params

CODECS = ("sign", "int8", "fp16", "bf16", "fp32")
SETTINGS = [(codec, "tensor") for codec in CODECS] + [("sign", "row"), ("int8", "row")]
BITS = {"sign": 1, "int8": 8, "fp16": 16, "bf16": 16, "fp32": 32}


def exchange(codec: str, scales: str = "tensor") -> ExchangeConfig:
    return ExchangeConfig(codec=codec, scales=scales, error_feedback=False)


@st.composite
def shapes(draw):
    """Parameter shapes of a small model, even or odd, with one dim of 1 now and then."""
    dim = st.integers(1, 23)
    layers, vocab, width, hidden = draw(dim), draw(dim), draw(dim), draw(dim)
    tree = {
        "embed": (vocab, width),
        "blocks": {"up": (layers, width, hidden), "norm": {"scale": (layers, width)}},
        "norm": {"scale": (width,)},
    }
    if draw(st.booleans()):
        tree["head"] = (vocab, width)
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, np.float32), tree, is_leaf=_is_shape
    )


def _is_shape(node) -> bool:
    return isinstance(node, tuple)


def times_covered(params, *layouts) -> np.ndarray:
    """How often the layouts together cover each element, all leaves end to end."""
    counts = [np.zeros(leaf.size, int) for leaf in jax.tree.leaves(params)]
    for layout in layouts:
        for segment in layout.segments:
            assert segment.groups * segment.group == segment.size > 0
            counts[segment.leaf][segment.start : segment.stop] += 1
    return np.concatenate(counts)


@settings(deadline=None)  # the machine may be busy
@given(shapes(), st.sampled_from(SETTINGS), st.integers(1, 16))
def test_every_element_is_covered_once(params, setting, count):
    layout = make_layout(params, exchange(*setting))
    assert (times_covered(params, layout) == 1).all()
    shards = [layout.shard(i, count) for i in range(count)]
    assert (times_covered(params, *shards) == 1).all()
    sizes = [shard.num_elements for shard in shards]
    assert sum(sizes) == layout.num_elements
    assert max(sizes[:-1], default=0) <= layout.num_elements / count + 8  # borders are whole bytes


@settings(deadline=None)
@given(shapes(), st.sampled_from(CODECS), st.integers(1, 16), st.data())
def test_a_flattened_layout_has_the_same_elements_end_to_end(params, codec, count, data):
    shard = make_layout(params, exchange(codec)).shard(data.draw(st.integers(0, count - 1)), count)
    flat = shard.flattened()
    assert flat.num_bytes == shard.num_bytes
    borders = [(s.start, s.stop) for s in flat.segments]
    ends = [0, *np.cumsum([s.size for s in shard.segments], dtype=int).tolist()]
    assert borders == list(pairwise(ends))
    assert all(s.leaf == 0 for s in flat.segments)


@pytest.mark.parametrize(("codec", "scales"), SETTINGS)
def test_which_elements_share_a_magnitude(codec, scales):
    dim, hidden, layers, vocab = 12, 20, 3, 19
    model = TransformerConfig(vocab, dim, layers, heads=2, kv_heads=1, mlp_dim=hidden)
    layout = make_layout(abstract_params(model), exchange(codec, scales))
    matrices = layers * (4 * dim * dim - dim * dim + 3 * dim * hidden)  # kv_heads 1: half the width
    rows = 2 * 128  # of embedding and head, filled up from 19
    tables, vectors = rows * dim, (2 * layers + 1) * dim
    assert matrices + tables + vectors == layout.num_elements
    assert layout.num_elements - (rows - 2 * vocab) * dim == model.num_params
    if codec not in ("sign", "int8"):
        assert layout.num_bytes == layout.num_elements * BITS[codec] // 8
        return
    rows_a_layer = 3 * dim + dim + 2 * dim + hidden  # query, key, value; out; gate, up; down
    magnitudes = rows + layers * (7 if scales == "tensor" else rows_a_layer)
    groups = sum(s.groups for s in layout.segments if s.codec == codec)
    assert groups == magnitudes
    assert {s.size for s in layout.segments if s.codec == "fp32"} == {dim, layers * dim}
    elements = (matrices + tables) * BITS[codec] / 8
    bytes_ = layout.num_bytes - 4 * magnitudes - 4 * vectors
    assert elements <= bytes_ < elements + groups  # less than a byte of padding a group


def test_payload_of_150m_parameters_is_31_times_under_fp32():
    model = get_model("llama-150m")
    layout = make_layout(abstract_params(model), ExchangeConfig(codec="sign"))
    assert payload_bytes(layout) == FRAME_BYTES + layout.num_bytes
    assert 4 * model.num_params / payload_bytes(layout) >= 31


@pytest.mark.parametrize("count", [4, 8, 16])
def test_two_phases_send_30_times_less_than_an_fp32_ring(count):
    model = get_model("llama-150m")
    layout = make_layout(abstract_params(model), ExchangeConfig(codec="sign"))
    largest = max(payload_bytes(layout.shard(i, count)) for i in range(count))
    sent = 2 * (count - 1) * largest  # at most: others' shards, then its own to all others
    assert ring_all_reduce_bytes(count, 4 * model.num_params) / sent >= 30


def test_tied_weights_are_exchanged_once():
    tied = get_model("llama-tiny")
    assert tied.tied
    params = abstract_params(tied)
    layout = make_layout(params, ExchangeConfig(codec="sign"))
    assert layout.num_elements == tied.num_params
    assert (times_covered(params, layout) == 1).all()
    assert sum(s.groups == tied.vocab_size for s in layout.segments) == 1
