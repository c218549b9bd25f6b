# SPDX-License-Identifier: Apache-2.0
"""Settings reach XLA, NCCL and JAX; the user's win; nothing is ignored in silence."""

import json
import os
import subprocess
import sys

import jax
import pytest

from geojax.config import ConfigError, PlatformConfig, RunError
from geojax.platform import environment
from geojax.platform.environment import NCCL_PRESETS, XLA_PRESETS, apply, flags_in

AS_ON_A_GPU = """
import json, os, sys
from geojax.config import PlatformConfig
from geojax.platform import environment
environment.why_no_gpu = lambda: ""
config = PlatformConfig(**json.loads(sys.argv[1]))
rows = environment.apply(config)
again = environment.apply(config)
import jax
jax.jit(lambda x: x + 1)(1.0).block_until_ready()
last = environment.apply(config)
names = ("XLA_FLAGS", "NCCL_SOCKET_IFNAME", "NCCL_BUFFSIZE", "XLA_CLIENT_MEM_FRACTION")
print(json.dumps([rows, again, last, {name: os.environ.get(name, "") for name in names}]))
"""


def run_as_on_a_gpu(settings, **variables):
    """Rows of three calls, the last after JAX has started, and the environment they leave."""
    variables = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"} | variables
    process = subprocess.run(
        [sys.executable, "-c", AS_ON_A_GPU, json.dumps(settings)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    rows, again, last, found = json.loads(process.stdout.splitlines()[-1])
    assert sorted(again) == sorted(last)
    return dict(map(tuple, rows)), dict(map(tuple, again)), found


@pytest.mark.parametrize("preset", [name for name in XLA_PRESETS if name != "none"])
def test_xla_knows_every_flag_of_a_preset(preset, tmp_path):
    # XLA ends the process at a flag that it lacks. What differs from its defaults, it writes down.
    settings = {"xla_preset": preset, "deterministic": True, "compilation_cache": ""}
    rows, again, found = run_as_on_a_gpu(settings, XLA_FLAGS=f"--xla_dump_to={tmp_path}")
    flags = XLA_PRESETS[preset] | environment.DETERMINISTIC
    assert rows == again == {name: value or "(empty)" for name, value in flags.items()}
    assert flags_in(found["XLA_FLAGS"]) == flags | {"--xla_dump_to": str(tmp_path)}
    received = "".join(path.read_text() for path in tmp_path.glob("*debug_options"))
    assert "xla_gpu_deterministic_ops: true" in received
    if preset == "throughput":
        assert "xla_gpu_all_reduce_combine_threshold_bytes: 134217728" in received
        assert "xla_gpu_enable_while_loop_double_buffering: true" in received


def test_flags_and_variables_of_the_user_win_and_the_rows_say_so(tmp_path):
    file = tmp_path / "flags"
    file.write_text("--xla_gpu_enable_latency_hiding_scheduler=true\n--xla_dump_hlo_as_text")
    cache = tmp_path / "compiled"
    settings = {
        "xla_preset": "low-memory",
        "nccl_preset": "ethernet",
        "interface": "lo",
        "memory_fraction": 0.9,
        "compilation_cache": str(cache),
    }
    rows, _, found = run_as_on_a_gpu(
        settings,
        XLA_FLAGS=str(file),
        NCCL_BUFFSIZE="123",
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    scheduler = "--xla_gpu_enable_latency_hiding_scheduler"
    assert rows[scheduler] == "true (set before; not false)"
    assert flags_in(found["XLA_FLAGS"]) == {
        scheduler: "true",
        "--xla_gpu_enable_command_buffer": "",
        "--xla_dump_hlo_as_text": "true",
    }
    assert (found["NCCL_BUFFSIZE"], rows["NCCL_BUFFSIZE"]) == (
        "123",
        "123 (set before; not 8388608)",
    )
    assert found["NCCL_SOCKET_IFNAME"] == rows["NCCL_SOCKET_IFNAME"] == "=lo"
    assert found["XLA_CLIENT_MEM_FRACTION"] == rows["XLA_CLIENT_MEM_FRACTION"] == "0.9"
    assert rows["jax_compilation_cache_dir"] == str(cache)
    assert any(cache.iterdir())


def test_on_a_cpu_settings_of_gpus_change_nothing_and_are_named():
    before = dict(os.environ)
    config = PlatformConfig(
        xla_preset="throughput",
        nccl_preset="infiniband",
        memory_fraction=0.5,
        deterministic=True,
        interface="lo",
    )
    rows = dict(apply(config))
    assert rows == {
        f"platform.{name}": f"{getattr(config, name)} has no effect: JAX_PLATFORMS is 'cpu'"
        for name in ("xla_preset", "nccl_preset", "memory_fraction", "deterministic", "interface")
    }
    assert os.environ == before
    assert apply(PlatformConfig()) == []


def test_too_late_is_an_error_that_names_what_cannot_be_set(monkeypatch):
    jax.devices()
    monkeypatch.setattr(environment, "why_no_gpu", lambda: "")
    apply(PlatformConfig(compilation_cache=""))
    with pytest.raises(RunError, match="too late to set NCCL_NET, NCCL_IB_DISABLE"):
        apply(PlatformConfig(nccl_preset="infiniband", compilation_cache=""))


def test_the_old_name_of_the_memory_fraction_is_not_joined_by_the_new(monkeypatch):
    monkeypatch.setattr(environment, "why_no_gpu", lambda: "")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")
    rows = apply(PlatformConfig(memory_fraction=0.8, compilation_cache=""))
    assert rows == [("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4 (set before; not 0.8)")]


def test_what_cannot_be_used_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"'nosuch0' is not here; use one of .*'lo'"):
        apply(PlatformConfig(interface="nosuch0"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"compilation_cache .* cannot be used"):
        environment._make_folder(tmp_path / "file" / "cache")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="neither flags nor a file"):
        environment._flags_text()


def test_a_flag_that_this_jaxlib_lacks_is_found_before_xla_ends_the_process():
    with pytest.raises(ConfigError, match="does not know --xla_gpu_no_such_flag=1; set"):
        environment._require_known("--xla_gpu_deterministic_ops=true --xla_gpu_no_such_flag=1")


def test_flags_are_read_as_xla_reads_them():
    text = "--xla_a=  -xla_b  --xla_c='1 2' --xla_d=x=y"
    expected = {"--xla_a": "", "--xla_b": "true", "--xla_c": "1 2", "--xla_d": "x=y"}
    assert flags_in(text) == expected


def test_presets_are_the_choices_of_the_config():
    for preset in XLA_PRESETS:
        PlatformConfig(xla_preset=preset)
    fields = PlatformConfig.__dataclass_fields__
    assert set(XLA_PRESETS) == set(fields["xla_preset"].type.__args__)
    assert set(NCCL_PRESETS) == set(fields["nccl_preset"].type.__args__)
