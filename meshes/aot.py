# SPDX-License-Identifier: Apache-2.0
"""Programs compiled for GPUs that are not here, and what the compiler says of their memory.

Invariant: nothing here needs, starts or changes an accelerator, or the process's own devices: CPU
work goes on beside it. XLA compiles for a description of a GPU; bytes are those of one device.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import jax
from jax.experimental import topologies

from geojax.meshes.hardware import get_gpu

COMPILER_OPTIONS: dict[str, str | int | bool] = {"xla_gpu_autotune_level": 0}
"""For `lowered.compile(compiler_options=...)`: without a GPU nothing can be timed, and trying every
kernel costs a third of the time; the memory stays the same."""
CACHE_FORMAT = 1
"""To be raised where cached entries no longer mean what they did."""

_CUDNN_VERSION = 91200
_PLUGINS = {
    "jax-cuda13-plugin": "jax_plugins.xla_cuda13",
    "jax-cuda12-plugin": "jax_plugins.xla_cuda12",
}


class AotUnavailableError(ValueError):
    """No compiler for GPUs is installed, or it does not fit the installed jaxlib."""


@dataclass(frozen=True)
class Target:
    """What XLA asks of a GPU, beside the memory and bandwidth in `hardware.GPUS`."""

    device: str
    """Name that the driver gives."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    cores: int
    """Streaming multiprocessors."""
    fpus_per_core: int
    """Float32 lanes."""
    threads_per_core: int
    shared_kib_per_core: int
    l2_mib: int
    clock_ghz: float
    """Highest."""


TARGETS: dict[str, Target] = {
    "h100": Target("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 228, 50, 1.98),
    "h200": Target("NVIDIA H200", (9, 0), 132, 128, 2048, 228, 50, 1.98),
    "b200": Target("NVIDIA B200", (10, 0), 148, 128, 2048, 228, 126, 1.965),
    "a100-40gb": Target("NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 2048, 164, 40, 1.41),
    "a100-80gb": Target("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 164, 40, 1.41),
    "l40s": Target("NVIDIA L40S", (8, 9), 142, 128, 1536, 100, 96, 2.52),
    "rtx-6000-ada": Target(
        "NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 128, 1536, 100, 96, 2.505
    ),
}
"""NVIDIA's architecture papers and data sheets, and the CUDA C++ guide's table of capabilities."""


def target_config(gpu: str) -> str:
    """The named GPU as the text proto (GpuTargetConfigProto) that XLA compiles for."""
    sheet, target = get_gpu(gpu), TARGETS[gpu]
    major, minor = target.capability
    features = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    # The driver keeps 1 KiB of a core's shared memory for each block.
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {(target.shared_kib_per_core - 1) * 2**10}
  shared_memory_per_core: {target.shared_kib_per_core * 2**10}
  threads_per_core_limit: {target.threads_per_core}
  core_count: {target.cores}
  fpus_per_core: {target.fpus_per_core}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  memory_bandwidth: {int(sheet.memory_bytes_per_second)}
  l2_cache_size: {target.l2_mib * 2**20}
  clock_rate_ghz: {target.clock_ghz}
  device_memory_size: {sheet.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor}{features} }}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
}}
platform_name: "CUDA"
device_description_str: "{target.device}"
"""


def compile_only_devices(gpu: str, nodes: int, gpus_per_node: int) -> list[jax.Device]:
    """`nodes` x `gpus_per_node` GPUs to lower and compile for, node by node; none of them exists.

    A node is a process to XLA (`device.process_index`). Devices of two calls make no common mesh.
    AotUnavailableError, with what to install, where the compiler is missing or does not fit.
    """
    config = target_config(gpu)
    if nodes < 1 or gpus_per_node < 1:
        raise ValueError(
            f"{nodes} nodes of {gpus_per_node} GPUs are no devices; use at least 1 of each"
        )
    plugin = _require_plugin()
    describe = partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=config,
        topology=f"1x{nodes}x{gpus_per_node}",
    )
    with _libraries_unchecked():
        try:
            found = describe()
        except NotImplementedError:
            # JAX looked for plugins before, and refused this one for libraries that are not here.
            import_module(plugin).initialize()
            found = describe()
    return list(found.devices)


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes on one device that a compiled program claims, by its compiler's account.

    Not in it: the driver's context, communication libraries' buffers, and scratch space that a
    kernel library takes at run time.
    """

    arguments_bytes: int
    outputs_bytes: int
    temporaries_bytes: int
    aliased_bytes: int
    """Outputs that take the place of donated arguments."""

    @property
    def total_bytes(self) -> int:
        return (
            self.arguments_bytes + self.outputs_bytes + self.temporaries_bytes - self.aliased_bytes
        )


def compiled_memory(compiled: jax.stages.Compiled) -> CompiledMemory:
    """What `compiled` claims on each device."""
    stats = compiled.memory_analysis()
    assert stats is not None, "this backend gives no memory analysis"
    return CompiledMemory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
    )


