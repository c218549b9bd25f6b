# SPDX-License-Identifier: Apache-2.0
"""Memory of a candidate by compiling its training step for GPUs that are not here.

Invariant: what is compiled is the program that would run, from the same code. The answer is kept on
disk under all that it follows from: the job, the strategy, this package's sources and the versions
of libraries and compiler. (The program's own text would do, but takes ten seconds to write.)
"""

import hashlib
import os
from functools import cache
from pathlib import Path

from geojax.config import OptimizerConfig, TrainConfig
from geojax.data import cache_dir
from geojax.meshes.candidates import Job
from geojax.meshes.strategy import Strategy
from geojax.track.environment import versions


def exact_bytes(job: Job, gpu: str, strategy: Strategy, folder: Path | None = None) -> int:
    """Bytes of one GPU of type `gpu`: arguments, results and temporaries, donated ones once.

    Raises meshes.aot.AotUnavailableError where the compiler for GPUs is not installed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA says in C++ what it tries on the way
    from geojax.meshes import aot
    from geojax.train.program import Program, Task

    cluster = job.cluster
    devices = aot.compile_only_devices(gpu, cluster.nodes, cluster.gpus_per_node)
    optimizer = {
        "adamw": OptimizerConfig(name="adamw", weight_decay=0.1),
        "lion": OptimizerConfig(name="lion", weight_decay=0.1),
        "sgd": OptimizerConfig(name="sgd"),
    }[job.optimizer]
    task = Task(job.model, TrainConfig(total_tokens=1, optimizer=optimizer), job.seq_len)

    def compile_it() -> aot.CompiledMemory:
        with aot.cudnn_unchecked():
            lowered = Program(task, strategy, devices).lower(1)
        compiled = lowered.compile(compiler_options=aot.COMPILER_OPTIONS)
        return aot.compiled_memory(compiled)

    key = {
        "gpu": gpu,
        "nodes": f"{cluster.nodes} x {cluster.gpus_per_node}",
        "task": repr(task),
        "strategy": str(strategy),
        "sources": _sources(),
        "libraries": versions(),
    }
    return aot.cached_memory(key, compile_it, folder or cache_dir() / "aot").total_bytes


@cache
def _sources() -> str:
    """Digest of the code that programs are made from."""
    from geojax import config, meshes, models, train

    digest = hashlib.sha256()
    for package in (config, meshes, models, train):
        for folder in package.__path__:
            for path in sorted(Path(folder).glob("*.py")):
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
