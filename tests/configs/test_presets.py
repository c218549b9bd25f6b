# SPDX-License-Identifier: Apache-2.0
"""Every preset is a run, survives its JSON, and files that are none are refused in one line."""

import json
import math
from dataclasses import replace

import pytest

from geojax.config import ConfigError, RunConfig, with_seed
from geojax.config.files import read_config
from geojax.configs import METHODS, PRESETS, load_config
from geojax.runs import save_config


def stored(config, folder):
    path = folder / "config.json"
    save_config(config, path)
    return path


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_comes_back_equal_from_its_json(name, tmp_path):
    config = load_config(name)
    assert isinstance(config, RunConfig)
    assert read_config(stored(config, tmp_path)) == config


def test_presets_are_told_apart_by_their_lines_and_runs():
    lines = [preset.line for preset in PRESETS.values()]
    assert len(set(lines)) == len(lines)
    assert all(line and "\n" not in line for line in lines)
    runs = [preset.make() for preset in PRESETS.values()]
    assert len({repr(run) for run in runs}) == len(runs)


@pytest.mark.parametrize("name", [n for n in PRESETS if n.startswith("cona-")])
def test_cona_goes_by_the_noise_of_the_steps_that_its_optimizer_takes(name):
    config = load_config(name)
    assert config.train.optimizer.name == "adamw"
    assert config.noise.metric == "preconditioned"


def test_methods_of_the_demo_share_all_but_the_method():
    # A comparison that also changed the data, the model or the clock would compare nothing.
    for name in METHODS:
        config, other = load_config(f"demo-{name}"), load_config("demo-diloco")
        for part in ("model", "data", "slices", "clock", "eval", "checkpoint", "seed"):
            assert getattr(config, part) == getattr(other, part), (name, part)
        assert config.train.total_tokens == other.train.total_tokens
        assert config.name == name


def test_infinite_settings_come_back_from_json(tmp_path):
    # JSON has no infinity, and null would be another setting.
    config = load_config("quickstart")
    config = replace(config, balance=replace(config.balance, max_steps_ratio=math.inf))
    config = replace(config, train=replace(config.train, clip_norm=math.inf))
    assert read_config(stored(config, tmp_path)) == config


def test_a_seed_moves_parameters_and_data_but_not_the_split():
    config = load_config("quickstart")
    other = with_seed(config, 7)
    assert (other.seed, other.data.seed) == (7, 7)
    assert replace(other, seed=0, data=replace(other.data, seed=0)) == config


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demo-geomsh", "no preset named 'demo-geomsh'; did you mean 'demo-geomesh'?"),
        ("quickstrat", "did you mean 'quickstart'?"),
        ("zzz", "no preset named 'zzz'; `geojax train --help` lists them"),
        ("missing.py", "no file 'missing.py'; give a preset or an existing Python file"),
    ],
)
def test_an_unknown_name_is_answered_with_what_there_is(name, message):
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    assert message in str(caught.value)


def test_a_file_of_the_users_own_is_loaded(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import replace\n"
        "from geojax.configs import load_config\n"
        "def config():\n"
        "    return replace(load_config('quickstart'), name='mine')\n"
    )
    assert load_config(str(path)) == replace(load_config("quickstart"), name="mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it must define a function config() that returns a RunConfig"),
        ("config = 3", "it must define a function config() that returns a RunConfig"),
        ("def config(): pass", "config() returned NoneType, not a RunConfig"),
        ("def config(): return {}", "config() returned dict, not a RunConfig"),
        ("def config(size): pass", "TypeError: "),
        ("def config(): return 1 / 0", "ZeroDivisionError: division by zero"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of"),
        ("def config(:", "SyntaxError: "),
        (
            "from geojax.config import OptimizerConfig\n"
            "def config(): return OptimizerConfig(learning_rate=0)",
            "ConfigError: learning_rate 0 must be above 0",
        ),
    ],
)
def test_a_file_that_gives_no_run_is_refused_in_one_line(text, message, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def edited(folder, *place, value):
    """The stored quickstart with one entry set."""
    path = stored(load_config("quickstart"), folder)
    content = json.loads(path.read_text())
    *parents, last = place
    inner = content
    for key in parents:
        inner = inner[key]
    inner[last] = value
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("batch_sise",), 3, "batch_sise: Unexpected keyword argument"),
        (("train", "optimizer", "beta"), 0.9, "train.optimizer.beta: Unexpected keyword"),
        (("slices", 0, "colour"), "red", "slices.0.colour: Unexpected keyword"),
        (("model", "experts"), 8, "model.experts: Unexpected keyword"),
        (("train", "total_tokens"), "many", "train.total_tokens: Input should be a valid integer"),
        (("train", "total_tokens"), 0, "train: Value error, train.total_tokens 0 must be"),
        (("exchange", "codec"), "morse", "exchange.codec: Input should be 'sign', 'int8'"),
        (("data",), {"seq_len": -1}, "data: Value error, data.seq_len -1 must be at least 1"),
    ],
)
def test_a_stored_config_that_is_none_is_refused_with_the_place(place, value, message, tmp_path):
    path = edited(tmp_path, *place, value=value)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert f"{path}: {message}" in str(caught.value)


def test_a_missing_or_torn_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a run folder: cannot read config\.json"):
        read_config(tmp_path / "config.json")
    path = stored(load_config("quickstart"), tmp_path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(ConfigError, match="Invalid JSON"):
        read_config(path)
