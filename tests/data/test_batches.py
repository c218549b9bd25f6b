# SPDX-License-Identifier: Apache-2.0
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.data import Batch, Corpus, TrainSequences, ValidSequences, allot, empty_batch

EOS = 0


def corpus(train, valid=(1, 2), seq_len=4):
    return Corpus(
        folder=Path(),
        seq_len=seq_len,
        train=np.array(train, np.uint16),
        valid=np.array(valid, np.uint16),
        train_documents=1,
        valid_documents=1,
        text_bytes=0,
        vocab_size=1000,
        eos_id=EOS,
        tokenizer_fingerprint="",
    )


def sequences(count, seq_len=4, seed=0, tail=0, **kwargs):
    """`count` sequences over a stream of distinct ids, `tail` tokens beyond them."""
    stream = np.arange(1, count * seq_len + 2 + tail)
    return TrainSequences(corpus(stream, seq_len=seq_len), seq_len, seed, **kwargs)


def assert_same(a, b):
    for name in Batch._fields:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def join(batches):
    return Batch(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))


@settings(deadline=None)
@given(
    cursor=st.integers(0, 10**9),
    rounds=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_allotments_cover_the_stream_once(cursor, rounds):
    start, samples = cursor, []
    for shares in rounds:
        ranges, cursor = allot(cursor, shares)
        assert [len(r) for r in ranges] == shares
        samples += [n for r in ranges for n in r]
    assert samples == list(range(start, cursor))


def test_empty_share_is_refused():
    with pytest.raises(AssertionError, match="takes no sequence"):
        allot(0, [3, 0])


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 40), seed=st.integers(0, 2**32), epoch=st.integers(0, 5))
def test_every_epoch_is_a_permutation(count, seed, epoch):
    ids = sequences(count, seed=seed).ids(epoch * count, (epoch + 1) * count)
    assert {e for e, _ in ids} == {epoch}
    assert sorted(s for _, s in ids) == list(range(count))


def test_epochs_and_seeds_have_their_own_order():
    first = sequences(100)
    orders = [[s for _, s in first.ids(e * 100, (e + 1) * 100)] for e in range(3)]
    orders += [[s for _, s in sequences(100, seed=seed).ids(0, 100)] for seed in (1, 2)]
    assert len({tuple(order) for order in orders}) == 5
    assert orders[0] == [s for _, s in sequences(100).ids(0, 100)]


@pytest.mark.parametrize("tail", [0, 3])
def test_an_epoch_predicts_every_token_once(tail):
    data = sequences(12, tail=tail)
    assert data.sequences == data.corpus.sequences == 12
    batch = data.chunk(0, 3, 4)
    assert batch.targets.shape == (3, 4, 4)
    assert Counter(batch.targets.ravel().tolist()) == Counter(range(2, 12 * 4 + 2))
    np.testing.assert_array_equal(batch.targets, batch.tokens + 1)
    assert batch.weights.sum() == 48
    assert not batch.segments.any()
    assert (batch.positions == np.arange(4)).all()


def test_chunk_is_its_samples_in_order():
    data = sequences(7)
    rows = data.chunk(5, 3, 2).tokens.reshape(6, 4)
    for row, (_, sequence) in zip(rows, data.ids(5, 11), strict=True):
        assert row[0] == sequence * 4 + 1


@settings(deadline=None, max_examples=25)
@given(
    start=st.integers(0, 100),
    steps=st.integers(1, 9),
    batch=st.integers(1, 3),
    chunk_steps=st.integers(1, 5),
    mask=st.booleans(),
)
def test_chunks_are_the_chunk_padded_to_one_shape(start, steps, batch, chunk_steps, mask):
    data = sequences(11, document_mask=mask)
    parts = list(data.chunks(start, steps, batch, chunk_steps))
    assert {b.tokens.shape for b, _ in parts} == {(chunk_steps, batch, 4)}
    assert all(not b.weights[real:].any() for b, real in parts)
    real = join([Batch(*(x[:n] for x in b)) for b, n in parts])
    assert_same(real, data.chunk(start, steps, batch))


def test_chunks_may_be_abandoned():
    chunks = sequences(50).chunks(0, 1000, 2, 1)
    next(chunks)
    chunks.close()


@settings(deadline=None, max_examples=20)
@given(shares=st.lists(st.integers(1, 6), min_size=2, max_size=3), stop=st.integers(0, 3))
def test_resumed_cursor_sees_what_an_uninterrupted_run_sees(shares, stop):
    def rounds(data, cursor, count):
        seen = []
        for _ in range(count):
            ranges, cursor = allot(cursor, shares)
            seen += [data.chunk(r.start, len(r), 1) for r in ranges]
        return seen, cursor

    whole, _ = rounds(sequences(9, seed=3), 0, 4)
    before, cursor = rounds(sequences(9, seed=3), 0, stop)
    after, _ = rounds(sequences(9, seed=3), cursor, 4 - stop)
    assert_same(join(whole), join(before + after))


