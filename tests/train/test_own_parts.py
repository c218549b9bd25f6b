# SPDX-License-Identifier: Apache-2.0
"""Layers and optimizers of one's own: named by the config, trained by any legal strategy, resumed
by their files alone, and refused in one line."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import own_parts
import pytest
from jax.sharding import PartitionSpec
from rich.console import Console
from tiny_run import LLAMA, records, tiny_run

from geojax import runs
from geojax.config import ConfigError, OptimizerConfig, TrainConfig
from geojax.config.own import load_own, reference
from geojax.configs import load_config
from geojax.data import Batch
from geojax.meshes.strategy import parse_strategy, problems
from geojax.models.transformer import abstract_params, count_params, init_params
from geojax.train.optim import make_optimizer
from geojax.train.program import Program, Task
from geojax.train.step import init_state

QUIET = Console(file=io.StringIO())
FILE = Path(own_parts.__file__)
GATED = replace(LLAMA, block=f"{FILE}:Gated")


def own(name: str) -> OptimizerConfig:
    return OptimizerConfig("own", learning_rate=1e-3, function=f"{FILE}:{name}")


def test_what_reference_writes_is_found_again():
    assert reference(own_parts.adamw) == f"{FILE}:adamw"
    assert load_own(reference(own_parts.adamw), "field") is own_parts.adamw
    assert reference(optax.adamw).endswith(":adamw")
    assert load_own(reference(optax.adamw), "field") is optax.adamw


def test_what_a_resumed_run_could_not_find_has_no_reference():
    def inner():
        pass

    for thing in (inner, lambda: None, 3):
        with pytest.raises(ConfigError, match=r"not at the top level of a module.* give a class"):
            reference(thing)


def test_a_file_of_a_run_names_its_own_parts(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import replace\n"
        "import optax\n"
        "import geojax\n"
        "from geojax.config import OptimizerConfig\n"
        "def sgd(): return optax.sgd(1.0)\n"
        "def config():\n"
        "    base = geojax.load_config('quickstart')\n"
        "    own = OptimizerConfig('own', 0.1, function=geojax.reference(sgd))\n"
        "    return replace(base, train=replace(base.train, optimizer=own))\n"
    )
    optimizer = load_config(str(path)).train.optimizer
    assert optimizer.function == f"{path}:sgd"
    assert isinstance(make_optimizer(optimizer), optax.GradientTransformation)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine", "'mine' names nothing; write it like mine.py:Name or package.module:Name"),
        ("mine.py:", "names nothing"),
        ("a-b:name", "names nothing"),
        ("/nowhere/mine.py:name", "cannot load /nowhere/mine.py: FileNotFoundError"),
        ("no_such_module_:name", "cannot load no_such_module_: ModuleNotFoundError"),
        (f"{FILE}:other", "defines no other that can be called; define it at the top level"),
        (f"{FILE}:A_NUMBER", "defines no A_NUMBER that can be called"),
        (f"{FILE}:nothing", "returned NoneType; return an optax optimizer, such as optax.adamw"),
        (f"{FILE}:fails", "failed: KeyError: 'rate'"),
    ],
)
def test_an_optimizer_that_is_none_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError) as caught:
        make_optimizer(OptimizerConfig("own", function=text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_that_are_none_are_refused():
    with pytest.raises(ConfigError, match=r"model\.block .* name a class made of flax\.nnx"):
        abstract_params(replace(LLAMA, block=f"{FILE}:adamw"))


def test_settings_of_other_optimizers_mean_nothing_to_ones_own():
    for settings, message in (
        ({"function": ""}, "function '' goes with name 'own'"),
        ({"b1": 0.9}, "b1 0.9 .* goes with lion or adamw, not own"),
        ({"momentum": 0.9}, "momentum 0.9 .* goes with sgd, not own"),
        ({"weight_decay": 0.1}, "weight_decay 0.1 means nothing to an optimizer of one's own"),
    ):
        with pytest.raises(ConfigError, match=message):
            OptimizerConfig(**{"name": "own", "function": f"{FILE}:adamw"} | settings)
    with pytest.raises(ConfigError, match=r"function 'a\.py:b' goes with name 'own' and only with"):
        OptimizerConfig("lion", function="a.py:b")


def test_the_same_optimizer_as_ones_own_takes_the_same_steps():
    params = {"blocks": {"up": np.ones((2, 3, 4), np.float32)}, "embed": np.ones((4, 3))}
    grads = jax.tree.map(lambda x: np.linspace(-1, 1, x.size).reshape(x.shape), params)
    ours, theirs = make_optimizer(OptimizerConfig("adamw")), make_optimizer(own("adamw"))
    states = [o.init(params) for o in (ours, theirs)]
    for _ in range(3):
        steps = []
        for i, optimizer in enumerate((ours, theirs)):
            update, states[i] = optimizer.update(grads, states[i], params)
            steps.append(update)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *steps)


def program(strategy: str, model=LLAMA, optimizer=None) -> Program:
    parsed = parse_strategy(strategy)
    train = TrainConfig(total_tokens=1, optimizer=optimizer or own("masked"))
    return Program(Task(model, train, 8), parsed, jax.devices()[: parsed.devices])


def test_the_state_of_any_optimizer_lies_as_its_parameters_do():
    made = program("dp2-tp2-pp2-mb1-gb4-zero")
    state = made.state_shardings
    held = jax.tree.leaves(made.abstract_state.opt_state)
    spread = {x.sharding.spec for x in held}
    assert len(spread) > 3
    whole = [x for x in held if x.sharding.spec == PartitionSpec()]
    assert all(x.ndim < 2 for x in whole)
    assert jax.tree.structure(state) == jax.tree.structure(made.abstract_state)
    known = OptimizerConfig("adamw")
    plain = program("dp2-tp2-pp2-mb1-gb4-zero", optimizer=known)
    expected = optax.tree.map_params(
        make_optimizer(known),
        lambda _, spec: spec,
        jax.eval_shape(make_optimizer(known).init, abstract_params(LLAMA)),
        jax.tree.map(lambda s: s.spec, plain.state_shardings.opt_state.mu),
        transform_non_params=lambda _: PartitionSpec(),
    )
    assert jax.tree.map(lambda s: s.spec, plain.state_shardings.opt_state) == expected


def test_a_state_that_is_not_by_layer_is_refused_where_layers_change_places():
    program("dp1-tp1-pp2-mb1-gb4", optimizer=own("factored"))
    with pytest.raises(ConfigError, match=r"not by layer, and strategy .*; use interleave 1"):
        program("dp1-tp1-pp2x2-mb1-gb4", optimizer=own("factored"))


def test_own_layers_are_whole_on_each_device():
    (reason,) = problems(parse_strategy("dp1-tp2-pp1-mb1-gb4"), GATED)
    assert "model.block" in reason
    assert reason.endswith("use tp 1")
    assert not problems(parse_strategy("dp2-tp1-pp2x2-mb1-gb4-fsdp"), GATED)


def test_own_layers_count_by_what_they_are():
    sizes = [x.size for x in jax.tree.leaves(abstract_params(GATED))]
    padding = 2 * (LLAMA.padded_vocab - LLAMA.vocab_size) * LLAMA.dim
    assert count_params(GATED) == sum(sizes) - padding
    assert count_params(LLAMA) == LLAMA.num_params


def test_own_layers_train_alike_under_every_strategy():
    steps = []
    for strategy in ("dp1-tp1-pp1-mb4-gb4", "dp2-tp1-pp2x2-mb1-gb4-fsdp"):
        made = program(strategy, GATED, OptimizerConfig("adamw", weight_decay=0.1))
        host = init_state(init_params(GATED, 1), made.task.train)
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, LLAMA.vocab_size, (1, 4, 8)).astype(np.int32)
        chunk = made.put_chunk(batch(tokens))
        state, stats = made.run(made.put_state(host), chunk, 1, 0.5, 0.1, 0)
        steps.append((made.host(state.params), float(stats.loss)))
    (one, loss), (many, other) = steps
    assert other == pytest.approx(loss, rel=1e-3)  # bfloat16 activations
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=4e-3), one, many)


def batch(tokens):
    """Sequences [1, b, t] of which each token is predicted from the one before."""
    places = np.broadcast_to(np.arange(tokens.shape[-1], dtype=np.int32), tokens.shape)
    weights = (places < tokens.shape[-1] - 1).astype(np.float32)
    samples = np.arange(tokens.shape[1], dtype=np.uint32)[None]
    return Batch(tokens, np.roll(tokens, -1, -1), weights, np.zeros_like(tokens), places, samples)


@pytest.mark.runs
def test_a_run_goes_on_with_its_own_parts_wherever_their_file_is(text, cache, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(FILE.read_text())
    config = tiny_run(text)
    half, full = (n * 8 * 16 for n in (8, 16))
    optimizer = OptimizerConfig("own", learning_rate=1e-3, function=f"{mine}:masked")
    config = replace(
        config,
        model=replace(LLAMA, block=f"{mine}:Gated"),
        train=replace(config.train, total_tokens=half, optimizer=optimizer),
    )
    folder = tmp_path / "run"
    assert runs.start(config, folder, QUIET)
    moved = tmp_path / "elsewhere" / "mine.py"
    moved.parent.mkdir()
    mine.rename(moved)
    train = replace(config.train, total_tokens=full)
    runs.save_config(replace(config, train=train), folder / "config.json")
    fresh_modules()
    with pytest.raises(ConfigError, match=r"cannot load .*mine\.py: FileNotFoundError"):
        runs.resume(folder, QUIET)
    optimizer = replace(optimizer, function=f"{moved}:masked")
    model = replace(config.model, block=f"{moved}:Gated")
    moved_config = replace(config, model=model, train=replace(train, optimizer=optimizer))
    runs.save_config(moved_config, folder / "config.json")
    assert runs.resume(folder, QUIET)
    losses = [r["loss"] for r in records(folder, "eval")]
    assert losses == sorted(losses, reverse=True)


def fresh_modules():
    """Forget files that were loaded, as another process would not know them."""
    for name in [n for n in sys.modules if n.startswith("_geojax_own_")]:
        del sys.modules[name]
