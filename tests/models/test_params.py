# SPDX-License-Identifier: Apache-2.0
"""Every parameter has one role, which its place decides."""

from dataclasses import replace

import jax
import pytest

from geojax.models.config import TransformerConfig
from geojax.models.params import Role, roles
from geojax.models.transformer import abstract_params, init_params


def config(tied, layers=3):
    return TransformerConfig(
        vocab_size=16, dim=8, layers=layers, heads=2, kv_heads=1, mlp_dim=12, tied=tied
    )


GPT = replace(config(tied=True), family="gpt", context=5)
BERT = replace(GPT, family="bert")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_each_leaf_has_the_role_of_its_name(tied, layers):
    found = roles(abstract_params(config(tied, layers)))
    matrix, vector = Role("matrix", layers), Role("vector", layers)
    expected = {
        "embed": Role("table", 1),
        "blocks": {
            "attention": dict.fromkeys(("query", "key", "value", "out"), matrix),
            "attention_norm": {"scale": vector},
            "mlp": dict.fromkeys(("gate", "up", "down"), matrix),
            "mlp_norm": {"scale": vector},
        },
        "norm": {"scale": Role("vector", 1)},
    }
    if not tied:
        expected["head"] = Role("table", 1)
    assert found == expected


def test_biases_of_queries_keys_and_values_are_vectors():
    model = replace(config(tied=True), qkv_bias=True)
    plain, biased = (roles(abstract_params(m))["blocks"] for m in (config(True), model))
    names = ("query_bias", "key_bias", "value_bias")
    added = dict.fromkeys(names, Role("vector", 3))
    assert biased == plain | {"attention": plain["attention"] | added}


@pytest.mark.parametrize("model", [GPT, BERT], ids=["gpt", "bert"])
def test_each_leaf_of_the_other_families_has_the_role_of_its_name(model):
    matrix, vector = Role("matrix", 3), Role("vector", 3)
    one, table = Role("vector", 1), Role("table", 1)
    norm, stacked_norm = {"scale": one, "bias": one}, {"scale": vector, "bias": vector}

    def biased(*names):
        return dict.fromkeys(names, matrix) | dict.fromkeys((f"{n}_bias" for n in names), vector)

    expected = {
        "embed": table,
        "positions": table,
        "blocks": {
            "attention": biased("query", "key", "value", "out"),
            "attention_norm": stacked_norm,
            "mlp": biased("up", "down"),
            "mlp_norm": stacked_norm,
        },
        "norm": norm,
    }
    if model.family == "bert":
        expected |= {"types": table, "embed_norm": norm, "head_bias": one}
        expected |= {"transform": Role("matrix", 1), "transform_bias": one}
    assert roles(abstract_params(model)) == expected


def test_stacked_norm_scales_are_vectors_although_they_have_two_dims():
    params = abstract_params(config(tied=True))
    scale = params["blocks"]["mlp_norm"]["scale"]
    assert len(scale.shape) == 2
    assert roles(params)["blocks"]["mlp_norm"]["scale"].kind == "vector"


def test_arrays_and_shapes_have_the_same_roles():
    model = config(tied=False)
    assert roles(init_params(model, 0)) == roles(abstract_params(model))


@pytest.mark.parametrize("model", [config(tied=False), GPT, BERT], ids=["llama", "gpt", "bert"])
def test_stacked_tensors_divide_their_leaf(model):
    params = abstract_params(model)
    for leaf, role in zip(jax.tree.leaves(params), jax.tree.leaves(roles(params)), strict=True):
        assert role.stacked in (1, leaf.shape[0])
