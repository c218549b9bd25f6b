# SPDX-License-Identifier: Apache-2.0
"""A checkpoint gives back every bit of what was saved, whole or not at all."""

import shutil

import jax
import numpy as np
import pytest

from geojax.config import CheckpointConfig, ConfigError, OptimizerConfig
from geojax.train.checkpoint import Checkpoints
from geojax.train.optim import make_optimizer


def tree(seed=0, width=3):
    """Parameters and the states of two optimizers, one with a chain of named tuples."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    params = {"blocks": {"mlp": {"up": draw(2, width)}}, "norm": {"scale": draw(width)}}
    inner, outer = (
        make_optimizer(config).init(params)
        for config in (
            OptimizerConfig(name="adamw", weight_decay=0.1),
            OptimizerConfig(name="sgd", momentum=0.9),
        )
    )
    filled = jax.tree.map(lambda x: draw(*x.shape).astype(x.dtype), (inner, outer))
    east = {"opt_state": filled[0], "step": np.int32(7), "feedback": [draw(5), draw(2, 2)]}
    return {"params": params, "outer_opt_state": filled[1], "slices": {"east": east}}


def abstract(state):
    return jax.eval_shape(lambda: state)


def checkpoints(folder, keep=2):
    return Checkpoints(folder, CheckpointConfig(keep=keep))


def saved_and_loaded(folder, state, wanted=None):
    with checkpoints(folder) as saving:
        saving.save(state, {})
    with checkpoints(folder) as loading:
        return loading.restore(abstract(wanted or state))[0]


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(x, y)


def test_every_bit_comes_back(tmp_path):
    state = tree()
    state["params"]["norm"]["scale"][:] = [np.nan, -0.0, 1e-45]  # a denormal, lost by arithmetic
    meta = {"position": {"round": 3, "seconds": 0.1 + 0.2}, "plan": [{"name": "east"}]}
    with checkpoints(tmp_path / "checkpoints") as saving:
        assert saving.empty
        saving.save(state, meta)
    with checkpoints(tmp_path / "checkpoints") as loading:
        assert not loading.empty
        assert loading.meta() == meta
        restored, facts = loading.restore(abstract(state))
    assert facts == meta
    assert_same(restored, state)
    scale = restored["params"]["norm"]["scale"]
    assert scale.tobytes() == state["params"]["norm"]["scale"].tobytes()


def test_device_arrays_come_back_as_host_arrays(tmp_path):
    state = jax.tree.map(jax.device_put, tree())
    restored = saved_and_loaded(tmp_path, state)
    assert all(isinstance(x, np.ndarray | np.generic) for x in jax.tree.leaves(restored))
    assert_same(restored, jax.device_get(state))


def test_what_the_run_does_next_does_not_reach_a_save_that_goes_on(tmp_path):
    state = {"params": np.ones((512, 512), np.float32)}
    with checkpoints(tmp_path) as saving:
        saving.save(state, {})
        state["params"][:] = 2
    with checkpoints(tmp_path) as loading:
        restored, _ = loading.restore(abstract(state))
    assert (restored["params"] == 1).all()


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_checkpoints_are_kept(tmp_path, keep):
    with checkpoints(tmp_path, keep) as saving:
        for number in range(5):
            saving.save(tree(number), {"number": number})
    assert len(list(tmp_path.iterdir())) == keep
    with checkpoints(tmp_path, keep) as loading:
        restored, meta = loading.restore(abstract(tree()))
        assert meta == {"number": 4}
        assert_same(restored, tree(4))
        loading.save(tree(5), {"number": 5})
    with checkpoints(tmp_path, keep) as loading:
        assert loading.meta() == {"number": 5}


def test_another_shape_is_refused_with_its_name_and_both_shapes(tmp_path):
    with pytest.raises(ConfigError) as caught:
        saved_and_loaded(tmp_path, tree(width=3), tree(width=4))
    message = str(caught.value)
    assert "outer_opt_state/trace/blocks/mlp/up is (2, 3) there and (2, 4) in the" in message
    assert "resume with the config that wrote it" in message


def test_a_leaf_too_many_or_too_few_is_refused_by_name(tmp_path):
    less = tree()
    del less["slices"]["east"]["feedback"]
    for stored, wanted, message in (
        (tree(), less, r"slices/east/feedback/0 is \(5,\) there and absent in the config"),
        (less, tree(), r"slices/east/feedback/0 is missing there and \(5,\) in the config"),
    ):
        with pytest.raises(ConfigError, match=message):
            saved_and_loaded(tmp_path / str(len(message)), stored, wanted)


def test_another_optimizer_is_refused(tmp_path):
    params = tree()["params"]
    lion, adamw = (
        {"opt_state": make_optimizer(OptimizerConfig(name=n)).init(params)}
        for n in ("lion", "adamw")
    )
    with pytest.raises(ConfigError, match="opt_state/nu/blocks/mlp/up is missing there"):
        saved_and_loaded(tmp_path, lion, adamw)


def test_a_save_that_was_killed_is_passed_over_and_cleared_away(tmp_path):
    with checkpoints(tmp_path) as saving:
        saving.save(tree(), {"number": 1})
    (whole,) = tmp_path.iterdir()
    torn = tmp_path / f"{int(whole.name) + 1}.orbax-checkpoint-tmp"  # until it is renamed
    shutil.copytree(whole, torn)
    for path in sorted(torn.rglob("*"))[1::2]:
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with checkpoints(tmp_path) as loading:
        restored, meta = loading.restore(abstract(tree()))
        assert meta == {"number": 1}
        assert_same(restored, tree())
        loading.save(tree(2), {"number": 2})
    assert not torn.exists()
    with checkpoints(tmp_path) as loading:
        assert loading.meta() == {"number": 2}


def test_a_temporary_folder_alone_is_no_checkpoint(tmp_path):
    (tmp_path / "0.orbax-checkpoint-tmp").mkdir()
    with checkpoints(tmp_path) as loading:
        assert loading.empty