@settings(deadline=None, max_examples=10)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from((1, 3, 8, 16))), min_size=2, max_size=5)
)
def test_steps_of_changing_batches_over_epochs_take_every_sequence_in_order(legs):
    """11 sequences an epoch, which no batch divides; each leg begins with a stream opened anew, as
    after a resume."""
    taken, cursor = [], 0
    for steps, batch in legs:
        for chunk, real in sequences(11).chunks(cursor, steps, batch, 2):
            taken.extend(np.asarray(chunk.samples)[:real].reshape(-1).tolist())
        cursor += steps * batch
    assert taken == list(range(cursor))
    ids = sequences(11).ids(0, cursor)
    assert all(count == 1 for count in Counter(ids).values())


def test_document_mask_on_a_stream_made_by_hand():
    stream = [5, 6, EOS, 7, EOS, EOS, 8, 9, 10]
    masked = TrainSequences(corpus(stream, seq_len=8), 8, 0, document_mask=True).chunk(0, 1, 1)
    assert masked.tokens.ravel().tolist() == [5, 6, EOS, 7, EOS, EOS, 8, 9]
    assert masked.targets.ravel().tolist() == [6, EOS, 7, EOS, EOS, 8, 9, 10]
    assert masked.weights.ravel().tolist() == [1, 1, 0, 1, 0, 0, 1, 1]
    assert masked.segments.ravel().tolist() == [0, 0, 0, 1, 1, 2, 3, 3]
    assert masked.positions.ravel().tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    plain = TrainSequences(corpus(stream, seq_len=8), 8, 0).chunk(0, 1, 1)
    np.testing.assert_array_equal(plain.tokens, masked.tokens)
    assert plain.weights.all()
    assert not plain.segments.any()


@settings(deadline=None, max_examples=30)
@given(stream=st.lists(st.integers(0, 3), min_size=14, max_size=60))
def test_masked_weights_sum_to_the_loss_bearing_tokens(stream):
    data = TrainSequences(corpus(stream, seq_len=6), 6, 0, document_mask=True)
    batch = data.chunk(0, data.sequences, 1)
    covered = np.array(stream[: data.sequences * 6])
    assert batch.weights.sum() == np.sum(covered != EOS)


@settings(deadline=None)
@given(tokens=st.integers(2, 60), batch=st.integers(1, 5), wanted=st.integers(1, 20))
def test_validation_predicts_the_head_of_the_stream_once(tokens, batch, wanted):
    data = ValidSequences(corpus([1, 2], valid=np.arange(1, tokens + 1)), 4)
    batches = list(data.batches(batch, wanted))
    assert {b.tokens.shape for b in batches} == {(batch, 4)}
    joined = join(batches)
    targets = joined.targets[joined.weights > 0].tolist()
    assert targets == list(range(2, 2 + min(wanted * 4, tokens - 1)))


@settings(deadline=None, max_examples=25)
@given(
    start=st.integers(0, 100) | st.integers(2**32 - 9, 2**32),
    steps=st.integers(1, 7),
    batch=st.integers(1, 3),
    chunk_steps=st.integers(1, 4),
)
def test_every_sequence_carries_its_number(start, steps, batch, chunk_steps):
    data = sequences(5)
    parts = [b.samples for b, _ in data.chunks(start, steps, batch, chunk_steps)]
    assert {(s.shape, s.dtype) for s in parts} == {((chunk_steps, batch), np.dtype(np.uint32))}
    padded = np.concatenate(parts).ravel()
    assert padded.tolist() == [n % 2**32 for n in range(start, start + len(padded))]


@settings(deadline=None)
@given(batch=st.integers(1, 5), first=st.integers(0, 9))
def test_validation_numbers_the_stream(batch, first):
    data = ValidSequences(corpus([1, 2], valid=np.arange(1, 43)), 4)
    for b in data.batches(batch, data.sequences, first):
        real = b.weights.any(1)
        np.testing.assert_array_equal(b.samples[real] * 4 + 1, b.tokens[real, 0])
        assert (np.diff(b.samples) == 1).all()


def test_empty_batch_has_the_form_of_a_chunk():
    chunk, empty = sequences(6).chunk(0, 2, 3), empty_batch((2, 3), 4)
    for read, zeros in zip(chunk, empty, strict=True):
        assert (zeros.shape, zeros.dtype) == (read.shape, read.dtype)
        assert not zeros.any()
    assert len({id(x) for x in empty}) == len(Batch._fields)  # may be donated one by one


@pytest.mark.parametrize("mask", [False, True])
def test_fields_have_their_types_and_are_contiguous(mask):
    types = dict.fromkeys(Batch._fields, np.int32) | {"weights": np.float32, "samples": np.uint32}
    for name, array in sequences(3, document_mask=mask).chunk(0, 1, 3)._asdict().items():
        assert array.flags.c_contiguous
        assert array.dtype == types[name]


def test_samples_given_one_by_one_are_read_in_that_order():
    data = sequences(20)
    samples = np.concatenate([np.arange(5, 9), np.arange(30, 36)])
    pieces = list(data.chunks(samples, 5, 2, 2))
    assert [real for _, real in pieces] == [2, 2, 1]
    got = np.concatenate([batch.tokens[:real].reshape(-1, 4) for batch, real in pieces])
    wanted = [data.chunk(n, 1, 1).tokens.reshape(4) for n in samples]
    assert got.tolist() == np.array(wanted).tolist()
    numbers = np.concatenate([batch.samples[:real].reshape(-1) for batch, real in pieces])
    assert numbers.tolist() == samples.tolist()
