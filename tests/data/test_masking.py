# SPDX-License-Identifier: Apache-2.0
"""Masks have the shares they are set to, bear no pattern, and follow from the sample alone."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from geojax.config import ConfigError, DataConfig, MaskingConfig
from geojax.data import Batch, Corpus, TrainSequences, ValidSequences
from geojax.data.masking import Masker, mix

EOS, SPECIAL, GAP, VOCAB, MASK = 0, 1, 2, 103, 103
ORDINARY = np.arange(VOCAB) > GAP
BERT = MaskingConfig()


def masker(config=BERT, seed=0):
    return Masker(config, MASK, ORDINARY, seed)


def mask(tokens, first=0, **kwargs):
    """Masked `tokens`, all of them real, of samples first, first + 1, ..."""
    samples = first + np.arange(len(tokens), dtype=np.uint64)
    return masker(**kwargs)(tokens, samples, np.ones_like(tokens, bool))


def chosen(first=0, rows=4000, length=40, **kwargs):
    """Where ordinary tokens are chosen: 6 of each 40."""
    return mask(np.full((rows, length), 5, np.int32), first, **kwargs)[1] > 0


def assert_rate(hits, tries, rate, message=""):
    """Within 5 standard deviations of a binomial: wrong once in two million."""
    spread = math.sqrt(rate * (1 - rate) / tries)
    assert abs(hits / tries - rate) < 5 * spread, f"{message}: {hits / tries}, not {rate}"


class Text(Corpus):
    """A corpus without a folder."""

    mask_id, ordinary = MASK, ORDINARY


def corpus(train, valid=(3, 4, 5)):
    ids = (np.array(stream, np.uint16) for stream in (train, valid))
    return Text(Path(), 8, *ids, 1, 1, 0, VOCAB, EOS, "")


def stream(tokens, seed=0):
    """Text with end-of-text and special tokens in it."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(tokens) < 0.1, rng.integers(0, 2, tokens), rng.integers(3, VOCAB))


def assert_same(a, b):
    for name in Batch._fields:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def join(batches):
    return Batch(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))


