# SPDX-License-Identifier: Apache-2.0
"""Stages: the 150M model trained for some hundred steps; steps of other shapes timed.

Every timed step is a row of the calibration. The text that is trained on has a structure whose
entropy is known: each token is followed by one certain other, or else by any.
"""

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from geojax.bench.gpu.here import gpu_name, peak_bytes, pool_bytes, sheet, too_small
from geojax.bench.gpu.stages import Stage
from geojax.config import OptimizerConfig, RunError, TrainConfig
from geojax.data import Batch, empty_batch
from geojax.meshes.aot import compiled_memory
from geojax.meshes.calibration import step_row
from geojax.meshes.hardware import Cluster
from geojax.meshes.memory import step_memory
from geojax.meshes.strategy import parse_strategy
from geojax.meshes.timing import StepCase
from geojax.models.config import get_model
from geojax.platform import mfu
from geojax.train.program import Program, Task
from geojax.train.timed import time_steps

TIMED_STEPS = 5
ROOM = 1.1
"""Over the estimate of a step's memory, that it is tried."""
KNOWN, FOLLOWS = 1024, 0.9
"""Ids that the text is made of, and how often the certain one follows."""
WAIT_STEPS = 10
"""Steps that are launched before the host waits for them."""


@dataclass(frozen=True)
class Shape:
    """A step that is timed."""

    model: str
    seq_len: int
    strategy: str

    def __str__(self) -> str:
        return f"{self.model}, {self.seq_len} tokens, {self.strategy}"

    @property
    def estimate_bytes(self) -> int:
        strategy = parse_strategy(self.strategy)
        return step_memory(get_model(self.model), self.seq_len, strategy).total_bytes


@dataclass(frozen=True)
class Training:
    """What the stage `train` does."""

    shapes: tuple[Shape, ...]
    """Timed; the fastest of those of `batch` is trained."""
    batch: int
    steps: int


TRAINING = Training(
    tuple(
        Shape("llama-150m", 1024, f"dp1-tp1-pp1-{rest}")
        for rest in (
            "mb16-gb16",
            "mb8-gb64",
            "mb16-gb64",
            "mb32-gb64",
            "mb64-gb64",
            "mb64-gb64-full",
            "mb32-gb256",
        )
    ),
    64,
    300,
)
TRAINING_TINY = Training(
    tuple(Shape("llama-tiny", 32, f"dp1-tp1-pp1-{rest}") for rest in ("mb1-gb4", "mb4-gb4")), 4, 24
)
OTHERS = (
    Shape("gpt-2", 1024, "dp1-tp1-pp1-mb8-gb8"),
    Shape("llama-300m", 1024, "dp1-tp1-pp1-mb16-gb64"),
    Shape("gpt-3-1.3b", 2048, "dp1-tp1-pp1-mb4-gb8-matmuls"),
    Shape("llama-500m", 1024, "dp1-tp1-pp1-mb8-gb16"),
    Shape("gpt-2", 1024, "dp1-tp1-pp1-mb1-gb2"),
    Shape("llama-3.2-1b", 2048, "dp1-tp1-pp1-mb4-gb4"),
    Shape("llama-500m", 2048, "dp1-tp1-pp1-mb8-gb16-full"),
    Shape("gpt-3-1.3b", 2048, "dp1-tp1-pp1-mb1-gb2"),
)
OTHERS_TINY = (
    Shape("gpt-tiny", 32, "dp1-tp1-pp1-mb2-gb2"),
    Shape("gpt-tiny", 32, "dp1-tp1-pp1-mb1-gb2"),
    Shape("llama-tiny", 64, "dp1-tp1-pp1-mb2-gb2"),
    Shape("llama-tiny", 64, "dp1-tp1-pp1-mb2-gb4-full"),
)


def train(stage: Stage, tiny: bool) -> None:
    """Strategies of one device timed, within half of the time, and the fastest trained."""
    plan = TRAINING_TINY if tiny else TRAINING
    best: tuple[float, Program] | None = None
    for shape, program, speed in _timed(stage, plan.shapes, 0.5):
        if program.strategy.global_batch == plan.batch and (best is None or speed > best[0]):
            best = speed, program
            stage.result["fastest"] = str(shape)
    if best is None:
        stage.left_out.append("training: no strategy was timed")
        return
    with stage.trying("training"):
        train_program(stage, best[1], plan.steps)


def steps(stage: Stage, tiny: bool) -> None:
    """Steps of other shapes timed."""
    for _ in _timed(stage, OTHERS_TINY if tiny else OTHERS, 1.0):
        pass


def _timed(stage: Stage, shapes: Sequence[Shape], share: float):
    """Time `shapes` as far as they fit, and yield (shape, program, tokens a second) of each.

    Those that take little memory come first, so that each one's own peak can be told; where time is
    short, the largest are left out.
    """
    fitting = []
    for shape in sorted(shapes, key=lambda shape: shape.estimate_bytes):
        why = too_small(ROOM * shape.estimate_bytes)
        if why:
            stage.left_out.append(f"{shape}: {why}")
        else:
            fitting.append(shape)
    for shape in stage.each(fitting, share):
        made = None
        with stage.trying(shape):
            program = _program(shape)
            made = shape, program, _measure(stage, shape, program)
        if made:
            yield made
        gc.collect()


