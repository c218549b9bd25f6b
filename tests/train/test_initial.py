# SPDX-License-Identifier: Apache-2.0
"""What a run may start from."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from geojax.config import ConfigError, OptimizerConfig, TrainConfig
from geojax.meshes.strategy import parse_strategy
from geojax.models.config import TransformerConfig
from geojax.models.transformer import abstract_params, init_params
from geojax.models.weights import save_safetensors, tree
from geojax.train.initial import read_init
from geojax.train.program import Program, Task

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
    ("text", "vocab_size"),
    [("dp2-tp2-pp2-mb1-gb4-fsdp", 39), ("dp2-tp2-pp2x2-mb1-gb4-zero", 150)],
    ids=["in-the-padding", "longer"],
)
def test_weights_go_straight_to_a_strategy_s_devices(text, vocab_size, tmp_path, monkeypatch):
    theirs = replace(CAUSAL, layers=4, kv_heads=2)
    model = replace(theirs, vocab_size=vocab_size, bidirectional=True, shifted=True)
    draw = np.random.default_rng(0).standard_normal
    save_safetensors(
        jax.tree.map(lambda x: draw(x.shape).astype("f4"), abstract_params(theirs)),
        theirs,
        tmp_path / "w",
    )
    on_host = read_init(str(tmp_path / "w"), model)
    monkeypatch.setattr(tree, "_HostLeaf", None)  # no leaf is on the host whole
    train = TrainConfig(total_tokens=1, optimizer=OptimizerConfig("sgd", momentum=0.9))
    program = Program(Task(model, train, 8), parse_strategy(text), jax.devices())
    where = program.state_shardings
    state = program.init_from(read_init(str(tmp_path / "w"), model, where.params))
    assert jax.tree.map(lambda x: x.sharding, state) == where
    found = program.host(state)
    # Means of new entries are summed in another order.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found.params, on_host)
    assert not any(np.any(x) for x in jax.tree.leaves(found.opt_state))


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
