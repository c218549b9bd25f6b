# SPDX-License-Identifier: Apache-2.0
"""Codecs against their formulas, written out naively, and what error feedback promises."""

from math import prod

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from geojax.config import ExchangeConfig
from geojax.geomesh.codec import Share, decode, encode, sign_agreement
from geojax.geomesh.layout import Layout, Segment, make_layout

CODECS = ("sign", "int8", "fp16", "bf16", "fp32")
TYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
ULP = 2.0**-24  # relative rounding error of one float32 operation


def groups(*shape_and_group: tuple[int, int], codec: str = "sign") -> Layout:
    """A layout of whole leaves, each given by its size and group."""
    return Layout(
        tuple(Segment(i, 0, size, group, codec) for i, (size, group) in enumerate(shape_and_group))
    )


def normal(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def roundtrip(leaves, layout, residual=None) -> list[np.ndarray]:
    message, _ = encode(leaves, layout, residual)
    return decoded([message], [1.0], layout, leaves)


def decoded(messages, weights, layout, like, fill: float = np.nan) -> list[np.ndarray]:
    out = [np.full(leaf.shape, fill, np.float32) for leaf in like]
    decode(messages, weights, layout, out)
    return out


def model_like(seed: int = 0) -> tuple[list[np.ndarray], dict]:
    """Leaves of a stack, tables and norms, of sizes that fit neither bytes nor tiles."""
    leaves = normal((3, 7, 11), (3, 7, 5), (13, 9), (9,), seed=seed)
    params = {
        "blocks": {"a": leaves[0], "b": leaves[1]},
        "embed": leaves[2],
        "norm": {"scale": leaves[3]},
    }
    assert [leaf.shape for leaf in leaves] == [x.shape for x in jax.tree.leaves(params)]
    return leaves, params


def layouts(codec: str) -> list[Layout]:
    _, params = model_like()
    return [
        make_layout(params, ExchangeConfig(codec=codec, scales=scales, error_feedback=False))
        for scales in (("tensor", "row") if codec in ("sign", "int8") else ("tensor",))
    ]


def parsed(message: np.ndarray, segment: Segment) -> np.ndarray:
    """[groups, group] from a segment's bytes: all magnitudes, then all groups."""
    count = segment.groups
    if segment.codec not in ("sign", "int8"):
        return message.view(TYPES[segment.codec]).astype(np.float32).reshape(count, -1)
    scales = np.frombuffer(message[: 4 * count].tobytes(), "<f4")[:, None]
    body = message[4 * count :].reshape(count, -1)
    if segment.codec == "int8":
        return body.view(np.int8) * scales
    bits = np.unpackbits(body, axis=1)[:, : segment.group]
    return np.where(bits, -scales, scales)


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_are_what_the_layout_says_they_are(codec):
    leaves, _ = model_like()
    for layout in layouts(codec):
        message, _ = encode(leaves, layout)
        offset = 0
        out = decoded([message], [1.0], layout, leaves)
        for segment in layout.segments:
            part = message[offset : offset + segment.num_bytes]
            offset += segment.num_bytes
            wanted = out[segment.leaf].reshape(-1)[segment.start : segment.stop]
            np.testing.assert_array_equal(parsed(part, segment).reshape(-1), wanted)
        assert offset == message.size == layout.num_bytes


@pytest.mark.parametrize(
    ("size", "group"),
    [
        (24, 24),
        (1, 1),
        (13, 13),  # not whole bytes
        (70, 7),
        (300_001, 300_001),  # larger than any tile, last tile not whole bytes
        (3_000 * 97, 97),  # many tiles of rows
        (3 * 140_001, 140_001),  # rows larger than a tile
    ],
)
def test_sign_sends_the_mean_magnitude_with_the_sign(size, group):
    (x,) = normal((size,))
    (got,) = roundtrip([x], groups((size, group)))
    rows = x.reshape(-1, group).astype(np.float64)
    wanted = np.abs(rows).mean(axis=1, keepdims=True) * np.sign(rows)
    # The sum of magnitudes is pairwise: its error grows with the logarithm of the group.
    np.testing.assert_allclose(got.reshape(-1, group), wanted, rtol=40 * ULP)


def test_mean_magnitude_is_the_best_scale():
    (x,) = normal((1000,))
    (got,) = roundtrip([x], groups((1000, 1000)))
    error = np.square(x - got).sum()
    for factor in (0.99, 1.01, 1.25):
        assert np.square(x - factor * got).sum() > error


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_has_the_sign_of_its_sign_bit_in_bits_and_residual(zero):
    x = np.array([zero, 3.0, -1.0], np.float32)
    residual = [np.zeros(3, np.float32)]
    # Error feedback adds 0 + x first, which makes -0 a plus: bits and residual must both say so.
    for kept in (None, residual):
        layout = groups((3, 3))
        message, _ = encode([x], layout, kept)
        (got,) = decoded([message], [1.0], layout, [x])
        minus = np.signbit(x[0] if kept is None else x[0] + np.float32(0))
        scale = np.float32(4 / 3)
        assert got[0] == (-scale if minus else scale)
    np.testing.assert_array_equal(residual[0], x - got)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_error_feedback_holds_exactly_what_was_not_sent(codec, shards):
    leaves, _ = model_like()
    for layout in layouts(codec):
        residual = normal(*(leaf.shape for leaf in leaves), seed=1)
        before = [r.copy() for r in residual]
        out = [np.full(leaf.shape, np.nan, np.float32) for leaf in leaves]
        for shard in (layout.shard(i, shards) for i in range(shards)):
            message, _ = encode(leaves, shard, residual)
            decode([message], [1.0], shard, out)
        for x, old, sent, new in zip(leaves, before, out, residual, strict=True):
            # Bitwise: sender and receiver do the same two operations in the same order.
            np.testing.assert_array_equal(new, (old + x) - sent)


@pytest.mark.parametrize("codec", CODECS)
def test_what_lies_outside_a_layout_is_left_alone(codec):
    leaves, _ = model_like()
    for layout in layouts(codec):
        shard = layout.shard(1, 3)
        residual = normal(*(leaf.shape for leaf in leaves), seed=1)
        before = [r.copy() for r in residual]
        message, _ = encode(leaves, shard, residual)
        out = decoded([message], [1.0], shard, leaves, fill=42)
        inside = [np.zeros(leaf.size, bool) for leaf in leaves]
        for segment in shard.segments:
            inside[segment.leaf][segment.start : segment.stop] = True
        for mask, old, new, sent in zip(inside, before, residual, out, strict=True):
            np.testing.assert_array_equal(new.reshape(-1)[~mask], old.reshape(-1)[~mask])
            assert (sent.reshape(-1)[~mask] == 42).all()
        assert any(mask.any() for mask in inside)


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_rows_without_a_gradient_never_move(codec, feedback):
    vocab, unused = 13, [0, 5, 12]
    layout = groups((vocab * 9, 9), codec=codec)
    residual = [np.zeros((vocab, 9), np.float32)] if feedback else None
    moved = np.zeros((vocab, 9), np.float32)
    for round_ in range(100):
        (x,) = normal((vocab, 9), seed=round_)
        x[unused] = 0.0 if round_ % 2 else -0.0
        (sent,) = roundtrip([x], layout, residual)
        assert (sent[unused] == 0).all()
        moved += sent
    assert (moved[unused] == 0).all()
    assert np.delete(moved, unused, axis=0).all()


@pytest.mark.parametrize("codec", CODECS)
def test_an_all_zero_tensor_stays_zero(codec):
    leaves, _ = model_like()
    zeros = [np.zeros_like(leaf) for leaf in leaves]
    for layout in layouts(codec):
        residual = [np.zeros_like(leaf) for leaf in leaves]
        for sent, kept in zip(roundtrip(zeros, layout, residual), residual, strict=True):
            assert not sent.any()
            assert not kept.any()
        assert encode(zeros, layout)[1].fraction is None  # 0 / 0


@pytest.mark.parametrize("codec", CODECS)
def test_merged_is_the_weighted_sum_in_slice_order(codec):
    weights = [0.1, 0.7, 0.2]
    for layout in layouts(codec):
        messages, parts = [], []
        for seed in range(3):
            leaves, _ = model_like(seed)
            messages.append(encode(leaves, layout)[0])
            parts.append(decoded(messages[-1:], [1.0], layout, leaves))
        merged = decoded(messages, weights, layout, leaves)
        naive = [np.zeros_like(leaf) for leaf in leaves]
        for weight, part in zip(weights, parts, strict=True):
            for total, leaf in zip(naive, part, strict=True):
                total += np.float32(weight) * leaf
        for got, wanted in zip(merged, naive, strict=True):
            if codec == "int8":  # (level * scale) * weight or level * (scale * weight)
                np.testing.assert_allclose(got, wanted, rtol=0, atol=8 * ULP * np.abs(got).max())
            else:
                np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("codec", CODECS)
def test_no_tensor_is_skipped_whatever_its_size(codec):
    # Larger than any block; three equal ones; one element; each of another magnitude.
    shapes = [(400_000,), (1_000,), (1_000,), (1_000,), (1,)]
    leaves = [x * 10.0**i for i, x in enumerate(normal(*shapes))]
    leaves = [x.astype(np.float32) for x in leaves]
    layout = groups(*((prod(s), prod(s)) for s in shapes), codec=codec)
    for x, got in zip(leaves, roundtrip(leaves, layout), strict=True):
        assert np.vdot(x, got) > 0.6 * np.vdot(got, got)
        assert (np.signbit(x) == np.signbit(got))[np.abs(x) > 0.1 * np.abs(x).max()].all()


def test_captured_energy():
    leaves = normal((6, 50), (300_000,))
    leaves[0] *= np.arange(1, 7, dtype=np.float32)[:, None]
    residual = normal((6, 50), (300_000,), seed=1)
    layout = groups((300, 50), (300_000, 300_000))
    sums = [x + r for x, r in zip(leaves, residual, strict=True)]
    _, energy = encode(leaves, layout, residual)
    rows = [sums[0].astype(np.float64), sums[1].astype(np.float64)[None]]
    total = sum(np.square(r).sum() for r in rows)
    captured = sum((np.abs(r).mean(axis=1) ** 2).sum() * r.shape[1] for r in rows)
    assert energy.fraction == pytest.approx(captured / total, rel=1e-5)  # float32 sums of 3e5
    # What is captured and what is kept are orthogonal: |x|^2 = |sent|^2 + |residual|^2.
    kept = sum(float(np.square(r, dtype=np.float64).sum()) for r in residual)
    assert energy.part + kept == pytest.approx(energy.total, rel=1e-5)


def test_sign_agreement_counts_equal_signs_over_pairs():
    layout = groups((1001, 1001), (70, 7))
    rows = [normal((1001,), (70,), seed=s) for s in range(3)]
    messages = [encode(leaves, layout)[0] for leaves in rows]
    signs = [np.concatenate([np.signbit(x) for x in leaves]) for leaves in rows]
    equal = sum(int((signs[i] == signs[j]).sum()) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert sign_agreement(messages, layout) == Share(equal, 3 * 1071)
    assert sign_agreement([messages[0]] * 2, layout).fraction == 1
    opposite = encode([-x for x in rows[0]], layout)[0]
    assert sign_agreement([messages[0], opposite], layout).fraction == 0
    assert sign_agreement(messages[:1], layout).fraction is None
    dense = groups((1001, 1001), (70, 7), codec="fp32")
    assert sign_agreement([encode(x, dense)[0] for x in rows], dense).fraction is None


@settings(deadline=None)
@given(hnp.arrays(np.float32, (5, 9), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_int8_is_off_by_at_most_half_a_step(x):
    x[np.abs(x) < 1e-30] = 0  # below, the step itself is subnormal and has few bits
    (got,) = roundtrip([x], groups((45, 9), codec="int8"))
    step = np.abs(x).max(axis=1, keepdims=True) / 127
    # Half a step, and the rounding of level * step, of the division, and of the step.
    assert (np.abs(got - x) <= 0.5 * step + 127 * step * 4 * ULP).all()


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_overflow_is_clipped_and_kept(codec):
    limit = np.float32(ml_dtypes.finfo(TYPES[codec]).max)
    huge = np.float32(3.4e38)
    x = np.array([huge, -huge, limit, 1.0], np.float32)
    residual = [np.zeros(4, np.float32)]
    (got,) = roundtrip([x], groups((4, 4), codec=codec), residual)
    np.testing.assert_array_equal(got, [limit, -limit, limit, 1.0])
    np.testing.assert_array_equal(residual[0], x - got)


def test_error_feedback_delivers_in_the_long_run_and_nothing_else_does():
    # Magnitudes that differ tenfold: one scale and a sign are far from the truth every time.
    (noise,) = normal((64,))
    drift = np.geomspace(0.1, 1, 64).astype(np.float32)
    layout, rounds = groups((64, 64)), 400
    residual = [np.zeros(64, np.float32)]
    total, total_fed, total_plain = np.zeros(64), np.zeros(64), np.zeros(64)
    norms = []
    for round_ in range(rounds):
        x = [(drift * (1 + 0.1 * np.roll(noise, round_))).astype(np.float32)]
        total += x[0]
        total_fed += roundtrip(x, layout, residual)[0]
        total_plain += roundtrip(x, layout)[0]
        norms.append(np.linalg.norm(residual[0]))
    # All that is missing is in the residual, whose norm levels off: 4 times the rounds do not even
    # double it.
    np.testing.assert_allclose(total_fed + residual[0], total, rtol=rounds * 4 * ULP)
    assert norms[-1] < 2 * norms[rounds // 4]
    missing = np.linalg.norm(total_fed - total) / np.linalg.norm(total)
    assert missing < 0.02 < 0.3 < np.linalg.norm(total_plain - total) / np.linalg.norm(total)
