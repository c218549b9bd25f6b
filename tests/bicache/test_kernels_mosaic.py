# SPDX-License-Identifier: Apache-2.0
"""The Mosaic GPU kernel under Pallas' interpreter equals float64's attention, tile by tile."""

import os
import subprocess
import sys
from argparse import Namespace
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from attention64 import assert_close, inputs, named, part
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import kernel
from geojax.bicache.kernels import mosaic_gpu
from geojax.bicache.kernels.mosaic_body import Tiling
from geojax.bicache.kernels.mosaic_gpu import CORES, attend_mosaic, tiling
from geojax.bicache.kernels.reference import Part
from geojax.models.attention import NEVER

# Warpgroups are threads that wait for each other inside XLA's own: with one core they never end.
pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="Pallas' interpreter hangs on a single core"
)


def interpreted(cut=None):
    """Compiled once a shape; memory that nobody wrote is NaN, and a race is an error."""
    params = plgpu.InterpretGPUParams(detect_races=True)
    return jax.jit(lambda *args: attend_mosaic(*args, cut=cut, interpret=params))


def test_a_shared_prefix_and_ragged_lengths():
    # 3 sequences of 8 rows in one warpgroup's tile; 136 keys are a step and a part of one.
    q, pre, mine = inputs(3, 8, 2, 2, 64, 136, 40, dtype=jnp.bfloat16)
    run = interpreted()
    for length, lengths in [(136, [40, 17, 1]), (128, [0, 40, 3]), (0, [7, 0, 40])]:
        prefix, own = part(*pre, length), part(*mine, lengths)
        assert_close(run(q, prefix, own), q, prefix, own)
    out, lse = run(q, part(*pre, 0), part(*mine, [0, 0, 0]))
    assert not out.any()
    assert (lse == NEVER).all()


def test_tiles_that_cut_sequences():
    # 2 sequences x 20 queries x 4 heads: 160 rows, of which a warpgroup has those from 64 to 128.
    q, pre, mine = inputs(2, 20, 4, 1, 128, 264, 133, dtype=jnp.float16)
    run = interpreted()
    for length, lengths in [(264, [133, 5]), (31, [0, 129])]:
        prefix, own = part(*pre, length), part(*mine, lengths)
        assert_close(run(q, prefix, own), q, prefix, own)


def test_rows_that_name_their_prefix():
    # 5 sequences x 4 queries x 8 heads: 160 rows, again over a tile's border.
    q, pre, mine = inputs(5, 4, 8, 1, 64, 136, 8, entries=3, dtype=jnp.bfloat16)
    run = interpreted()
    own = part(*mine, [8, 0, 1, 0, 5])
    for index in ([0, 0, 0, 0, 0], [-1, 0, 2, 2, -1], [0, -1, -1, 0, 1]):
        prefix, index = named(*pre, [136, 0, 130], index)
        assert_close(run(q, prefix, own, index), q, prefix, own, index)


@pytest.mark.parametrize("splits", [1, 3])
def test_chains_of_pages(splits):
    # 3 sequences x 32 queries: two warpgroups' rows, that share a page, see less of it, or none.
    q, pre, mine = inputs(3, 32, 1, 1, 64, 64, 40, entries=6, dtype=jnp.bfloat16)
    run = interpreted(Tiling(groups=2, keys=64, slots=2, splits=splits))
    own = part(*mine, [40, 0, 7])
    for links, sizes in [
        ([[1, 2, 3], [1, 2, 4], [1, 5, -1]], [[64, 64, 9], [64, 64, 64], [64, 30, 0]]),
        ([[1, -1, 3], [1, -1, -1], [-1, -1, 3]], [[64, 0, 9], [63, 64, 64], [64, 30, 9]]),
        ([[0, 0, 0]] * 3, [[0, 0, 0]] * 3),
    ]:
        prefix = Part(*pre, jnp.asarray(sizes, jnp.int32))
        index = jnp.asarray(links, jnp.int32)
        found = run(q, prefix, own, index)
        assert_close(found, q, prefix, own, index, roundings=2 + (splits > 1))


def test_splits_of_the_keys_merge():
    q, pre, mine = inputs(2, 4, 2, 1, 64, 400, 8, dtype=jnp.bfloat16)
    run = interpreted(Tiling(groups=1, keys=64, slots=2, splits=3))
    for length, lengths in [(400, [8, 3]), (65, [0, 8]), (0, [0, 1])]:
        prefix, own = part(*pre, length), part(*mine, lengths)
        # Each split rounds its output once more.
        assert_close(run(q, prefix, own), q, prefix, own, roundings=3)


