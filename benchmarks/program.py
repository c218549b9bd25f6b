# SPDX-License-Identifier: Apache-2.0
"""What a Program costs: its step beside the same step written directly in JAX, and compile times.

    python benchmarks/program.py [--rounds N]

Both steps run in turn in one process on one device, on the same batch, from the same parameters;
what is compared is the ratio of their times, round by round. The direct one knows no mesh, no
strategy and no shard_map.
"""

import argparse
import os
import time
from dataclasses import replace
from statistics import median

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax

from geojax.config import OptimizerConfig, TrainConfig
from geojax.data import empty_batch
from geojax.meshes.strategy import Strategy
from geojax.models.config import get_model
from geojax.models.transformer import init_params, make_apply
from geojax.track.environment import machine
from geojax.train.program import Program, Task

LENGTH, BATCH, MICRO_BATCHES = 256, 8, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20, help="pairs of measurements")
    rounds = parser.parse_args().rounds
    ratios = overhead(rounds)
    low, high = np.percentile(ratios, [25, 75])
    print(
        f"step of a Program on one device / direct step: median {median(ratios):.3f} "
        f"(quartiles {low:.3f}-{high:.3f}, {rounds} pairs)"
    )
    times = {layers: compile_seconds(layers) for layers in (6, 24)}
    print(
        f"compile time: 6 layers {times[6]:.1f} s, 24 layers {times[24]:.1f} s, "
        f"{times[24] / times[6]:.2f}x"
    )
    print(f"measured clock, {machine()}")


def overhead(rounds: int) -> list[float]:
    """Ratios of seconds, Program over direct."""
    model = get_model("llama-2m")
    train = TrainConfig(
        total_tokens=1,
        optimizer=OptimizerConfig(name="adamw", weight_decay=0.1),
        compute_dtype="float32",
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.vocab_size, (1, BATCH, LENGTH + 1), np.int32)
    batch = empty_batch((1, BATCH), LENGTH)._replace(
        tokens=tokens[..., :-1],
        targets=tokens[..., 1:],
        weights=np.ones((1, BATCH, LENGTH), np.float32),
        positions=np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (1, BATCH, LENGTH)),
    )
    params = init_params(model, 0)

    strategy = Strategy(1, 1, 1, BATCH // MICRO_BATCHES, BATCH)
    program = Program(Task(model, train, LENGTH), strategy, jax.devices()[:1])
    state, chunk = program.init(0), program.put_chunk(batch)

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(0.9, 0.95),
        optax.add_decayed_weights(0.1, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        optax.scale(-1e-3),
    )
    apply = make_apply(model)

    def loss(params, tokens, targets, positions):
        logits = apply(params, tokens, positions)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).sum()

    def direct(params, opt_state, tokens, targets, positions):
        def add(total, micro):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *micro)), None

        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (nats, grads), _ = jax.lax.scan(add, zero, (tokens, targets, positions))
        grads = jax.tree.map(lambda g: g / targets.size, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, nats

    direct = jax.jit(direct, donate_argnums=(0, 1))
    split = [
        jnp.asarray(x[0]).reshape(MICRO_BATCHES, -1, LENGTH)
        for x in (batch.tokens, batch.targets, batch.positions)
    ]
    own = (params, optimizer.init(params))

    ratios = []
    for number in range(rounds + 1):
        started = time.perf_counter()
        state, stats = program.run(state, chunk, 1, 0.5, 0.0, 0)
        jax.block_until_ready(state)
        between = time.perf_counter()
        *own, nats = direct(*own, *split)
        jax.block_until_ready(own)
        ended = time.perf_counter()
        if number == 0:  # the first of each compiled
            assert np.isclose(float(stats.loss), float(nats), rtol=1e-4)
        else:
            ratios.append((between - started) / (ended - between))
    return ratios


def compile_seconds(layers: int) -> float:
    model = replace(get_model("gpt-2"), layers=layers)
    task = Task(model, TrainConfig(total_tokens=1), 1024)
    lowered = Program(task, Strategy(1, 1, 1, 1, 2), jax.devices()[:1]).lower(1)
    started = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
