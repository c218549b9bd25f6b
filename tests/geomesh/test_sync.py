# SPDX-License-Identifier: Apache-2.0
"""Exchanges: what every slice receives, what it weighs, and what error feedback remembers."""

from collections.abc import Sequence

import jax
import numpy as np
import pytest

from geojax.config import ExchangeConfig
from geojax.geomesh.codec import decode, encode
from geojax.geomesh.exchange import MeshExchange
from geojax.geomesh.layout import Layout, make_layout
from geojax.geomesh.message import Header
from geojax.geomesh.outer import merge_weights
from geojax.geomesh.sync import Contribution, ErrorFeedback, Synchronizer

SCHEDULES = ("gather", "two_phase")
CODECS = ("sign", "int8", "fp16", "fp32")
SHAPES = {
    "blocks": {"up": (2, 7, 11), "norm": {"scale": (2, 7)}},
    "embed": (13, 9),
    "head": (13, 9),
}
ROUNDING = 1e-6  # a few float32 operations on numbers of size 1


class CountingExchange(MeshExchange):
    """Counts the bytes that each slice hands over for other slices."""

    def __init__(self, slices: int):
        super().__init__(jax.devices()[:slices])
        self.sent = [0] * slices

    def all_gather(self, messages):
        for i, message in enumerate(messages):
            self.sent[i] += message.size * (len(messages) - 1)
        return super().all_gather(messages)

    def all_to_all(self, messages):
        for i, row in enumerate(messages):
            self.sent[i] += sum(m.size for j, m in enumerate(row) if j != i)
        return super().all_to_all(messages)


def shapes() -> list[tuple[int, ...]]:
    return jax.tree.leaves(SHAPES, is_leaf=lambda node: isinstance(node, tuple))


def normal(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes()]


class Setting:
    """Slices with gradients of their own, over the real engine."""

    def __init__(self, slices: int, codec: str, schedule: str, merge: str = "tokens"):
        params = jax.tree.map(
            lambda shape: np.zeros(shape, np.float32),
            SHAPES,
            is_leaf=lambda n: isinstance(n, tuple),
        )
        self.layout = make_layout(params, ExchangeConfig(codec=codec, error_feedback=False))
        self.engine = CountingExchange(slices)
        names = [f"s{i}" for i in range(slices)]
        self.synchronizer = Synchronizer(self.layout, self.engine, names, schedule, merge)
        self.slices = slices
        self.shards = [self.layout.shard(i, slices) for i in range(slices)]

    def feedback(self, seed: int | None = None) -> list[ErrorFeedback]:
        """Empty, or as some earlier rounds might have left it."""
        rows = [self.synchronizer.init_feedback(i, normal(0)) for i in range(self.slices)]
        if seed is not None:
            rng = np.random.default_rng(seed)
            for row in rows:
                for x in (*row.own, row.shard):
                    x += rng.normal(size=x.shape).astype(np.float32)
        return rows

    def exchange(
        self,
        gradients: Sequence[list[np.ndarray]],
        tokens: Sequence[int],
        steps: Sequence[int] | None = None,
        feedback: Sequence[ErrorFeedback] | None = None,
        round_: int = 1,
    ):
        rows = zip(
            range(self.slices),
            gradients,
            tokens,
            steps or [1] * self.slices,
            feedback or [None] * self.slices,
            strict=True,
        )
        return self.synchronizer.exchange(round_, [Contribution(*row) for row in rows])