def test_hash_is_splitmix64():
    # The first outputs of SplitMix64 from state 0, as published with it.
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix(states).tolist() == published


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.lists(
        st.lists(st.sampled_from([EOS, SPECIAL, 3, 4, 50, 102]), min_size=12, max_size=12),
        min_size=1,
        max_size=5,
    ),
    lengths=st.lists(st.integers(0, 12), min_size=5, max_size=5),
    fraction=st.floats(0.001, 1),
    seed=st.none() | st.integers(0, 2**32),
    first=st.integers(0, 2**40),
)
def test_a_fixed_share_of_each_sequence_is_chosen_of_its_text_alone(
    tokens, lengths, fraction, seed, first
):
    tokens = np.array(tokens, np.int32)
    before = tokens.copy()
    real = np.arange(12) < np.array(lengths)[: len(tokens), None]
    samples = first + np.arange(len(tokens), dtype=np.uint64)
    config = MaskingConfig(fraction=fraction)
    hidden, weights = masker(config, seed)(tokens, samples, real)
    eligible = real & (tokens > GAP)
    for row, count in zip(weights, eligible.sum(1).tolist(), strict=True):
        assert row.sum() == min(count, max(1, round(fraction * count)))
    assert not weights[~eligible].any()
    np.testing.assert_array_equal(tokens, before)
    np.testing.assert_array_equal(hidden[weights == 0], tokens[weights == 0])
    assert all(i == MASK or ORDINARY[i] for i in hidden[weights == 1])
    assert (hidden.dtype, weights.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("config", [BERT, MaskingConfig(keep=0.35, randomize=0.25)])
def test_chosen_tokens_meet_their_fates_at_the_set_rates(config):
    hidden, weights = mask(np.full((4000, 40), 5, np.int32), config=config)
    fates = hidden[weights > 0]
    assert len(fates) == 4000 * 6
    assert_rate(np.sum(fates == MASK), len(fates), 1 - config.keep - config.randomize, "masked")
    random = config.randomize / ORDINARY.sum()  # a random token may be the old one
    assert_rate(np.sum(fates == 5), len(fates), config.keep + random, "kept")
    for other in np.flatnonzero(ORDINARY):
        if other != 5:
            assert_rate(np.sum(fates == other), len(fates), random, f"random {other}")


@pytest.mark.parametrize(
    ("config", "fates"),
    [
        (MaskingConfig(keep=0, randomize=0), {MASK}),
        (MaskingConfig(keep=1, randomize=0), {5}),
        (MaskingConfig(keep=0, randomize=1), set(range(3, VOCAB))),
    ],
)
def test_shares_of_none_and_all_are_exact(config, fates):
    hidden, weights = mask(np.full((4000, 40), 5, np.int32), config=config)
    assert set(hidden[weights > 0].tolist()) == fates


def test_every_place_is_chosen_and_masked_alike():
    hidden, weights = mask(np.full((4000, 40), 5, np.int32))
    for place in range(40):
        assert_rate(np.sum(weights[:, place]), 4000, 0.15, f"place {place} chosen")
        assert_rate(np.sum(hidden[:, place] == MASK), 4000, 0.12, f"place {place} masked")


def test_pairs_of_places_are_chosen_alike():
    picks = chosen().astype(int)
    together = (picks.T @ picks)[np.triu_indices(40, 1)]
    for count in together.tolist():  # 6 of 40 without replacement
        assert_rate(count, 4000, 6 * 5 / (40 * 39), "pair")


@pytest.mark.parametrize(
    "other",
    [
        *({"first": n} for n in (1, 2, 3, 16, 4000, 2**32, 2**33)),
        *({"seed": n} for n in (None, 1, 2, 2**31)),
        {"first": 1, "seed": 1},
    ],
)
def test_other_samples_and_seeds_choose_independently(other):
    picks, others = chosen(), chosen(**other)
    # Places that both choose: hypergeometric, of mean 6 * 6 / 40 and variance below the mean.
    common = (picks & others).sum(1)
    assert abs(common.mean() - 0.9) < 5 * math.sqrt(0.9 / len(common))


def test_an_epoch_masks_every_sequence_anew():
    data = TrainSequences(corpus(stream(64 * 20 + 1)), 64, 0, masking=BERT)
    epochs = [data.chunk(e * 20, 20, 1) for e in range(3)]
    rows = [{t.tobytes(): w for t, w in zip(b.targets, b.weights, strict=True)} for b in epochs]
    assert rows[0].keys() == rows[1].keys() == rows[2].keys()
    for text in rows[0]:
        assert len({epoch[text].tobytes() for epoch in rows}) == 3


def test_seeds_and_validation_have_their_own_masks():
    text = np.full(66, 5)  # one sequence, whatever the order
    text = corpus(text, text)
    masks = [TrainSequences(text, 65, seed, masking=BERT).chunk(0, 1, 1) for seed in (0, 1, 2)]
    masks += ValidSequences(text, 65, masking=BERT).batches(1, 1)
    assert len({b.weights.tobytes() for b in masks}) == 4


@settings(deadline=None, max_examples=25)
@given(
    start=st.integers(0, 100),
    steps=st.integers(1, 9),
    batch=st.integers(1, 3),
    chunk_steps=st.integers(1, 5),
    document_mask=st.booleans(),
)
def test_masks_depend_on_the_sample_and_on_nothing_else(
    start, steps, batch, chunk_steps, document_mask
):
    text = corpus(stream(8 * 11 + 1))
    data = TrainSequences(text, 8, 3, document_mask, BERT)
    parts = list(data.chunks(start, steps, batch, chunk_steps))
    assert all(not b.weights[real:].any() for b, real in parts)
    read = join([Batch(*(x[:real].reshape(-1, *x.shape[2:]) for x in b)) for b, real in parts])
    again = TrainSequences(text, 8, 3, document_mask, BERT)
    one_by_one = [again.chunk(n, 1, 1) for n in range(start, start + steps * batch)]
    assert_same(read, join([Batch(*(x[0] for x in b)) for b in one_by_one]))


@pytest.mark.parametrize("document_mask", [False, True])
def test_targets_are_the_text_itself(document_mask):
    text = corpus(stream(640 * 64 + 5))
    plain = TrainSequences(text, 64, 0, document_mask).chunk(0, 64, 10)
    masked = TrainSequences(text, 64, 0, document_mask, BERT).chunk(0, 64, 10)
    np.testing.assert_array_equal(masked.targets, plain.tokens)
    for name in ("segments", "positions", "samples"):
        np.testing.assert_array_equal(getattr(masked, name), getattr(plain, name))
    differ = masked.tokens != masked.targets
    assert not differ[masked.weights == 0].any()
    assert_rate(differ.sum(), masked.weights.sum(), 0.9 - 0.1 / 100, "changed")
    assert (masked.targets[masked.weights == 1] > GAP).all()
    assert masked.segments.any() == document_mask
    for array in masked:
        assert array.flags.c_contiguous


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(2, 60),
    batch=st.integers(1, 5),
    first=st.integers(0, 6),
    document_mask=st.booleans(),
)
def test_validation_masks_are_always_the_same(tokens, batch, first, document_mask):
    text = corpus([3, 4], stream(tokens))
    data = ValidSequences(text, 8, document_mask, BERT)
    whole = next(data.batches(data.sequences, data.sequences))
    for b in data.batches(batch, data.sequences, first):
        rows = b.samples < data.sequences
        assert_same(Batch(*(x[rows] for x in b)), Batch(*(x[b.samples[rows]] for x in whole)))
        assert not b.weights[~rows].any()


@pytest.mark.parametrize("document_mask", [False, True])
def test_padding_bears_no_loss_and_no_token_sees_it(document_mask):
    valid = np.append(EOS, np.arange(3, 30))
    every = MaskingConfig(fraction=1)
    (b,) = ValidSequences(corpus([3, 4], valid), 10, document_mask, every).batches(4, 9)
    real = (np.arange(40) < len(valid)).reshape(4, 10)
    np.testing.assert_array_equal(b.weights, real & (b.targets != EOS))
    np.testing.assert_array_equal(b.targets[real], valid)
    for segments, inside in zip(b.segments, real, strict=True):
        assert not set(segments[inside]) & set(segments[~inside])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fraction": 0}, r"data.masking.fraction 0 must be above 0"),
        ({"fraction": 1.5}, r"fraction 1.5 must .* at most 1; use 0.15"),
        ({"fraction": math.nan}, r"fraction nan"),
        ({"keep": -0.1}, r"data.masking.keep -0.1 must lie in 0..1"),
        ({"randomize": math.nan}, r"data.masking.randomize nan"),
        ({"keep": 0.6, "randomize": 0.5}, r"keep 0.6 and .*randomize 0.5 .* more than 1"),
    ],
)
def test_shares_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        MaskingConfig(**fields)


def test_masking_is_kept_in_a_stored_config():
    adapter = TypeAdapter(DataConfig)
    for config in (DataConfig(), DataConfig(masking=MaskingConfig(fraction=0.3))):
        assert adapter.validate_json(adapter.dump_json(config)) == config
    assert adapter.validate_json("{}").masking is None  # runs from before
