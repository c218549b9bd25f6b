# SPDX-License-Identifier: Apache-2.0
"""What a run may start from."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from geojax.config import ConfigError
from geojax.models.config import TransformerConfig
from geojax.models.transformer import init_params
from geojax.models.weights import save_safetensors
from geojax.train.initial import read_init

CAUSAL = TransformerConfig(vocab_size=37, dim=16, layers=2, heads=2, kv_heads=1, mlp_dim=24)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    target = tmp_path_factory.mktemp("weights") / "causal"
    params = jax.tree.map(np.asarray, init_params(CAUSAL, 0))
    save_safetensors(params, CAUSAL, target)
    return str(target), params


def test_weights_of_the_same_model_come_as_they_are(source):
    folder, params = source
    jax.tree.map(np.testing.assert_array_equal, read_init(folder, CAUSAL), params)


def test_an_adapted_model_keeps_all_weights_and_new_entries_begin_as_the_mean(source):
    folder, params = source
    adapted = replace(CAUSAL, vocab_size=39, bidirectional=True, shifted=True)
    found = read_init(folder, adapted)
    for name, table in found.items():
        if name not in ("embed", "head"):
            jax.tree.map(np.testing.assert_array_equal, table, params[name])
            continue
        np.testing.assert_array_equal(table[:37], params[name][:37])
        np.testing.assert_allclose(table[37:39], params[name][:37].mean(0)[None].repeat(2, 0))
        assert not table[39:].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, r"of another model: model\.layers 3 is 2 there; set it to match"),
        ({"dim": 32, "heads": 4}, r"model\.dim 32, model\.heads 4 is 16, 2 there"),
        ({"vocab_size": 30}, r"model\.vocab_size 30 is 37 there"),
    ],
)
def test_another_model_is_refused_by_what_differs_alone(source, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        read_init(source[0], replace(CAUSAL, **changes))
    assert "mlp_dim" not in str(error.value)
