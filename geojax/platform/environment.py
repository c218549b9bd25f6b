# SPDX-License-Identifier: Apache-2.0
"""What XLA, NCCL and JAX read from the process when they start: presets, and setting them.

Invariant: what the user has set stays, and nothing is ignored in silence: `apply` returns a line
for each thing that it set, found set already, or could not use.
"""

import os
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from geojax.config import ConfigError, PlatformConfig, RunError, require
from geojax.data import cache_dir

XLA_PRESETS: dict[str, dict[str, str]] = {
    "none": {},
    # One collective for several layers, so that links are used well; gathered ahead and reduced
    # behind the loop over layers, whose body is doubled so that buffers need no copies.
    "throughput": {
        "--xla_gpu_enable_latency_hiding_scheduler": "true",
        "--xla_gpu_all_reduce_combine_threshold_bytes": str(128 * 2**20),
        "--xla_gpu_all_gather_combine_threshold_bytes": str(128 * 2**20),
        "--xla_gpu_reduce_scatter_combine_threshold_bytes": str(64 * 2**20),
        "--xla_gpu_enable_pipelined_all_reduce": "true",
        "--xla_gpu_enable_pipelined_all_gather": "true",
        "--xla_gpu_enable_pipelined_reduce_scatter": "true",
        "--xla_gpu_enable_while_loop_double_buffering": "true",
    },
    # A collective in flight holds its buffers; a recorded graph holds memory outside JAX's pool.
    "low-memory": {
        "--xla_gpu_enable_latency_hiding_scheduler": "false",
        "--xla_gpu_enable_command_buffer": "",
    },
}
DETERMINISTIC: dict[str, str] = {"--xla_gpu_deterministic_ops": "true"}

NCCL_PRESETS: dict[str, dict[str, str]] = {
    "none": {},
    # One TCP stream does not fill a fast link: 4 threads with 4 sockets each, and larger buffers
    # (NCCL's default: 4 MiB) for longer round trips.
    "ethernet": {
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_BUFFSIZE": str(8 * 2**20),
    },
    # 22: a lost packet is waited for longer than 2^22 x 4 us = 17 s, which a busy switch may need.
    "infiniband": {"NCCL_NET": "IB", "NCCL_IB_DISABLE": "0", "NCCL_IB_TIMEOUT": "22"},
}

Rows = list[tuple[str, str]]
"""Rows of (name, value) for the console."""


def apply(config: PlatformConfig) -> Rows:
    """Set what `config` says in this process, before JAX's backends start; rows of what was done.

    A second call with the same config changes nothing. ConfigError where the interface or the cache
    folder cannot be used, or this jaxlib lacks a flag; RunError where JAX has started already and
    something would have to change.
    """
    import jax
    from jax._src.xla_bridge import backends_are_initialized

    if config.interface:
        _require_interface(config.interface)
    reason = why_no_gpu()
    flags, variables = ({}, {}) if reason else (_gpu_flags(config), _gpu_variables(config))
    cache = _cache_folder(config.compilation_cache, on_cpu=bool(reason))
    settings = {"jax_compilation_cache_dir": cache} if cache else {}
    text = _flags_text() if flags else ""
    theirs = jax.config.jax_compilation_cache_dir
    rows: Rows = []
    for wanted, found in (
        (flags, flags_in(text)),
        (variables, os.environ),
        (settings, {"jax_compilation_cache_dir": theirs} if theirs else {}),
    ):
        for name in [name for name in wanted if name in found]:
            rows.append((name, _kept(wanted.pop(name), found[name])))
    new = flags | variables | settings
    if new and backends_are_initialized():
        raise RunError(
            f"JAX has started already, too late to set {', '.join(new)}; call "
            "geojax.platform.apply before anything runs on JAX"
        )
    if flags:
        preset = " ".join(f"{name}={value}" for name, value in flags.items())
        _require_known(preset)
        os.environ["XLA_FLAGS"] = f"{preset} {text}".strip()
    os.environ.update(variables)
    if settings:
        _make_folder(Path(cache))
        jax.config.update("jax_compilation_cache_dir", cache)
    rows += [(name, value or "(empty)") for name, value in new.items()]
    return rows + (_without_gpu(config, reason) if reason else [])


