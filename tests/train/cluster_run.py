# SPDX-License-Identifier: Apache-2.0
"""One of the processes that test_cluster_run starts: python cluster_run.py NUMBER FOLDER TEXT."""

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from tiny_run import BATCH, SEQ_LEN, tiny_run
from two_processes import address

from geojax import platform, runs
from geojax.config import ChainLeg, ClusterConfig, ConaConfig, NoiseConfig, PlatformConfig
from geojax.train.programs import Programs

CHAIN = (
    ChainLeg(0, "dp8-tp1-pp1-mb1-gb8-zero"),
    ChainLeg(4 * BATCH * SEQ_LEN, "dp2-tp2-pp2x2-mb1-gb8"),
    ChainLeg(12 * BATCH * SEQ_LEN, "dp2-tp1-pp4-mb1-gb8"),
)


def main() -> None:
    number, folder, text = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    cluster = ClusterConfig(address(folder, number), processes=2, process_id=number)
    base = replace(tiny_run(text), platform=PlatformConfig(interface="lo", cluster=cluster))
    quiet = Console(quiet=True)
    assert runs.start(replace(base, strategy="", chain=CHAIN), folder / "chain", quiet)

    # Both wait for what they asked to have compiled, so that a short run has switches.
    prefetch = Programs.prefetch

    def at_once(self, strategy):
        future = prefetch(self, strategy)
        future.exception()
        return future

    Programs.prefetch = at_once
    cona = ConaConfig(
        global_batches=(8,),
        micro_batches=(1, 2),
        dwell_rounds=1,
        trial_share=0.9,
        timing_error=1.0,
    )
    train = replace(base.train, total_tokens=40 * BATCH * SEQ_LEN, round_steps=2)
    noise = NoiseConfig(window_samples=50, first_steps=2, probe_steps=10)
    chosen = replace(base, strategy="", cona=cona, train=train, noise=noise)
    platform.initialize = lambda config: None  # joined already
    assert runs.start(chosen, folder / "cona", quiet)


if __name__ == "__main__":
    main()
