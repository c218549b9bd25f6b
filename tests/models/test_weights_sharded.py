# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that go straight to the devices of a strategy."""

import json
import math
import os
import select
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import random_params
from jax.sharding import NamedSharding

from geojax.meshes.axes import strategy_mesh
from geojax.meshes.rules import make_rules, state_specs
from geojax.meshes.strategy import parse_strategy
from geojax.models.config import MODELS, TransformerConfig
from geojax.models.weights import (
    file_shapes,
    files,
    huggingface_tensors,
    load_safetensors,
    save_safetensors,
)


def shardings_of(config, text):
    """Where a strategy keeps parameters on the first devices."""
    strategy = parse_strategy(text)
    specs, _ = state_specs(make_rules(config, strategy), strategy)
    mesh = strategy_mesh(strategy, jax.devices()[: strategy.devices])
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


@pytest.mark.parametrize("text", ["dp8-tp1-pp1-mb1-gb8-fsdp", "dp2-tp2-pp2-mb1-gb8"])
@pytest.mark.parametrize("name", ["dream-tiny", "gpt-tiny", "bert-tiny"])
def test_parameters_lie_where_the_strategy_has_them(name, text, tmp_path):
    config = replace(MODELS[name], vocab_size=450)  # the last of four parts is padding mostly
    params, where = random_params(config), shardings_of(config, text)
    save_safetensors(params, config, tmp_path / "out", max_shard_bytes=100_000)
    loaded = load_safetensors(tmp_path / "out", config, shardings=where)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert jax.tree.map(lambda x: x.sharding, loaded) == where


# A LLaDA of 4 GB, of which stacked leaves are the largest by far: on the host, whole, one would
# take three times what is allowed.
LARGE = TransformerConfig(
    vocab_size=32_768,
    dim=2048,
    layers=34,
    heads=16,
    kv_heads=16,
    mlp_dim=6144,
    bidirectional=True,
)
CHILD = """
    import sys, time
    import jax, numpy as np
    from test_weights_sharded import LARGE, shardings_of
    from geojax.models.weights import load_safetensors

    where = shardings_of(LARGE, "dp8-tp1-pp1-mb1-gb8-fsdp")
    jax.block_until_ready(jax.device_put(np.zeros(8), jax.devices()[7]))
    print("ready", flush=True)
    params = load_safetensors(sys.argv[1], LARGE, jax.numpy.bfloat16, shardings=where)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) == 2 * LARGE.num_params
    print("done", flush=True)
    time.sleep(60)
"""


def write_zeros(folder, config):
    """A checkpoint of several files in bfloat16 that takes no room on disk; its largest tensor's
    bytes."""
    shapes = file_shapes(huggingface_tensors(config), config)
    sizes = {name: 2 * math.prod(shape) for name, shape in shapes.items()}
    index = {}
    for number, names in enumerate(files._shard(sizes, 1e9)):
        file = folder / f"model-{number}.safetensors"
        header = files._header({name: shapes[name] for name in names}, "bfloat16")
        with file.open("wb") as out:
            out.write(header)
            out.truncate(len(header) + sum(sizes[name] for name in names))
        index |= dict.fromkeys(names, file.name)
    assert len(set(index.values())) >= 4
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return max(sizes.values())


@pytest.mark.full
def test_a_large_checkpoint_takes_two_of_its_tensors_beyond_the_parameters(tmp_path):
    largest = write_zeros(tmp_path, LARGE)
    assert 2 * LARGE.num_params > 3.9e9
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent,
        text=True,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        before, peak = anonymous_bytes(child.pid), 0
        while not select.select([child.stdout], [], [], 0.001)[0]:
            peak = max(peak, anonymous_bytes(child.pid))
        assert child.stdout.readline() == "done\n"
    finally:
        child.kill()
        child.communicate()
    extra = peak - before - 2 * LARGE.num_params
    print(f"peak {extra / 1e6:.0f} MB beyond the parameters; largest tensor {largest / 1e6:.0f} MB")
    assert extra <= 2 * largest


def anonymous_bytes(pid):
    """Resident memory that is no file's: pages of files come from the cache, and go back to it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = [line.split()[1] for line in lines if line.startswith("RssAnon")]
    return 1024 * int(found[0]) if found else 0  # of a process that has ended
