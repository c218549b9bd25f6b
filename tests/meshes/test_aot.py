# SPDX-License-Identifier: Apache-2.0
"""Descriptions of GPUs, accounts of compiled programs and their cache; with the compiler installed,
a sharded training step compiled for GPUs that are not here."""

import json
import os
import subprocess
import sys
import textwrap
from functools import partial
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from geojax.meshes import aot
from geojax.meshes.aot import (
    COMPILER_OPTIONS,
    TARGETS,
    AotUnavailableError,
    Collective,
    CompiledMemory,
    cached_memory,
    collectives,
    compile_only_devices,
    compiled_memory,
    target_config,
)
from geojax.meshes.hardware import GPUS

MEMORY = CompiledMemory(100, 60, 40, 50)


def test_every_gpu_with_a_data_sheet_can_be_compiled_for():
    assert TARGETS.keys() == GPUS.keys()


@pytest.mark.parametrize("gpu", TARGETS)
def test_target_config_gives_each_figure_once_and_agrees_with_the_data_sheet(gpu):
    lines = target_config(gpu).splitlines()
    figures = dict(line.strip().split(": ", 1) for line in lines if line.count(": ") == 1)
    names = [line.split(":")[0].split("{")[0].strip() for line in lines]
    assert len(names) == len(set(names))
    assert lines.count("}") == 1
    assert int(figures["device_memory_size"]) == GPUS[gpu].memory_bytes
    assert int(figures["memory_bandwidth"]) == GPUS[gpu].memory_bytes_per_second
    # Float32 lanes x 2 x clock, before tensor cores: below the dense bfloat16 peak, never far off.
    lanes = int(figures["core_count"]) * int(figures["fpus_per_core"])
    flops = lanes * 2 * float(figures["clock_rate_ghz"]) * 1e9
    assert 3 < GPUS[gpu].bf16_flops_per_second / flops < 32
    block, core = (int(figures[f"shared_memory_per_{x}"]) for x in ("block_optin", "core"))
    assert 48 * 2**10 < block < core


def test_target_config_of_the_h100_is_what_its_driver_reports():
    text = target_config("h100")
    for line in (
        "core_count: 132",
        "shared_memory_per_core: 233472",
        "shared_memory_per_block_optin: 232448",
        "l2_cache_size: 52428800",
        "major: 9 minor: 0",
        'device_description_str: "NVIDIA H100 80GB HBM3"',
    ):
        assert line in text


def test_unknown_gpu_gives_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'h100'"):
        compile_only_devices("H100", 1, 8)


def test_no_devices_are_refused():
    with pytest.raises(ValueError, match="0 nodes of 8 GPUs"):
        compile_only_devices("h100", 0, 8)


def _installed(monkeypatch, **versions):
    def version(package):
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(aot.metadata, "version", version)


def test_without_a_plugin_the_error_says_what_to_install(monkeypatch):
    _installed(monkeypatch, jaxlib="0.12.0.1")
    with pytest.raises(AotUnavailableError, match=r"pip install 'geojax\[aot\]'"):
        compile_only_devices("h100", 1, 8)


def test_a_plugin_of_another_release_is_refused_by_both_versions(monkeypatch):
    _installed(monkeypatch, jaxlib="0.12.0.1", **{"jax-cuda13-plugin": "0.11.2"})
    with pytest.raises(AotUnavailableError, match=r"0\.11\.2 does not fit jaxlib 0\.12\.0\.1"):
        compile_only_devices("h100", 1, 8)


def test_total_counts_an_output_in_a_donated_argument_once():
    assert MEMORY.total_bytes == 100 + 60 + 40 - 50