def why_no_gpu() -> str:
    """Why this process will not compute on an NVIDIA GPU; empty where it will.

    Looks at JAX's settings, the device files and the installed plugin; starts nothing.
    """
    import jax

    platforms = jax.config.jax_platforms
    if platforms:
        named = set(platforms.split(",")) & {"cuda", "gpu"}
        return "" if named else f"JAX_PLATFORMS is {platforms!r}"
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return "this machine has no NVIDIA GPU"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    if not (find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin")):
        return "JAX has no CUDA plugin here; install geojax[cuda12] or geojax[cuda13]"
    return ""


def flags_in(text: str) -> dict[str, str]:
    """Flags of an XLA_FLAGS text, named as '--name'; one without a value is 'true'."""
    found = re.finditer(r"(?:^|\s)--?(\w+)(?:=('[^']*'|\"[^\"]*\"|\S*))?", text)
    return {f"--{flag[1]}": "true" if flag[2] is None else flag[2].strip("'\"") for flag in found}


def _flags_text() -> str:
    """The user's flags; XLA takes a value that is not a flag for a file of flags."""
    text = os.environ.get("XLA_FLAGS", "").strip()
    if not text or text.startswith("-"):
        return text
    try:
        return " ".join(Path(text).read_text().split())
    except OSError as error:
        raise ConfigError(
            f"XLA_FLAGS {text!r} is neither flags nor a file that can be read ({error.strerror}); "
            "begin flags with '--'"
        ) from error


def _kept(wanted: str, found: str) -> str:
    note = "" if found == wanted else f" (set before; not {wanted or 'empty'})"
    return f"{found or '(empty)'}{note}"


def _gpu_flags(config: PlatformConfig) -> dict[str, str]:
    return XLA_PRESETS[config.xla_preset] | (DETERMINISTIC if config.deterministic else {})


def _gpu_variables(config: PlatformConfig) -> dict[str, str]:
    variables = dict(NCCL_PRESETS[config.nccl_preset])
    if config.interface:
        variables["NCCL_SOCKET_IFNAME"] = f"={config.interface}"  # '=': not as a prefix
    if config.memory_fraction is not None:
        old = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX refuses to see both
        name = old if old in os.environ else "XLA_CLIENT_MEM_FRACTION"
        variables[name] = str(config.memory_fraction)
    return variables


def _without_gpu(config: PlatformConfig, reason: str) -> Rows:
    default = PlatformConfig()
    names = ["xla_preset", "nccl_preset", "memory_fraction", "deterministic"]
    if not config.cluster.coordinator:
        names.append("interface")
    return [
        (f"platform.{name}", f"{getattr(config, name)} has no effect: {reason}")
        for name in names
        if getattr(config, name) != getattr(default, name)
    ]


def _cache_folder(setting: str, on_cpu: bool) -> str:
    """The folder of compiled programs; a CPU's are quickly made, and fit the one that made them."""
    if setting == "auto":
        return "" if on_cpu else str(cache_dir() / "xla")
    return str(Path(setting).expanduser().absolute()) if setting else ""


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"platform.compilation_cache {folder} cannot be used ({error.strerror}); choose a "
            "folder that can be written, or ''"
        ) from error


def _require_interface(name: str) -> None:
    names = [name for _, name in socket.if_nameindex()]
    require(name in names, f"platform.interface {name!r} is not here; use one of {names}")


def _require_known(text: str) -> None:
    """Try the flags on a process of its own, since XLA ends one that has a flag it lacks."""
    code = "from jaxlib import xla_client; xla_client.make_cpu_client()"
    probe = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"XLA_FLAGS": text},
        capture_output=True,
        text=True,
        timeout=120,
    )
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", probe.stderr)
    require(
        not unknown,
        f"jaxlib {version('jaxlib')} does not know {unknown and unknown[1].strip()}; set "
        "platform.xla_preset to 'none' and deterministic to False, or install another jaxlib",
    )
