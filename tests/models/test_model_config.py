# SPDX-License-Identifier: Apache-2.0
"""A shape that exists can be built, has the parameters it claims, and else says what to change."""

import math
from dataclasses import replace

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.models.config import MODELS, RopeScaling, TransformerConfig, get_model
from geojax.models.transformer import abstract_params, make_apply

GOOD = TransformerConfig(vocab_size=16, dim=24, layers=2, heads=6, kv_heads=2, mlp_dim=8)


@st.composite
def shapes(draw):
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * groups
    return TransformerConfig(
        vocab_size=draw(st.integers(1, 40)),
        dim=heads * 2 * draw(st.integers(1, 4)),
        layers=draw(st.integers(1, 4)),
        heads=heads,
        kv_heads=kv_heads,
        mlp_dim=draw(st.integers(1, 30)),
        tied=draw(st.booleans()),
        rope_scaling=draw(st.sampled_from([None, RopeScaling()])),
    )


@settings(deadline=None, max_examples=20)
@given(config=shapes())
def test_a_shape_can_be_built_and_counts_its_parameters(config):
    params = abstract_params(config)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(params)) == config.num_params
    ids = jax.ShapeDtypeStruct((2, 5), "int32")
    logits = jax.eval_shape(make_apply(config), params, ids, ids, ids)
    assert logits.shape == (2, 5, config.vocab_size)
    assert logits.dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size 0 must be at least 1"),
        ({"dim": -8}, "dim -8 must be at least 1"),
        ({"layers": 0}, "layers 0 must be at least 1"),
        ({"heads": 0}, "heads 0 must be at least 1"),
        ({"kv_heads": 0}, "kv_heads 0 must be at least 1"),
        ({"mlp_dim": 0}, "mlp_dim 0 must be at least 1"),
        ({"dim": 25}, "dim 25 must be an even multiple of heads 6 .*use dim 36"),
        ({"dim": 18}, "dim 18 must be an even multiple of heads 6 .*use dim 24"),
        ({"kv_heads": 4}, r"heads 6 do not divide by kv_heads 4; use one of \[1, 2, 3, 6\]"),
        ({"kv_heads": 12}, r"heads 6 do not divide by kv_heads 12; use one of \[1, 2, 3, 6\]"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_with_the_fix(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(GOOD, **changes)


@settings(deadline=None, max_examples=50)
@given(dim=st.integers(1, 100), heads=st.integers(1, 12))
def test_the_width_that_the_message_names_is_legal(dim, heads):
    try:
        replace(GOOD, dim=dim, heads=heads, kv_heads=1)
    except ValueError as error:
        named = int(str(error).rsplit(" ", 1)[1])
        assert named > dim
        replace(GOOD, dim=named, heads=heads, kv_heads=1)


@pytest.mark.parametrize(("low", "high"), [(0.0, 4.0), (4.0, 4.0), (5.0, 4.0), (-1.0, 4.0)])
def test_rope_bands_that_cross_are_refused(low, high):
    with pytest.raises(ValueError, match=f"low_freq_factor {low} .*{high}; Llama 3 uses 1 and 4"):
        RopeScaling(low_freq_factor=low, high_freq_factor=high)


def test_unknown_model_is_answered_with_the_nearest():
    assert get_model("llama-tiny") is MODELS["llama-tiny"]
    with pytest.raises(ValueError, match="'lama-tiny'; did you mean 'llama-tiny'"):
        get_model("lama-tiny")
    with pytest.raises(ValueError, match="known: llama-tiny, llama-2m"):
        get_model("zzz")


def test_training_flops_equal_the_sum_over_matmuls():
    # Forward 2 FLOPs a multiply-add, backward twice that; scores and their use, half of them masked
    length, kv_width = 10, GOOD.kv_heads * GOOD.head_dim
    projections = 2 * GOOD.dim**2 + 2 * GOOD.dim * kv_width + 3 * GOOD.dim * GOOD.mlp_dim
    attention = 2 * GOOD.dim * length / 2
    forward = 2 * (GOOD.layers * (projections + attention) + GOOD.vocab_size * GOOD.dim)
    norms = (2 * GOOD.layers + 1) * GOOD.dim  # counted as if they were matmuls: 6 FLOPs each
    assert GOOD.train_flops_per_token(length) == pytest.approx(3 * forward + 6 * norms)
