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
GPT = replace(GOOD, family="gpt", context=32)
BERT = replace(GPT, family="bert", tied=True)
DREAM = replace(GOOD, bidirectional=True, qkv_bias=True, shifted=True)


@st.composite
def shapes(draw):
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    family = draw(st.sampled_from(["llama", "gpt", "bert"]))
    heads, llama = kv_heads * groups, family == "llama"
    return TransformerConfig(
        vocab_size=draw(st.integers(1, 300)),
        dim=heads * (2 if llama else 1) * draw(st.integers(1, 4)),
        layers=draw(st.integers(1, 4)),
        heads=heads,
        kv_heads=kv_heads,
        mlp_dim=draw(st.integers(1, 30)),
        tied=family == "bert" or draw(st.booleans()),
        family=family,
        context=draw(st.integers(0 if llama else 5, 9)),
        rope_scaling=draw(st.sampled_from([None, RopeScaling()])) if llama else None,
        bidirectional=llama and draw(st.booleans()),
        qkv_bias=llama and draw(st.booleans()),
    )


@settings(deadline=None, max_examples=20)
@given(config=shapes())
def test_a_shape_can_be_built_and_counts_its_parameters(config):
    params = abstract_params(config)
    # Rows of embedding, head and a head's bias are filled up to whole multiples of 128.
    padding = sum(
        math.prod(params[name].shape[1:]) * (params[name].shape[0] - config.vocab_size)
        for name in {"embed", "head", "head_bias"} & set(params)
    )
    assert all(params[x].shape[0] % 128 == 0 for x in {"embed", "head", "head_bias"} & set(params))
    assert 0 <= config.padded_vocab - config.vocab_size < 128
    built = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    assert built - padding == config.num_params
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
        ({"family": "t5"}, "family 't5'; use llama, gpt or bert"),
        ({"context": -1}, "context -1: .* say how many, such as 1024"),
        ({"dropout": 1.0}, r"dropout 1.0 must lie in \[0, 1\)"),
        ({"attention_dropout": -0.1}, r"attention_dropout -0.1 must lie in \[0, 1\)"),
        ({"family": "gpt"}, "context 0: a gpt learns its positions; say how many, such as 1024"),
        ({"family": "bert", "tied": True}, "context 0: a bert learns its positions"),
        (
            {"family": "bert", "context": 32},
            "tied False: the head of a bert is its embedding; set it True",
        ),
        (
            {"family": "gpt", "context": 32, "rope_scaling": RopeScaling()},
            "rope_scaling means nothing to a gpt; leave it unset",
        ),
        (
            {"family": "gpt", "context": 32, "qkv_bias": True},
            "qkv_bias means nothing to a gpt; leave it unset",
        ),
        (
            {"family": "bert", "tied": True, "context": 32, "bidirectional": True},
            "bidirectional means nothing to a bert",
        ),
        (
            {"family": "gpt", "context": 32, "shifted": True},
            "shifted means nothing to a gpt; leave it unset",
        ),
        ({"shifted": True}, "shifted True: .* leave it unset, or set bidirectional"),
        ({"family": "gpt", "context": 32, "dim": 25}, "dim 25 must be .* heads 6; use dim 30"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_with_the_fix(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(GOOD, **changes)


@settings(deadline=None, max_examples=50)
@given(base=st.sampled_from([GOOD, GPT]), dim=st.integers(1, 100), heads=st.integers(1, 12))
def test_the_width_that_the_message_names_is_legal(base, dim, heads):
    try:
        replace(base, dim=dim, heads=heads, kv_heads=1)
    except ValueError as error:
        named = int(str(error).rsplit(" ", 1)[1])
        assert named > dim
        replace(base, dim=named, heads=heads, kv_heads=1)


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


def test_only_llamas_of_one_direction_and_gpts_are_causal():
    adapted = replace(GOOD, bidirectional=True, shifted=True)
    found = [model.causal for model in (GOOD, GPT, BERT, DREAM, adapted)]
    assert found == [True, True, False, False, False]


@pytest.mark.parametrize("config", [GOOD, GPT, BERT, DREAM], ids=["llama", "gpt", "bert", "dream"])
def test_training_flops_equal_the_sum_over_matmuls(config):
    # Forward 2 FLOPs a multiply-add, backward twice that; scores and their use, half of them masked
    # where later tokens are. Norms, biases, lookups and rows of padding count nothing.
    length, kv_width = 10, config.kv_heads * config.head_dim
    matrices = 3 if config.family == "llama" else 2
    projections = 2 * config.dim**2 + 2 * config.dim * kv_width
    projections += matrices * config.dim * config.mlp_dim
    attention = 2 * config.dim * length / (1 if config in (BERT, DREAM) else 2)
    head = config.vocab_size * config.dim + (config.dim**2 if config.family == "bert" else 0)
    forward = 2 * (config.layers * (projections + attention) + head)
    assert config.train_flops_per_token(length) == pytest.approx(3 * forward)
