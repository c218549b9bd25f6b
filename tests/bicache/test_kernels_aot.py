# SPDX-License-Identifier: Apache-2.0
"""The kernels compile for an H100 that is not here: without spills, within its shared memory, and
without a copy of any prefix."""

import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from geojax.bicache.kernels.cudnn import AVAILABLE, attend_cudnn
from geojax.bicache.kernels.mosaic_gpu import attend_mosaic
from geojax.bicache.kernels.reference import Part
from geojax.meshes import aot
from geojax.meshes.aot import COMPILER_OPTIONS, compile_only_devices

MISSING = aot._version("jax-cuda13-plugin") is None
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(MISSING, reason="no compiler for GPUs; pip install 'geojax[aot]'"),
]
SHARED_BYTES = 227 * 2**10
"""What a thread block may use of an H100's shared memory."""
SHAPES = {
    # (b, t, h, k, e, p, s), the index of (n, j), type
    "llada, long": ((16, 256, 32, 32, 128, 4096, 512), None, "bfloat16"),
    "llada, a row": ((1, 32, 32, 32, 128, 4096, 288), None, "float16"),
    "dream, indexed": ((4, 32, 28, 4, 128, 1024, 288), (3, 1), "bfloat16"),
    "dream, pages": ((16, 32, 28, 4, 128, 64, 288), (500, 16), "bfloat16"),
    "heads of 64": ((4, 32, 32, 8, 64, 2048, 64), (2, 1), "float16"),
    "heads of 64, pages": ((2, 8, 4, 2, 64, 64, 64), (9, 3), "float16"),
    "no prefix, odd sizes": ((3, 7, 8, 1, 64, 0, 71), None, "bfloat16"),
}


def compile_for_h100(attend, shape, entries, dtype):
    """`attend` compiled, with the prefix of that shape as its only array of that shape."""
    b, t, h, k, e, p, s = shape
    mesh = Mesh(compile_only_devices("h100", 1, 1), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P())

    def spec(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    lead, index = ((), None) if entries is None else (entries[:1], (b, *entries[1:]))
    keys = spec(*lead, p, k, e)
    prefix = Part(keys, keys, spec(*(index or ()), dtype=jnp.int32))
    own = Part(spec(b, s, k, e), spec(b, s, k, e), spec(b, dtype=jnp.int32))
    args = [spec(b, t, h, e), prefix, own]
    if index:
        args.append(spec(*index, dtype=jnp.int32))
    with jax.set_mesh(mesh), aot.cudnn_unchecked():
        lowered = jax.jit(lambda *args: attend(*args)).lower(*args)
        return lowered.compile(compiler_options=COMPILER_OPTIONS)


def makers(compiled, shape):
    """Operations whose result has as many elements as an array of `shape`, or more."""
    found = set()
    for line in compiled.as_text().splitlines():
        made = re.match(r" +(?:ROOT )?%?\S+ = \w+\[([\d,]*)\]\S* ([\w-]+)\(", line)
        if made and np.prod([int(d) for d in made[1].split(",") if d] or [1]) >= np.prod(shape):
            found.add(made[2])
    return found


@pytest.mark.parametrize("registers", [False, True])
def test_no_registers_are_spilled_and_shared_memory_suffices(registers):
    # In a process of its own: the compiler's dumps are asked for by its environment.
    script = f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from functools import partial
        from test_kernels_aot import SHAPES, attend_mosaic, compile_for_h100
        attend = partial(attend_mosaic, registers={registers})
        for case in SHAPES.values():
            compile_for_h100(attend, *case)
        """
    dumps = {f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("PTX", "PTXAS", "RESOURCES")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | dumps,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    used = re.findall(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    shared = re.findall(r"smem_scratch_bytes=(\d+)", text)
    assert len(used) == len(spills) == len(shared) == len(SHAPES)
    programs = text.split(".target sm_90a")[1:]
    assert len(programs) == len(SHAPES)
    assert all("wgmma.mma_async" in program for program in programs)  # on tensor cores
    for name, spilled, shared_bytes in zip(SHAPES, spills, shared, strict=True):
        assert spilled == ("0", "0"), name
        # Beside the scratch, barriers of 8 bytes.
        assert int(shared_bytes) + 256 <= SHARED_BYTES, name


@pytest.mark.parametrize("entries", [None, (16, 2)])
def test_the_kernel_reads_prefixes_where_they_are(entries):
    shape = (4, 8, 4, 2, 128, 4096, 64)
    compiled = compile_for_h100(attend_mosaic, shape, entries, jnp.bfloat16)
    assert makers(compiled, (4096, 2, 128)) <= {"parameter", "bitcast"}


@pytest.mark.skipif(not AVAILABLE, reason="this JAX has no cuDNN call with log-sum-exps")
def test_cudnn_takes_two_parts_and_copies_no_prefix():
    compiled = compile_for_h100(attend_cudnn, (4, 8, 4, 2, 128, 4096, 64), None, jnp.bfloat16)
    text = compiled.as_text()
    assert len(re.findall(r'custom_call_target="__cudnn\$fmha', text)) == 2
    # Log-sum-exps stay float32.
    assert re.search(r"f32\[1,4,32\]", text)
    assert makers(compiled, (4096, 2, 128)) <= {"parameter", "bitcast"}