def _program(shape: Shape) -> Program:
    optimizer = OptimizerConfig(name="adamw", learning_rate=1e-3, weight_decay=0.1)
    train = TrainConfig(total_tokens=1, optimizer=optimizer)
    task = Task(get_model(shape.model), train, shape.seq_len)
    return Program(task, parse_strategy(shape.strategy), jax.devices()[:1])


def _measure(stage: Stage, shape: Shape, program: Program) -> float:
    """Tokens a second; a row for people, and one for the calibration."""
    before = peak_bytes()
    timed = time_steps(program, TIMED_STEPS)
    after = peak_bytes()
    strategy, model = program.strategy, program.task.model
    speed = strategy.global_batch * shape.seq_len / timed.seconds
    row: dict[str, Any] = {
        "model": shape.model,
        "seq_len": shape.seq_len,
        "strategy": shape.strategy,
        "compile_seconds": timed.compile_seconds,
        "seconds": timed.seconds,
        "spread": timed.spread,
        "tokens_per_second": speed,
        "mfu": mfu(speed, model, shape.seq_len, 1, gpu_name()),
        "estimated_bytes": shape.estimate_bytes,
        "compiler_bytes": compiled_memory(program.compile(1)).total_bytes,
        "peak_bytes": after if after > before else None,  # else an earlier program's
    }
    stage.result.setdefault("timed", []).append(row)
    case = StepCase(model, shape.seq_len, strategy, Cluster(sheet(), 1, 1))
    stage.result.setdefault("rows", []).append(step_row(case, timed.seconds))
    return speed


def train_program(stage: Stage, program: Program, count: int) -> None:
    """`count` steps, fewer where the time is over. RunError where the loss does not fall, or falls
    below what the text allows."""
    model, batch, length = (
        program.task.model,
        program.strategy.global_batch,
        program.task.seq_len,
    )
    draw = partial(structured_batch, np.random.default_rng(0), model.vocab_size, batch, length)
    state, losses, marks = program.init(0), [], []
    for done in range(count):
        if done % WAIT_STEPS == 0:
            jax.block_until_ready(losses[-1:])
            marks.append((done, time.perf_counter()))
            if stage.left_seconds <= 0:
                stage.left_out.append(f"{count - done} of {count} training steps")
                break
        state, stats = program.run(state, program.put_chunk(draw()), 1, 0.0, 1 / count, done)
        losses.append(stats.loss)
    jax.block_until_ready(state)
    marks.append((len(losses), time.perf_counter()))
    if len(losses) <= WAIT_STEPS:
        raise RunError(f"{len(losses)} steps were done in time, too few to say anything")
    nats = np.array(losses, np.float64) / (batch * length)
    tenth = max(len(nats) // 10, 1)
    first, last = float(nats[:tenth].mean()), float(nats[-tenth:].mean())
    floor = entropy(model.vocab_size)
    # The first steps are left out: nothing was launched ahead of them.
    taken, seconds = marks[-1][0] - marks[1][0], marks[-1][1] - marks[1][1]
    speed = taken * batch * length / seconds
    stage.result["training"] = {
        "strategy": str(program.strategy),
        "text": f"made up: of {min(KNOWN, model.vocab_size)} ids each is followed by a certain one "
        f"{FOLLOWS:.0%} of the time, else by any of them",
        "steps": len(nats),
        "loss_first_tenth": first,
        "loss_last_tenth": last,
        "loss_least": floor,
        "losses": [round(x, 4) for x in nats[:: max(len(nats) // 50, 1)].tolist()],
        "tokens_per_second": speed,
        "mfu": mfu(speed, model, length, 1, gpu_name()),
        "peak_bytes": peak_bytes() or None,
        "pool_bytes": pool_bytes(),
    }
    if not first > last >= 0.8 * floor:
        raise RunError(
            f"the loss went from {first:.3f} to {last:.3f}, and it should fall to {floor:.3f}, "
            "what the text holds, at best"
        )


def structured_batch(rng: np.random.Generator, vocab: int, batch: int, length: int) -> Batch:
    """A host chunk of one step of the text."""
    known = min(KNOWN, vocab)
    after = np.random.default_rng(1).permutation(known).astype(np.int32)
    text = rng.integers(0, known, (batch, length + 1), np.int32)
    follows = rng.random((batch, length)) < FOLLOWS
    for i in range(length):
        text[:, i + 1] = np.where(follows[:, i], after[text[:, i]], text[:, i + 1])
    empty = empty_batch((1, batch), length)
    return empty._replace(
        tokens=text[None, :, :-1],
        targets=text[None, :, 1:],
        weights=np.ones_like(empty.weights),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), empty.positions.shape),
    )


def entropy(vocab: int) -> float:
    """Nats a token of that text, the least loss that there can be."""
    known = min(KNOWN, vocab)
    other = (1 - FOLLOWS) / known
    certain = FOLLOWS + other
    return -certain * math.log(certain) - (known - 1) * other * math.log(other)
