# SPDX-License-Identifier: Apache-2.0
"""Every parameter has one role, which its place decides."""

import jax
import pytest

from geojax.models.config import TransformerConfig
from geojax.models.params import Role, roles
from geojax.models.transformer import abstract_params, init_params


def config(tied, layers=3):
    return TransformerConfig(
        vocab_size=16, dim=8, layers=layers, heads=2, kv_heads=1, mlp_dim=12, tied=tied
    )


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


def test_stacked_norm_scales_are_vectors_although_they_have_two_dims():
    params = abstract_params(config(tied=True))
    scale = params["blocks"]["mlp_norm"]["scale"]
    assert len(scale.shape) == 2
    assert roles(params)["blocks"]["mlp_norm"]["scale"].kind == "vector"


def test_arrays_and_shapes_have_the_same_roles():
    model = config(tied=False)
    assert roles(init_params(model, 0)) == roles(abstract_params(model))


def test_stacked_tensors_divide_their_leaf():
    params = abstract_params(config(tied=False))
    for leaf, role in zip(jax.tree.leaves(params), jax.tree.leaves(roles(params)), strict=True):
        assert role.stacked in (1, leaf.shape[0])