def mean(weights: Sequence[float], rows: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """Weighted sum in float64."""
    return [
        sum(w * x.astype(np.float64) for w, x in zip(weights, leaves, strict=True))
        for leaves in zip(*rows, strict=True)
    ]


def assert_leaves_equal(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.tobytes() == b.tobytes()  # also tells -0 from 0


def assert_leaves_close(got, wanted, atol=ROUNDING):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def copy(feedback: Sequence[ErrorFeedback]) -> list[ErrorFeedback]:
    return [ErrorFeedback([x.copy() for x in f.own], f.shard.copy()) for f in feedback]


def roundtrip(leaves, layout: Layout) -> list[np.ndarray]:
    message, _ = encode(leaves, layout)
    out = [np.zeros_like(leaf) for leaf in leaves]
    decode([message], [1.0], layout, out)
    return out


@pytest.mark.parametrize("slices", [1, 2, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("codec", CODECS)
def test_all_slices_receive_the_same_bits(codec, schedule, slices):
    setting = Setting(slices, codec, schedule)
    feedback = setting.feedback(seed=9)
    for round_ in range(1, 4):
        gradients = [normal(10 * round_ + i) for i in range(slices)]
        merged = setting.exchange(gradients, range(1, slices + 1), None, feedback, round_)
        assert len(merged.pseudo_gradients) == slices
        for leaves in merged.pseudo_gradients:
            assert_leaves_equal(leaves, merged.pseudo_gradients[0])


@pytest.mark.parametrize("slices", [2, 3, 7])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fp32_gives_the_mean_by_tokens_and_steps_do_not_enter(schedule, slices):
    gradients = [normal(i) for i in range(slices)]
    tokens = [100 * 2**i for i in range(slices)]  # each twice the one before
    wanted = mean([t / sum(tokens) for t in tokens], gradients)
    for steps in ([1] * slices, list(range(1, slices + 1))):
        merged = Setting(slices, "fp32", schedule).exchange(gradients, tokens, steps)
        assert_leaves_close(merged.pseudo_gradients[0], wanted)


def test_gather_merges_what_was_decoded_exactly():
    gradients, tokens = [normal(i) for i in range(3)], [100, 300, 50]
    setting = Setting(3, "sign", "gather")
    merged = setting.exchange(gradients, tokens)
    sent = [roundtrip(g, setting.layout) for g in gradients]
    assert_leaves_close(merged.pseudo_gradients[0], mean([t / 450 for t in tokens], sent))


def test_two_phases_encode_the_mean_again():
    # Per shard, the second message is the first ones' mean, encoded once more.
    gradients, tokens = [normal(i) for i in range(3)], [100, 300, 50]
    setting = Setting(3, "sign", "two_phase")
    (got, *_) = setting.exchange(gradients, tokens).pseudo_gradients
    for shard in setting.shards:
        sent = [roundtrip(g, shard) for g in gradients]
        merged = [x.astype(np.float32) for x in mean([t / 450 for t in tokens], sent)]
        wanted = roundtrip(merged, shard)
        for s in shard.segments:
            a, b = (x[s.leaf].reshape(-1)[s.start : s.stop] for x in (got, wanted))
            np.testing.assert_allclose(a, b, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fednova_takes_steps_out(schedule):
    # Slices that drift by d a step: after tau_i steps, tau_i d. Whatever the steps, the merged
    # pseudo-gradient is tau d, with tau the mean of tau_i weighted by tokens a step.
    drift = normal(0)
    steps, batch = [5, 20, 10], [4, 4, 16]
    tokens = [h * b for h, b in zip(steps, batch, strict=True)]
    gradients = [[np.float32(h) * x for x in drift] for h in steps]
    merged = Setting(3, "fp32", schedule, "fednova").exchange(gradients, tokens, steps)
    tau = sum(b * h for b, h in zip(batch, steps, strict=True)) / sum(batch)
    wanted = [tau * x.astype(np.float64) for x in drift]
    assert_leaves_close(merged.pseudo_gradients[0], wanted, atol=20 * ROUNDING)  # 20 steps long


def test_fednova_is_the_mean_by_tokens_where_steps_are_equal():
    headers = [Header(1, i, tokens, 8) for i, tokens in enumerate((10, 0, 30))]
    by_tokens = merge_weights(headers, "tokens")
    assert by_tokens == pytest.approx([0.25, 0, 0.75])
    assert merge_weights(headers, "fednova") == pytest.approx(by_tokens)


def test_fednova_does_not_pull_towards_the_slice_of_more_steps():
    # Equal tokens a step, tau = 15: 15/10/2 and 15/20/2.
    headers = [Header(1, 0, 100, 10), Header(1, 1, 200, 20)]
    assert merge_weights(headers, "fednova") == pytest.approx([0.75, 0.375])
    assert merge_weights(headers, "tokens") == pytest.approx([1 / 3, 2 / 3])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, "no tokens"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("codec", ["sign", "fp16", "fp32"])
def test_a_slice_that_is_not_finite_or_has_no_tokens_is_left_out(codec, schedule, bad):
    gradients, tokens = [normal(i) for i in range(4)], [100, 200, 300, 400]
    if bad == "no tokens":
        tokens[2] = 0
    else:
        gradients[2][1].reshape(-1)[3] = bad
    setting = Setting(4, codec, schedule)
    feedback = setting.feedback(seed=5)
    before = copy(feedback)
    merged = setting.exchange(gradients, tokens, None, feedback)
    assert [h.tokens > 0 for h in merged.headers] == [True, True, False, True]
    assert_leaves_equal(feedback[2].own, before[2].own)
    # Without it, the same slices send the same messages and get the same result.
    zeros, again = [np.zeros_like(x) for x in gradients[2]], copy(before)
    others = [g if i != 2 else zeros for i, g in enumerate(gradients)]
    wanted = Setting(4, codec, schedule).exchange(others, [100, 200, 0, 400], None, again)
    for got in merged.pseudo_gradients:
        assert all(np.isfinite(x).all() for x in got)
        assert_leaves_equal(got, wanted.pseudo_gradients[0])
    weights = [1 / 7, 2 / 7, 4 / 7]
    carried = [
        [x + old - new for x, old, new in zip(g, b.own, f.own, strict=True)]
        for i, (g, b, f) in enumerate(zip(gradients, before, feedback, strict=True))
        if i != 2
    ]
    if schedule == "gather":
        assert_leaves_close(merged.pseudo_gradients[0], mean(weights, carried), 5 * ROUNDING)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("codec", CODECS)
def test_a_finite_update_too_large_to_sum_does_not_poison_the_others(codec, schedule):
    gradients = [normal(i) for i in range(3)]
    gradients[1] = [np.full_like(x, 3e38) for x in gradients[1]]
    setting = Setting(3, codec, schedule)
    feedback = setting.feedback()
    merged = setting.exchange(gradients, [100, 200, 300], None, feedback)
    for leaves in merged.pseudo_gradients:
        assert all(np.isfinite(x).all() for x in leaves)
    assert all(np.isfinite(x).all() for f in feedback for x in (*f.own, f.shard))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_round_that_nobody_joins_changes_nothing(schedule):
    setting = Setting(3, "sign", schedule)
    feedback = setting.feedback(seed=5)
    before = copy(feedback)
    gradients = [[np.full_like(x, np.nan) for x in normal(i)] for i in range(3)]
    merged = setting.exchange(gradients, [100, 200, 300], None, feedback)
    assert merged.pseudo_gradients is None
    assert merged.agreement.fraction is None
    assert [h.tokens for h in merged.headers] == [0, 0, 0]
    for got, old in zip(feedback, before, strict=True):
        assert_leaves_equal([*got.own, got.shard], [*old.own, old.shard])


@pytest.mark.parametrize("merge", ["tokens", "fednova"])
def test_one_slice_gets_its_own_message_back(merge):
    gradient = normal(0)
    setting = Setting(1, "sign", "gather", merge)
    merged = setting.exchange([gradient], [123], [7])
    assert_leaves_equal(merged.pseudo_gradients[0], roundtrip(gradient, setting.layout))
    assert merged.sent_bytes == [0]
    # Two phases sign a signed message again: the same signs and, to rounding, magnitudes.
    (again,) = Setting(1, "sign", "two_phase", merge).exchange([gradient], [123], [7])[0]
    assert_leaves_close(again, merged.pseudo_gradients[0])


@pytest.mark.parametrize("slices", [1, 2, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("codec", ["sign", "fp32"])
def test_sent_bytes_are_those_handed_over_for_others(codec, schedule, slices):
    setting = Setting(slices, codec, schedule)
    merged = setting.exchange([normal(i) for i in range(slices)], [10] * slices)
    assert merged.sent_bytes == setting.engine.sent
    if slices > 1:
        assert min(merged.sent_bytes) > 0


@pytest.mark.parametrize("codec", ["sign", "int8", "fp16"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_lost_between_messages_and_both_error_feedbacks(schedule, codec):
    # merged + what the shard owners keep = weighted sum of (gradients + kept before - kept after).
    setting, tokens = Setting(4, codec, schedule), [100, 200, 300, 400]
    feedback = setting.feedback()
    for round_ in range(1, 6):
        before = copy(feedback)
        gradients = [normal(10 * round_ + i) for i in range(4)]
        tokens[round_ % 4] = 0  # a slice left out changes nothing of this
        merged = setting.exchange(gradients, tokens, None, feedback, round_)
        weights = [t / sum(tokens) for t in tokens]
        carried = [
            [x + old - new for x, old, new in zip(g, b.own, f.own, strict=True)]
            if t
            else [np.zeros_like(x) for x in g]
            for g, b, f, t in zip(gradients, before, feedback, tokens, strict=True)
        ]
        wanted = mean(weights, carried)
        (got, *_) = merged.pseudo_gradients
        if schedule == "two_phase":
            for shard, old, new in zip(setting.shards, before, feedback, strict=True):
                change, offset = (old.shard - new.shard).astype(np.float64), 0
                for s in shard.segments:
                    part = wanted[s.leaf].reshape(-1)[s.start : s.stop]
                    part += change[offset : offset + s.size]
                    offset += s.size
                assert offset == new.shard.size
        assert_leaves_close(got, wanted, atol=10 * ROUNDING)
        tokens[round_ % 4] = 100 * (round_ % 4 + 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_error_feedback_brings_the_sum_of_many_rounds_home(schedule):
    # A constant gradient with magnitudes a hundredfold apart: the mean of what was merged over n
    # rounds nears it as 1/n with error feedback, and without stays where the first round was.
    gradients, tokens, rounds = [normal(i) for i in range(3)], [100, 100, 100], 100
    wanted = np.concatenate([x.reshape(-1) for x in mean([1 / 3] * 3, gradients)])

    def missing(with_feedback: bool) -> float:
        setting = Setting(3, "sign", schedule)
        feedback = setting.feedback() if with_feedback else None
        total = np.zeros_like(wanted)
        for round_ in range(rounds):
            merged = setting.exchange(gradients, tokens, None, feedback, round_)
            total += np.concatenate([x.reshape(-1) for x in merged.pseudo_gradients[0]])
        return np.linalg.norm(total / rounds - wanted) / np.linalg.norm(wanted)

    assert missing(True) < 0.15 < 0.3 < missing(False)
