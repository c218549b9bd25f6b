# SPDX-License-Identifier: Apache-2.0
"""A cluster of two processes changes its strategy as one, by a chain and by CONA."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cluster_run import CHAIN
from rich.console import Console
from tiny_run import BATCH, SEQ_LEN, records

from geojax import runs
from geojax.track.chain import chain_notes
from geojax.track.summary import check_accounting, load_run

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("cache")]
PATIENCE_SECONDS = 900
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


@pytest.fixture(scope="module")
def folder(text, tmp_path_factory):
    """With the runs of both processes."""
    folder = tmp_path_factory.mktemp("cluster")
    cache = {"GEOJAX_CACHE": str(text.parent / "cache"), "XLA_FLAGS": FLAGS}
    script = Path(__file__).with_name("cluster_run.py")
    with (folder / "log.txt").open("w") as log:
        members = [
            subprocess.Popen(
                [sys.executable, str(script), str(i), str(folder), str(text)],
                env=os.environ | cache,
                stdout=log,
                stderr=log,
            )
            for i in range(2)
        ]
        try:
            codes = [m.wait(timeout=PATIENCE_SECONDS) for m in members]
        finally:
            for member in members:
                member.kill()
    assert codes == [0, 0], (folder / "log.txt").read_text()[-3000:]
    return folder


def losses(run):
    return [r["loss"] for r in records(run, "slice")]


def test_a_chain_over_processes_is_the_run_that_never_changed(folder, config, tmp_path):
    assert runs.start(config, tmp_path / "whole", Console(quiet=True))
    np.testing.assert_allclose(losses(folder / "chain"), losses(tmp_path / "whole"), rtol=2e-5)
    taken = [r["to"] for r in records(folder / "chain", "switch")]
    assert taken == [leg.strategy for leg in CHAIN[1:]]
    check_accounting(load_run(folder / "chain"))


def test_cona_decides_alike_in_all_processes(folder, config, tmp_path):
    """They would hang, or mix steps of two strategies, if they did not."""
    run = load_run(folder / "cona")
    check_accounting(run)
    assert len(run.switches) >= 2
    assert "all the same" in chain_notes(run)[-1]
    train = replace(config.train, total_tokens=40 * BATCH * SEQ_LEN, round_steps=2)
    assert runs.start(replace(config, train=train), tmp_path / "plain", Console(quiet=True))
    np.testing.assert_allclose(losses(folder / "cona"), losses(tmp_path / "plain"), rtol=2e-3)