def test_compiled_memory_is_of_one_device_and_knows_donation():
    mesh = Mesh(np.asarray(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    spec = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    double = lambda x: 2 * x  # noqa: E731
    kept = compiled_memory(jax.jit(double).lower(spec).compile())
    donated = compiled_memory(jax.jit(double, donate_argnums=0).lower(spec).compile())
    shard = 64 * 8 * 4 // len(jax.devices())
    assert (kept.arguments_bytes, kept.outputs_bytes, kept.aliased_bytes) == (shard, shard, 0)
    assert donated.total_bytes == kept.total_bytes - shard


def _looped(mesh, iterations):
    """Each iteration gathers f32[8, 4] from 4 devices and sums it over 2."""

    @partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def run(x):
        def body(carry, _):
            whole = jax.lax.all_gather(carry, "x", tiled=True)
            return jnp.tanh(jax.lax.psum(whole, "y")[:2]), None

        return jax.lax.scan(body, x, length=iterations)[0]

    return jax.jit(run)


def test_collectives_in_loops_count_once_an_iteration():
    devices = np.asarray(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    spec = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    for iterations in (3, 7):
        compiled = _looped(mesh, iterations).lower(spec).compile()
        each = Collective(iterations, iterations * 8 * 4 * 4)
        assert collectives(compiled) == {"all-gather": each, "all-reduce": each}


def test_without_communication_there_are_no_collectives():
    assert collectives(jax.jit(jnp.sin).lower(1.0).compile()) == {}


class _Text:
    """A compiled program, as its text."""

    def __init__(self, text):
        self.as_text = lambda: textwrap.dedent(text)


def test_of_an_asynchronous_collective_the_result_counts_once():
    found = collectives(
        _Text("""\
        %add (a: f32[], b: f32[]) -> f32[] {
          ROOT %sum = f32[] add(%a, %b)
        }

        ENTRY %main (x: bf16[2,8]) -> (bf16[16,8], u4[3]) {
          %s = ((bf16[2,8]{1,0}), bf16[16,8]{1,0}) all-gather-start(%x), dimensions={0}
          %d = bf16[16,8]{1,0:T(8,128)} all-gather-done(%s)
          ROOT %r = (f32[3]{0}, pred[5]{0}) all-reduce(%d, %d), to_apply=%add
        }
        """)
    )
    assert found == {"all-gather": Collective(1, 256), "all-reduce": Collective(1, 17)}


def test_a_loop_of_unknown_length_is_refused_only_where_it_communicates():
    text = """\
        %body (x: f32[2]) -> f32[2] {{
          ROOT %r = f32[2]{{0}} {operation}(%x)
        }}

        ENTRY %main (x: f32[2]) -> f32[2] {{
          ROOT %w = f32[2]{{0}} while(%x), condition=%body, body=%body
        }}
        """
    assert collectives(_Text(text.format(operation="tanh"))) == {}
    with pytest.raises(ValueError, match="does not say how often it runs: ROOT %w"):
        collectives(_Text(text.format(operation="collective-permute")))


def test_cached_memory_is_computed_once_per_key(tmp_path):
    asked = []

    def compute(memory):
        asked.append(memory)
        return memory

    other = CompiledMemory(1, 2, 3, 0)
    first = {"gpu": "h100", "strategy": "dp2"}
    for _ in range(2):
        assert cached_memory(first, lambda: compute(MEMORY), tmp_path / "new") == MEMORY
        assert cached_memory(
            {**first, "gpu": "h200"}, lambda: compute(other), tmp_path / "new"
        ) == (other)
    # The order of a key's parts means nothing.
    again = dict(reversed(first.items()))
    assert cached_memory(again, lambda: compute(other), tmp_path / "new") == MEMORY
    assert asked == [MEMORY, other]
    assert {path.suffix for path in (tmp_path / "new").iterdir()} == {".json"}


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(aot, "CACHE_FORMAT", aot.CACHE_FORMAT + 1),
        lambda patch: patch.setattr(aot, "COMPILER_OPTIONS", {}),
        lambda patch: patch.setattr(jax, "__version__", "1.0"),
        lambda patch: patch.setattr(aot, "_version", lambda package: "1.0"),
    ],
)
def test_another_compiler_is_another_entry(tmp_path, monkeypatch, change):
    cached_memory({}, lambda: MEMORY, tmp_path)
    change(monkeypatch)
    other = CompiledMemory(1, 2, 3, 0)
    assert cached_memory({}, lambda: other, tmp_path) == other


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"memory": {"arguments_bytes": 1}}',
        json.dumps({"memory": dict.fromkeys(vars(MEMORY), "many")}).encode(),
    ],
)
def test_a_damaged_entry_is_computed_again_and_repaired(tmp_path, damaged):
    cached_memory({}, lambda: MEMORY, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damaged)
    other = CompiledMemory(1, 2, 3, 0)
    assert cached_memory({}, lambda: other, tmp_path) == other
    assert cached_memory({}, lambda: MEMORY, tmp_path) == other