def cached_memory(
    key: Mapping[str, object], compute: Callable[[], CompiledMemory], folder: Path
) -> CompiledMemory:
    """`compute()`, or what it gave before for the same key, compiler and targets, from `folder`.

    `key` is written as JSON, and must hold all that decides the program. An entry that cannot be
    read is computed again. Processes may share the folder.
    """
    decides = {
        "key": dict(key),
        "jax": jax.__version__,
        "plugin": [_version(package) for package in _PLUGINS],
        "options": COMPILER_OPTIONS,
        "targets": [target_config(gpu) for gpu in TARGETS],
        "format": CACHE_FORMAT,
    }
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    path = folder / f"{digest[:32]}.json"
    if memory := _read_memory(path):
        return memory
    memory = compute()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{uuid4().hex}")
    try:
        temporary.write_text(json.dumps({"key": dict(key), "memory": asdict(memory)}, indent=1))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return memory


class Collective(NamedTuple):
    """One kind of collective in one run of a program, on one device."""

    count: int
    bytes: int
    """Sum of the results' sizes; what travels also depends on the kind and on the group."""


def collectives(compiled: jax.stages.Compiled) -> dict[str, Collective]:
    """Collectives of one run by kind, such as all-reduce; those in a loop, once an iteration.

    Every branch of a conditional counts. ValueError where a loop with collectives does not say how
    often it runs.
    """
    computations: dict[str, list[str]] = {}
    entry = ""
    lines: list[str] = []
    for line in (compiled.as_text() or "").splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations[header["name"]] = []
            entry = header["name"] if header["entry"] else entry
        lines.append(line)

    @cache
    def inside(computation: str) -> Counter[tuple[str, str]]:
        total: Counter[tuple[str, str]] = Counter()
        for line in computations[computation]:
            if not (found := _INSTRUCTION.match(line)):
                continue
            # Of an asynchronous pair the end has the result's shape.
            kind = found["opcode"].removesuffix("-done")
            if kind in _COLLECTIVES:
                total[kind, "count"] += 1
                total[kind, "bytes"] += _size_bytes(found["shape"])
            called: Counter[tuple[str, str]] = Counter()
            for names in _CALLEES.findall(line):
                for name in _NAME.findall(names):
                    called.update(inside(name))
            times = 1
            if called and kind == "while":
                if not (trips := _TRIPS.search(line)):
                    raise ValueError(f"a loop does not say how often it runs: {line.strip()[:60]}")
                times = int(trips[1])
            total.update({what: number * times for what, number in called.items()})
        return total

    total = inside(entry)
    kinds = sorted({kind for kind, _ in total})
    return {kind: Collective(total[kind, "count"], total[kind, "bytes"]) for kind in kinds}


_COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}
_NAME = re.compile(r"[\w.-]+")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r" +(?:ROOT )?%?[\w.-]+ = (?P<shape>.*?) (?P<opcode>[a-z][\w-]*)\(")
_CALLEES = re.compile(r"(?:body|condition|calls|to_apply|\w+_computations?)=(%?[\w.-]+|\{[^}]*\})")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")


def _size_bytes(shape: str) -> int:
    """Size of an array or a tuple of arrays as HLO writes it, such as (f32[2,3]{1,0}, pred[])."""
    total = 0
    for kind, bits, dims in _ARRAY.findall(shape):
        elements = math.prod(int(dim) for dim in dims.split(",") if dim)
        total += elements * (8 if kind == "pred" else int(bits or 0)) // 8
    return total


def _read_memory(path: Path) -> CompiledMemory | None:
    """The cached entry at `path`; None where there is none, or it is damaged."""
    try:
        memory = CompiledMemory(**json.loads(path.read_text())["memory"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return memory if all(isinstance(value, int) for value in asdict(memory).values()) else None


def _require_plugin() -> str:
    """Module of the installed CUDA plugin; AotUnavailableError where none fits."""
    jaxlib = metadata.version("jaxlib")
    for package, module in _PLUGINS.items():
        version = _version(package)
        if version is None:
            continue
        # JAX's own rule: plugins are built with one release of jaxlib and serve no other.
        if version.split(".")[:3] != jaxlib.split(".")[:3]:
            raise AotUnavailableError(
                f"{package} {version} does not fit jaxlib {jaxlib}; "
                "pip install --upgrade 'geojax[aot]'"
            )
        return module
    raise AotUnavailableError(
        "compiling for GPUs that are not here needs JAX's CUDA plugin, for Linux; "
        "pip install 'geojax[aot]'"
    )


def _version(package: str) -> str | None:
    """Version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def _libraries_unchecked() -> Generator[None]:
    """JAX's search for plugins, in here, does not ask for the libraries that running needs."""
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def cudnn_unchecked() -> Generator[None]:
    """Lower programs with cuDNN's attention where cuDNN is not installed: only its version is asked
    for, and the compiler needs no more.

    JAX has no public setting for it; where its internals have moved, lowering raises as it does
    without this.
    """
    try:
        from jax._src.cudnn import fused_attention_stablehlo as fused
    except ImportError:
        yield
        return
    check = fused.check_cudnn_version
    fused.check_cudnn_version = lambda: _CUDNN_VERSION
    try:
        yield
    finally:
        fused.check_cudnn_version = check
