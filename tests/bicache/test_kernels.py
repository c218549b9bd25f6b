# SPDX-License-Identifier: Apache-2.0
"""Attention over a prefix and own keys in XLA equals that in float64, in bounded memory; and which
kernel is chosen."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention64 import assert_close, inputs, named, part

from geojax.bicache.kernels import choose as choosing
from geojax.bicache.kernels import reference
from geojax.bicache.kernels.choose import (
    Choice,
    attend,
    choose,
    choose_for,
    registers_agree,
)
from geojax.bicache.kernels.reference import TEMPORARIES_BYTES, Part, attend_xla, merge
from geojax.bicache.pages import PAGE
from geojax.meshes.aot import compiled_memory
from geojax.models.attention import NEVER

run = jax.jit(attend_xla)


@pytest.mark.parametrize(
    ("dtype", "h", "k", "e"),
    [
        (jnp.float32, 8, 2, 128),
        (jnp.float32, 3, 3, 40),
        (jnp.bfloat16, 8, 1, 64),
        (jnp.float16, 2, 2, 64),
    ],
)
def test_shared_prefix(dtype, h, k, e):
    q, pre, mine = inputs(3, 5, h, k, e, 70, 9, dtype=dtype)
    for length, lengths in [(70, [9, 1, 4]), (33, [0, 9, 2]), (0, [3, 0, 9])]:
        prefix, own = part(*pre, length), part(*mine, lengths)
        assert_close(run(q, prefix, own), q, prefix, own)


@pytest.mark.parametrize(
    ("dtype", "h", "k"), [(jnp.float32, 8, 2), (jnp.bfloat16, 8, 1), (jnp.float16, 2, 2)]
)
def test_rows_that_name_their_prefix(dtype, h, k):
    q, pre, mine = inputs(5, 3, h, k, 64, 70, 9, entries=3, dtype=dtype)
    for index in ([0, 1, 2, 1, 0], [-1, 0, 0, -1, 2], [-1] * 5):
        own = part(*mine, [9, 0, 1, 3, 0])
        prefix, index = named(*pre, [70, 0, 41], index)
        assert_close(run(q, prefix, own, index), q, prefix, own, index)


def test_a_chain_of_entries_is_one_prefix():
    q, pre, mine = inputs(3, 4, 4, 2, 64, 8, 9, entries=6)
    own = part(*mine, [9, 0, 4])
    index = jnp.asarray([[1, 2, 3, 4], [1, 2, -1, -1], [5, -1, 0, -1]], jnp.int32)
    # A row may see less of an entry than another one does, and nothing in the middle.
    lengths = jnp.asarray([[8, 8, 8, 5], [8, 3, 8, 0], [0, 8, 8, 8]], jnp.int32)
    prefix = Part(*pre, lengths)
    assert_close(run(q, prefix, own, index), q, prefix, own, index)


@pytest.mark.parametrize("entries", [None, 2])
def test_a_prefix_that_is_no_multiple_of_a_chunk(monkeypatch, entries):
    monkeypatch.setattr(reference, "TEMPORARIES_BYTES", 0)
    run = jax.jit(lambda *args: attend_xla(*args))
    q, pre, mine = inputs(3, 4, 4, 2, 64, 200, 130, entries=entries)
    for length in (200, 193, 64, 1, 0):
        prefix, index = part(*pre, length), None
        if entries:
            prefix, index = named(*pre, [length, 200 - length], [1, 0, 1])
        own = part(*mine, [130, 64, 0])
        assert_close(run(q, prefix, own, index), q, prefix, own, index)


@pytest.mark.parametrize("entries", [None, 0, 2])
def test_a_part_without_room_is_none(entries):
    q, pre, mine = inputs(2, 1, 2, 1, 64, 0 if entries is None else 8, 1, entries=entries)
    index = None if entries is None else jnp.full(2, -1, jnp.int32)
    prefix = Part(*pre, jnp.zeros(() if entries is None else 2, jnp.int32))
    own = part(*mine, [1, 0])
    out, lse = run(q, prefix, own, index)
    assert_close((out, lse), q, prefix, own, index)
    assert not out[1].any()
    assert (lse[1] == NEVER).all()


def test_halves_merge_to_the_whole():
    q, pre, mine = inputs(3, 4, 4, 2, 64, 70, 9)
    prefix, own = part(*pre, 50), part(*mine, [9, 0, 4])
    nothing = own._replace(length=jnp.zeros_like(own.length))
    halves = [run(q, prefix, nothing)]
    halves.append(run(q, prefix._replace(length=jnp.int32(0)), own))
    outs, lses = (jnp.stack(x) for x in zip(*halves, strict=True))
    assert_close(merge(outs, lses), q, prefix, own)
    out, lse = merge(outs * 0, jnp.full_like(lses, NEVER))
    assert not out.any()
    assert (lse <= NEVER).all()
    assert jnp.isfinite(lse).all()


def _specs(b, t, h, k, e, p, s, entries, dtype):
    """`entries`: None: all rows share one prefix; a number of prefixes, of which each row names
    one; or "pages", which each row names in a table, as the engine's do."""

    def spec(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    own = Part(spec(b, s, k, e), spec(b, s, k, e), spec(b, dtype=jnp.int32))
    if entries == "pages":
        table, page = spec(b, p // PAGE, dtype=jnp.int32), spec(b * p // PAGE, PAGE, k, e)
        return spec(b, t, h, e), Part(page, page, table), own, table
    lead = () if entries is None else (entries,)
    index = None if entries is None else spec(b, dtype=jnp.int32)
    lengths = index or spec(dtype=jnp.int32)
    prefix = Part(spec(*lead, p, k, e), spec(*lead, p, k, e), lengths)
    return spec(b, t, h, e), prefix, own, index


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("entries", [None, 4, "pages"])
def test_temporaries_are_bounded_whatever_the_prefix(dtype, entries):
    for b, p in [(4, 2048), (16, 16384)]:
        args = _specs(b, 32, 8, 4, 128, p, 256, entries, dtype)
        memory = compiled_memory(run.lower(*args).compile())
        # The softmax so far is carried from chunk to chunk: the old one, the new, the product.
        state_bytes = 4 * b * 32 * 8 * (128 + 2)
        assert memory.temporaries_bytes < TEMPORARIES_BYTES + 3 * state_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h": 3}, "3 query heads do not divide by 2"),
        ({"index": [0]}, r"prefix index have shape \(1,\), for queries .* use \(2,\)"),
        ({"length": [1, 2]}, r"prefix lengths have shape \(2,\)"),
        ({"own": jnp.bfloat16}, "own keys are bfloat16, queries float32"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    q, pre, mine = inputs(
        2, 3, change.get("h", 4), 2, 64, 16, 8, entries=3 if "index" in change else None
    )
    index = jnp.asarray(change["index"]) if "index" in change else None
    length = jnp.asarray(change.get("length", [1] if "index" in change else 4))
    own = Part(*(x.astype(change.get("own", x.dtype)) for x in mine), jnp.asarray([8, 8]))
    with pytest.raises(ValueError, match=message):
        attend_xla(q, Part(*pre, length), own, index)


H100 = {"platform": "gpu", "capability": (9, 0), "dtype": "bfloat16", "head_size": 128}
CALL = {**H100, "prefix_size": 1024, "indexed": False}


@pytest.mark.parametrize(
    ("change", "kernel", "why"),
    [
        ({}, "mosaic_gpu", []),
        ({"indexed": True, "head_size": 64, "dtype": "float16"}, "mosaic_gpu", []),
        ({"dtype": "float32"}, "xla", ["not float32", "not float32"]),
        ({"head_size": 96}, "cudnn", ["not 96"]),
        ({"head_size": 100}, "xla", ["not 100", "not 100"]),
        ({"prefix_size": 1023}, "cudnn", ["1023, no multiple of 8"]),
        ({"capability": (10, 0)}, "cudnn", ["capability 9, this is 10.0"]),
        ({"capability": (8, 0), "indexed": True}, "xla", ["this is 8.0", "no index"]),
        ({"capability": (8, 9), "head_size": 256}, "xla", ["this is 8.9", "up to 128, not 256"]),
        ({"capability": (7, 5)}, "xla", ["this is 7.5", "needs compute capability 8"]),
        ({"capability": None}, "xla", ["this is gpu", "this is gpu"]),
        ({"platform": "cpu", "capability": None}, "xla", ["this is cpu", "this is cpu"]),
    ],
)
def test_the_choice_and_its_reasons(change, kernel, why):
    choice = choose(**CALL | change)
    assert choice.kernel == kernel
    assert len(choice.reasons) == len(why)
    for reason, part_of_it in zip(choice.reasons, why, strict=True):
        assert part_of_it in reason


def test_without_the_call_in_jax_there_is_no_cudnn(monkeypatch):
    monkeypatch.setattr(choosing.cudnn, "AVAILABLE", False)
    choice = choose(**CALL | {"capability": (8, 0)})
    assert choice.kernel == "xla"
    assert "log-sum-exps" in choice.reasons[1]


class _Device:
    def __init__(self, platform, compute_capability):
        self.platform, self.compute_capability = platform, compute_capability


@pytest.mark.parametrize(
    ("device", "kernel"),
    [
        (_Device("gpu", "9.0"), "mosaic_gpu"),
        (_Device("gpu", "12.0"), "cudnn"),
        (_Device("gpu", "gfx942"), "xla"),
        (jax.devices()[0], "xla"),
    ],
)
def test_the_choice_reads_the_device(device, kernel):
    q, prefix, _, _ = _specs(1, 1, 2, 1, 64, 64, 8, None, jnp.bfloat16)
    assert choose_for(device, q, prefix, None).kernel == kernel


def test_a_choice_is_logged_once(caplog):
    choosing._log.cache_clear()
    q, pre, mine = inputs(1, 2, 2, 1, 64, 8, 8)
    prefix, own = part(*pre, 5), part(*mine, [3])
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            out, lse = attend(q, prefix, own)
        choosing._log(Choice("cudnn", ("other",)))
    lines = [record.getMessage() for record in caplog.records if "prefix" in record.getMessage()]
    assert len(lines) == 2
    assert "runs by xla (mosaic_gpu: it is for NVIDIA's Hopper, this is cpu; cudnn:" in lines[0]
    assert_close((out, lse), q, prefix, own)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize(
    ("off", "agrees", "said"),
    [
        (0.0, True, "in registers agrees, and is used"),
        (0.01, False, "in registers DIFFERS, and is left out"),
        (np.nan, False, "in registers DIFFERS, and is left out"),
        (None, False, "in registers fails, and is left out: no such instruction"),
    ],
)
def test_the_variant_in_registers_is_checked_where_it_runs(off, agrees, said, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "geojax")
    asked, sorts = [], []

    def fake(q, prefix, own, index=None, *, registers=False):
        asked.append(registers)
        sorts.append(choosing.sort_of(q, prefix, own, index))
        if registers and off is None:
            raise RuntimeError("no such instruction")
        out, lse = attend_xla(q, prefix, own, index)
        return out.at[0, 0, 0, 7].add(off or 0.0) if registers else out, lse

    monkeypatch.setattr(choosing.mosaic_gpu, "attend_mosaic", fake)
    monkeypatch.setattr(choosing, "choose_for", lambda *args: Choice("mosaic_gpu", ()))
    registers_agree.cache_clear()
    q, pre, mine = inputs(2, 3, 4, 1, 64, 16, 8, dtype=jnp.bfloat16)
    for _ in range(2):  # inside a program, and the check is done once
        jax.jit(lambda *args: attend(*args))(q, part(*pre, 16), part(*mine, [8, 8]))
    assert asked == [False, True, agrees, agrees]
    assert len(set(sorts)) == 1  # what is checked is of the kind that is asked for
    q, pre, mine = inputs(3, 90, 2, 2, 128, 64, 8, entries=5, dtype=jnp.float16)
    index = jnp.array([[0, 1, 2]] * 3, jnp.int32)
    prefix = Part(*pre[:2], jnp.full((3, 3), 64, jnp.int32))
    jax.jit(lambda *args: attend(*args))(q, prefix, part(*mine, [8, 8, 1]), index)
    assert asked[4:] == [False, True, agrees]
    assert set(sorts[4:]) == {choosing.Sort("float16", 128, 1, 64, 2, False)}
    assert said in caplog.text
    registers_agree.cache_clear()
