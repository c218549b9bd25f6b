# SPDX-License-Identifier: Apache-2.0
"""Switching strategies in memory, against saving a checkpoint and restoring it, in one run.

    python benchmarks/reshard.py [--pairs N]

A 100M-parameter AdamW state (1.2 GB of float32, random: constants would compress) moves between all
ordered pairs of eight strategies on eight fake CPU devices. Every move is followed by a check of
all bits. Beside each: the same change by Orbax, save and restore, and the largest resident memory
while moving, over the state and its largest leaf.
"""

import argparse
import ctypes
import os
import shutil
import tempfile
import threading
import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from statistics import median

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np

from geojax.config import CheckpointConfig, OptimizerConfig, TrainConfig
from geojax.meshes.strategy import parse_strategy
from geojax.models.config import get_model
from geojax.track.environment import machine
from geojax.train.checkpoint import Checkpoints
from geojax.train.program import Program, Task

_M_MMAP_THRESHOLD = -3
STRATEGIES = (
    "dp8-tp1-pp1-mb1-gb32-fsdp",
    "dp4-tp2-pp1-mb1-gb32-fsdp",
    "dp2-tp4-pp1-mb1-gb32-fsdp",
    "dp4-tp1-pp2-mb1-gb32-fsdp",
    "dp2-tp2-pp2-mb1-gb32-fsdp",
    "dp2-tp2-pp2x2-mb1-gb32-fsdp",
    "dp1-tp4-pp2-mb1-gb32",
    "dp1-tp2-pp4-mb1-gb32",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=56, help="ordered pairs to try, at most 56")
    parser.add_argument("--checkpoints", type=int, default=6, help="of them also by Orbax")
    options = parser.parse_args()
    # Blocks from 64 kB on come from the system and go back to it, so that resident memory is what
    # is held, and not what was.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
    model = replace(get_model("gpt-2"), layers=8, vocab_size=50_304)
    train = TrainConfig(total_tokens=1, optimizer=OptimizerConfig(name="adamw"))
    task = Task(model, train, 1024)
    programs = {s: Program(task, parse_strategy(s), jax.devices()) for s in STRATEGIES}
    state = programs[STRATEGIES[0]].init(0)
    rng = np.random.default_rng(0)
    want = jax.tree.map(
        lambda x: rng.standard_normal(x.shape, np.float32) if x.ndim else np.asarray(x), state
    )
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(want))
    leaf_bytes = max(x.nbytes for x in jax.tree.leaves(want))
    print(f"{model.num_params / 1e6:.0f}M parameters, {state_bytes / 1e9:.2f} GB of state")
    pairs = list(permutations(STRATEGIES, 2))[: options.pairs]
    del state
    moves, saves, peaks = [], [], []
    for number, (before, after) in enumerate(pairs):
        source, target = programs[before], programs[after]
        taken = [source.put_state(want)]
        with PeakMemory() as memory:
            started = time.perf_counter()
            moved = target.move(taken, source)
            seconds = time.perf_counter() - started
        same = jax.tree.map(np.array_equal, target.host(moved), want)
        assert all(jax.tree.leaves(same)), f"{before} -> {after}: other bits"
        extra = memory.peak_bytes - memory.start_bytes
        moves.append(seconds)
        peaks.append(extra / leaf_bytes)
        line = f"{before:<30} {after:<30} {seconds:6.2f} s, peak + {extra / leaf_bytes:5.2f} leaf"
        if number < options.checkpoints:
            del moved
            saves.append(by_checkpoint(source.put_state(want), target))
            line += f"; by checkpoint {saves[-1]:5.1f} s, {saves[-1] / seconds:4.1f}x"
        print(line, flush=True)
    print(
        f"in memory: median {median(moves):.2f} s ({min(moves):.2f}-{max(moves):.2f}); by "
        f"checkpoint: {median(saves):.1f} s ({min(saves):.1f}-{max(saves):.1f}); "
        f"{median(saves) / median(moves):.1f}x. Peak over the state, in largest leaves "
        f"({leaf_bytes / 1e6:.0f} MB, {leaf_bytes / state_bytes:.0%} of the state): median "
        f"{median(peaks):.2f}, most {max(peaks):.2f}."
    )
    print(f"measured clock, {machine()}")


def by_checkpoint(state: object, target: Program) -> float:
    """Seconds to save a state and to restore it as `target` wants it, on this machine's disk."""
    folder = Path(tempfile.mkdtemp())
    try:
        started = time.perf_counter()
        with Checkpoints(folder, CheckpointConfig()) as checkpoints:
            checkpoints.save({"state": state}, {})
            checkpoints.wait()
            del state
            restored, _ = checkpoints.restore({"state": target.abstract_state})
            jax.block_until_ready(restored)
        return time.perf_counter() - started
    finally:
        shutil.rmtree(folder)


class PeakMemory:
    """Largest resident memory inside the block, sampled every 2 ms."""

    def __enter__(self) -> "PeakMemory":
        self.start_bytes = self.peak_bytes = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, resident_bytes())


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