def test_pages_are_dealt_to_the_splits_in_turn(monkeypatch):
    q, pre, mine = inputs(1, 4, 1, 1, 64, 64, 8, entries=3, dtype=jnp.bfloat16)
    prefix = Part(*pre, jnp.full((1, 3), 64, jnp.int32))
    monkeypatch.setattr(mosaic_gpu, "merge", lambda outs, lses: (outs, lses))
    run = interpreted(Tiling(groups=1, keys=64, slots=2, splits=3))
    _, lses = run(q, prefix, part(*mine, [0]), jnp.asarray([[0, 1, 2]]))
    assert lses.shape == (3, 1, 1, 4)
    assert (lses > NEVER).all()


def test_one_row_alone():
    q, pre, mine = inputs(1, 1, 1, 1, 64, 0, 1, dtype=jnp.float16)
    prefix, own = part(*pre, 0), part(*mine, [1])
    assert_close(interpreted()(q, prefix, own), q, prefix, own)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "e", "h", "k", "entries"),
    [
        (jnp.bfloat16, 64, 4, 1, None),
        (jnp.float16, 128, 2, 2, None),
        (jnp.bfloat16, 128, 8, 1, 3),
        (jnp.float16, 64, 4, 1, 3),
    ],
)
def test_long_prefixes(dtype, e, h, k, entries):
    q, pre, mine = inputs(3, 16, h, k, e, 4096, 264, entries=entries, dtype=dtype)
    run = interpreted()
    assert tiling(3 * 16 * h // k, k, 4096 + 264, 4096).splits > 1
    for length in (4096, 1000):
        prefix, index = part(*pre, length), None
        if entries:
            prefix, index = named(*pre, [length, 0, length // 2 + 1], [2, 2, 0])
        own = part(*mine, [264, 1, 100])
        assert_close(run(q, prefix, own, index), q, prefix, own, index, roundings=3)


def test_the_tiling_fills_the_gpu_with_splits():
    for rows, kv_heads in [(32, 32), (224, 4), (64, 8), (4096, 32), (1, 1)]:
        for keys in (8, 1024, 5000):
            cut = tiling(rows, kv_heads, keys, 128)
            blocks = kv_heads * -(-rows // (64 * cut.groups)) * cut.splits
            assert cut.splits == 1 or blocks <= CORES
            # With twice as many, there would be more blocks than cores, or too little for each.
            steps = keys // (2 * cut.splits)
            assert 2 * blocks > CORES or steps < 2 * cut.keys


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"e": 96}, r"heads of 96 in bfloat16 have no kernel; use sizes \(64, 128\)"),
        ({"dtype": jnp.float32}, "in float32 have no kernel"),
        ({"p": 20}, "padded to 20, no multiple of 8; pad them to 24"),
    ],
)
def test_what_has_no_kernel_is_refused(change, message):
    shape = {"e": 64, "p": 24, "dtype": jnp.bfloat16} | change
    q, pre, mine = inputs(1, 2, 2, 1, shape["e"], shape["p"], 8, dtype=shape["dtype"])
    with pytest.raises(ValueError, match=message):
        attend_mosaic(q, part(*pre, 1), part(*mine, [1]))


def test_keys_beyond_the_arrays_are_never_seen():
    # The last step of a prefix of 8 reads 128 keys; the next entry must not take part.
    q, pre, mine = inputs(1, 2, 1, 1, 64, 8, 8, entries=2, dtype=jnp.bfloat16)
    k, v = (x.at[1].set(100) for x in pre)
    prefix, own = Part(k, v, jnp.asarray([8])), part(*mine, [2])
    index = jnp.zeros(1, jnp.int32)
    assert_close(interpreted()(q, prefix, own, index), q, prefix, own, index)


def _benchmark(*options):
    path = Path(__file__).parents[2] / "benchmarks" / "kernel.py"
    command = [sys.executable, str(path), *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_benchmark_begins_no_case_after_its_time_and_names_what_it_left_out(capsys):
    clock = count()
    items = [("a", 1), ("b", 2), ("c", 3)]
    assert list(kernel.within(items, 3, lambda: next(clock))) == items[:2]
    assert capsys.readouterr().out == "left out, no time: c 3\n"
    assert list(kernel.within(items, 9, lambda: next(clock))) == items
    assert capsys.readouterr().out == ""
    options = Namespace(
        prefixes=[8], batches=[1], blocks=[4], own=2, entries=[0, 4], pages=[64], models=["a", "b"]
    )
    cases = kernel.cases_of(options)
    assert [name for name, _ in cases] == ["a", "b"] * 3
    assert [(case.entries, case.page) for _, case in cases[::2]] == [(0, 0), (4, 0), (0, 64)]


def test_the_benchmark_refuses_a_machine_without_a_gpu():
    done = _benchmark("--prefixes", "1024")
    assert done.returncode == 1
    assert "needs an NVIDIA GPU, and JAX found cpu" in done.stderr
    assert done.stdout == ""


@pytest.mark.full
def test_the_benchmark_compares_under_the_interpreter_and_times_nothing():
    done = _benchmark("--interpret")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("error") == 6
    assert "these times say nothing" in done.stdout
    assert " us " not in done.stdout
