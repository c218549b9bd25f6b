# SPDX-License-Identifier: Apache-2.0
"""One of the processes that test_two_processes starts: python two_processes.py NUMBER FOLDER."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from geojax.config import (
    CheckpointConfig,
    ClusterConfig,
    OptimizerConfig,
    PlatformConfig,
    TrainConfig,
)
from geojax.meshes.axes import strategy_mesh
from geojax.meshes.gradient import Sequences, ShardedModel
from geojax.meshes.pipeline import storage_order
from geojax.meshes.rules import state_specs
from geojax.meshes.strategy import parse_strategy
from geojax.models.config import TransformerConfig
from geojax.models.transformer import init_params
from geojax.platform import initialize
from geojax.train.checkpoint import Checkpoints
from geojax.train.program import Program, Task

LENGTH, BATCH = 8, 8
MODEL = TransformerConfig(
    200,
    dim=16,
    layers=4,
    heads=4,
    kv_heads=4,
    mlp_dim=32,
    tied=True,
    family="gpt",
    context=LENGTH,
    dropout=0.1,
)
TASK = Task(MODEL, TrainConfig(total_tokens=1, optimizer=OptimizerConfig("adamw")), LENGTH)
STRATEGIES = (
    "dp8-tp1-pp1-mb1-gb8",
    "dp2-tp4-pp1-mb2-gb8-fsdp",
    "dp2-tp2-pp2-mb1-gb8",
    "dp1-tp4-pp2-mb2-gb8",
    "dp4-tp1-pp2x2-mb1-gb8-zero",
)


def expected_params():
    """Float32 parameters that a checkpoint of TASK is made from."""
    return jax.tree.map(lambda x: np.asarray(x, np.float32), init_params(MODEL, 5))


def batch(micro_batches: int) -> Sequences:
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, MODEL.vocab_size, (2, BATCH, LENGTH), np.int32)
    weights = (rng.random((BATCH, LENGTH)) < 0.5).astype(np.float32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))
    samples = np.arange(BATCH, dtype=np.uint32)
    fields = (tokens, targets, weights, np.zeros_like(tokens), positions, samples)
    return Sequences(*(x.reshape(micro_batches, -1, *x.shape[1:]) for x in fields))


def gradient(text: str, params, devices):
    """Loss and gradient on the host, layers in the model's order."""
    strategy = parse_strategy(text)
    mesh = strategy_mesh(strategy, devices)
    model = ShardedModel(MODEL, strategy, mesh, "float64", False, LENGTH)
    order = storage_order(MODEL.layers, strategy)
    if order is not None:
        params = params | {"blocks": jax.tree.map(lambda x: x[order], params["blocks"])}
    specs, _ = state_specs(model.rules, strategy)
    placed = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
    rows = jax.device_put(batch(strategy.micro_batches), NamedSharding(mesh, model.batch_spec))
    sums, grads = jax.jit(model.gradient)(placed, rows, jax.random.key(7))
    grads = jax.tree.map(lambda x: np.asarray(gathered(x)), grads)
    if order is not None:
        place = np.argsort(order)
        grads["blocks"] = jax.tree.map(lambda x: x[place], grads["blocks"])
    return float(gathered(sums.nats)), grads


def gathered(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def main() -> None:
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    cluster = ClusterConfig(address(folder, number), processes=2, process_id=number)
    initialize(PlatformConfig(interface="lo", cluster=cluster))
    params = jax.tree.map(lambda x: np.asarray(x, np.float64) + 0.01, init_params(MODEL, 0))
    want_loss, want = gradient("dp1-tp1-pp1-mb8-gb8", params, jax.local_devices()[:1])
    for text in STRATEGIES:
        loss, grads = gradient(text, params, jax.devices())
        norms = jax.tree.map(lambda a, b: float(np.linalg.norm(a - b)), grads, want)
        print("gradient", text, abs(loss - want_loss), max(jax.tree.leaves(norms)), flush=True)

    source = Program(TASK, parse_strategy(STRATEGIES[1]), jax.devices())
    state = source.init(5)
    state = replace(state, params=source.put_params(expected_params()))
    host = jax.tree.map(gathered, state.params)
    for text in (STRATEGIES[2], STRATEGIES[4], STRATEGIES[1]):
        target = Program(TASK, parse_strategy(text), jax.devices())
        taken = [state]
        del state
        state = target.move(taken, source)
        source = target
        now = jax.tree.map(gathered, state.params)
        if target.order is not None:
            place = np.argsort(target.order)
            now["blocks"] = jax.tree.map(lambda x, p=place: x[p], now["blocks"])
        same = jax.tree.map(np.array_equal, now, host)
        print("moved", text, all(jax.tree.leaves(same)), flush=True)
    with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save({"params": state.params}, {"layer_order": None})
    assert jnp.isfinite(want_loss)


def address(folder: Path, number: int) -> str:
    """HOST:PORT that the first process picks and the second reads."""
    import socket
    import time

    path = folder / "address"
    if number == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            text = f"127.0.0.1:{listener.getsockname()[1]}"
        path.with_suffix(".tmp").write_text(text)
        path.with_suffix(".tmp").rename(path)
    while not path.exists():
        time.sleep(0.05)
    return path.read_text()


if __name__ == "__main__":
    main()