def test_nothing_is_cached_where_computing_fails(tmp_path):
    with pytest.raises(ZeroDivisionError):
        cached_memory({}, lambda: 1 // 0, tmp_path)
    assert list(tmp_path.iterdir()) == []


def needs_compiler(test):
    """For tests that compile for GPUs: some seconds each."""
    missing = aot._version("jax-cuda13-plugin") is None
    reason = "no compiler for GPUs; pip install 'geojax[aot]'"
    return pytest.mark.aot(pytest.mark.skipif(missing, reason=reason)(test))


@needs_compiler
def test_devices_come_node_by_node_and_are_the_gpu_that_was_asked_for():
    devices = compile_only_devices("l40s", 3, 2)
    assert [device.process_index for device in devices] == [0, 0, 1, 1, 2, 2]
    assert {device.device_kind for device in devices} == {"NVIDIA L40S"}
    assert {device.platform for device in devices} == {"gpu"}


@needs_compiler
@pytest.mark.parametrize("gpu", TARGETS)
def test_xla_compiles_for_every_target(gpu):
    mesh = Mesh(compile_only_devices(gpu, 1, 2), ("x",), axis_types=(AxisType.Auto,))
    spec = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    lowered = jax.jit(lambda x: jnp.tanh(x @ x.T).sum()).lower(spec)
    memory = compiled_memory(lowered.compile(compiler_options=COMPILER_OPTIONS))
    assert memory.arguments_bytes == 256 * 256 * 2 // 2
    assert memory.outputs_bytes == 2


LAYERS, DIM, MICRO_BATCHES, ROWS, STAGES = 4, 128, 3, 8, 2


def _lower_step(devices):
    """One SGD step, bfloat16 compute: layers in a pipeline, their width over tp, rows over dp."""
    mesh = Mesh(
        np.asarray(devices).reshape(2, STAGES, 2),
        ("dp", "pp", "tp"),
        axis_types=(AxisType.Auto,) * 3,
    )

    def layer(x, weights):
        up, down = (w.astype(jnp.bfloat16) for w in weights)
        y = x + jax.nn.gelu(x @ up) @ down
        return jax.lax.with_sharding_constraint(y, P("dp", None)), None

    @partial(jax.shard_map, in_specs=(P("pp"), P()), out_specs=P(), axis_names={"pp"})
    def pipeline(weights, x):
        stage = jax.lax.axis_index("pp")
        x = jax.lax.pcast(x, "pp", to="varying").astype(jnp.bfloat16)

        def tick(carry, t):
            start = x[jnp.minimum(t, MICRO_BATCHES - 1)]
            y, _ = jax.lax.scan(jax.checkpoint(layer), jnp.where(stage == 0, start, carry), weights)
            around = [(s, (s + 1) % STAGES) for s in range(STAGES)]
            return jax.lax.ppermute(y, "pp", around), y

        ticks = jnp.arange(MICRO_BATCHES + STAGES - 1)
        _, ys = jax.lax.scan(tick, jnp.zeros_like(x[0]), ticks)
        last = ys[STAGES - 1 :].astype(jnp.float32)
        return jax.lax.psum(jnp.where(stage == STAGES - 1, last, 0), "pp")

    def step(weights, x):
        loss, grads = jax.value_and_grad(lambda w: (pipeline(w, x) ** 2).mean())(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    def spec(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))

    up = spec((LAYERS, DIM, 4 * DIM), "pp", None, "tp")
    down = spec((LAYERS, 4 * DIM, DIM), "pp", "tp")
    x = spec((MICRO_BATCHES, ROWS, DIM), None, "dp")
    with jax.set_mesh(mesh):
        shardings = ((up.sharding, down.sharding), None)
        return jax.jit(step, donate_argnums=0, out_shardings=shardings).lower((up, down), x)


@needs_compiler
def test_a_pipelined_sharded_donated_step_compiles_beside_the_cpu():
    before = jax.devices()
    lowered = _lower_step(compile_only_devices("h100", 1, 8))
    compiled = lowered.compile(compiler_options=COMPILER_OPTIONS)
    memory = compiled_memory(compiled)
    weights = 2 * LAYERS * DIM * 4 * DIM * 4 // (STAGES * 2)
    rows = MICRO_BATCHES * ROWS * DIM * 4 // 2
    assert memory.arguments_bytes == weights + rows
    assert memory.aliased_bytes == weights
    assert weights <= memory.outputs_bytes < weights + 256
    # Gradients in float32, at least, wait for the update.
    assert memory.temporaries_bytes > weights / 2
    # A micro-batch in bfloat16 moves on at every tick, forward and backward.
    ticks = MICRO_BATCHES + STAGES - 1
    moved = Collective(2 * ticks, 2 * ticks * ROWS // 2 * DIM * 2)
    assert collectives(compiled)["collective-permute"] == moved
    assert "all-reduce" in collectives(compiled)
    assert jax.devices() == before
    assert float(jnp.arange(4.0).sum()) == 6

    # The options save time, not bytes.
    assert compiled_memory(lowered.compile()) == memory


@needs_compiler
def test_devices_come_where_jax_has_already_looked_for_plugins():
    script = """
        import os
        import jax
        import jax.numpy as jnp

        before = jax.devices()
        from geojax.meshes.aot import compile_only_devices

        assert len(compile_only_devices("h100", 2, 4)) == 8
        assert jax.devices() == before
        assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ
        """
    ours = ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
