# SPDX-License-Identifier: Apache-2.0
"""Two processes of four devices compute, move and save what one process of eight does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from geojax.config import CheckpointConfig
from geojax.meshes.strategy import parse_strategy
from geojax.train.checkpoint import Checkpoints
from geojax.train.program import Program

FOLDER = Path(__file__).parent
PATIENCE_SECONDS = 900
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


@pytest.mark.full
def test_two_processes_do_what_one_does(tmp_path):
    """One start of them, which takes a minute, serves all three."""
    texts = run_both(tmp_path)
    for text in texts:
        check_gradients(text)
        assert len(re.findall(r"moved \S+ True", text)) == 3  # moving keeps every bit
        assert "False" not in text
    check_restored(tmp_path)


def run_both(folder):
    """What both processes printed; they leave a checkpoint in `folder`."""
    environment = os.environ | {"XLA_FLAGS": FLAGS, "JAX_ENABLE_X64": "1"}
    with (folder / "log.txt").open("w") as log:
        members = [
            subprocess.Popen(
                [sys.executable, str(FOLDER / "two_processes.py"), str(i), str(folder)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            for i in range(2)
        ]
        try:
            texts = [m.communicate(timeout=PATIENCE_SECONDS)[0] for m in members]
        finally:
            for member in members:
                member.kill()
    errors = (folder / "log.txt").read_text()[-3000:]
    assert [m.returncode for m in members] == [0, 0], errors
    return texts


def check_gradients(text):
    """Loss and gradients are one device's: in float64, the largest norm of a leaf's difference."""
    found = re.findall(r"gradient (\S+) (\S+) (\S+)", text)
    assert len(found) == 5
    for strategy, loss, leaf in found:
        assert float(loss) <= 1e-9, strategy
        assert float(leaf) <= 1e-9, strategy


def check_restored(folder):
    """What two processes saved one process restores."""
    sys.path.insert(0, str(FOLDER))
    from two_processes import TASK, expected_params

    strategy = parse_strategy("dp4-tp1-pp2-mb1-gb8")
    program = Program(TASK, strategy, jax.devices())
    with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
        restored, meta = checkpoints.restore({"params": program.abstract_state.params})
    assert meta["layer_order"] is None
    jax.tree.map(
        lambda got, want: np.testing.assert_array_equal(np.asarray(got), want),
        restored["params"],
        expected_params(),
    )
