# SPDX-License-Identifier: Apache-2.0
"""Masks of diffusion: any number of tokens alike, weights that add up, no token out of place."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.config import ConfigError, MaskingConfig
from geojax.data import Corpus, TrainSequences, ValidSequences
from geojax.data.masking import Masker

EOS, VOCAB, MASK = 0, 50, 50
DIFFUSION = MaskingConfig(kind="diffusion")


def mask(tokens, scored, first=0, config=DIFFUSION, seed=0):
    samples = first + np.arange(len(tokens), dtype=np.uint64)
    return Masker(config, MASK, np.arange(VOCAB) > EOS, seed)(tokens, samples, scored)


class Text(Corpus):
    """A corpus without a folder."""

    mask_id, ordinary = MASK, np.arange(VOCAB) > EOS


def corpus(train, valid=(1, 2, 3), masking=DIFFUSION, **examples):
    ids = (np.array(stream, np.uint16) for stream in (train, valid))
    return Text(Path(), 8, *ids, 1, 1, 0, VOCAB, EOS, "", masking, **examples)


@settings(deadline=None)
@given(
    rows=st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=5),
    first=st.integers(0, 2**40),
)
def test_weights_add_up_to_the_scored_tokens_and_mark_the_masked_ones(rows, first):
    scored = np.array(rows)
    tokens = np.arange(scored.size, dtype=np.int32).reshape(scored.shape) % VOCAB
    hidden, weights = mask(tokens, scored, first)
    assert ((hidden == MASK) == (weights > 0)).all()
    assert (hidden[weights == 0] == tokens[weights == 0]).all()
    assert not weights[~scored].any()
    count, chosen = scored.sum(1), (weights > 0).sum(1)
    assert ((chosen >= 1) == (count >= 1)).all()
    np.testing.assert_allclose(weights.sum(1), count, rtol=1e-6)  # float32
    for row in weights:
        assert len(set(row[row > 0].tolist())) <= 1


def test_every_number_of_masks_is_as_likely_and_so_is_every_place():
    rows, length = 40_000, 10
    scored = np.ones((rows, length), bool)
    _, weights = mask(np.full((rows, length), 5, np.int32), scored)
    counts = np.bincount((weights > 0).sum(1), minlength=length + 1)
    assert counts[0] == 0
    expected = rows / length
    # Chi-square of 9 degrees of freedom: above 34 once in ten thousand.
    assert ((counts[1:] - expected) ** 2 / expected).sum() < 34
    places = (weights > 0).mean(0)
    share = (length + 1) / 2 / length
    assert np.abs(places - share).max() < 5 * math.sqrt(share * (1 - share) / rows)


def test_the_expected_loss_is_that_of_masks_with_a_uniform_rate():
    """Nie et al. 2025, equations 3 and 6: E_t[sum of masked losses / t] over all tokens, with each
    masked with probability t, equals E_m[n/m sum of masked losses] with m of n."""
    length, rows = 6, 200_000
    # A loss that depends on how much is hidden, as a model's does.
    loss = lambda masked: masked * (1 + masked.sum(1, keepdims=True)) ** 1.5  # noqa: E731
    _, weights = mask(np.full((rows, length), 5, np.int32), np.ones((rows, length), bool))
    ours = (loss(weights > 0) * weights).sum(1)
    rng = np.random.default_rng(0)
    t = rng.uniform(1e-3, 1, (rows, 1))
    masked = rng.random((rows, length)) < t
    theirs = (loss(masked) / t).sum(1)
    spread = math.sqrt(ours.var() / rows + theirs.var() / rows)
    assert abs(ours.mean() - theirs.mean()) < 5 * spread
    assert ours.var() < theirs.var() / 2


def test_epochs_mask_anew_and_a_resumed_run_masks_the_same():
    train = TrainSequences(corpus(np.arange(1, 42)), 8, 3, masking=DIFFUSION)
    whole = train.chunk(0, 3, 5)
    again = train.chunk(5, 1, 5)
    for a, b in zip(whole, again, strict=True):
        np.testing.assert_array_equal(a[1], b[0])
    assert (whole.tokens[0] != whole.tokens[1]).any()


def test_a_shifted_model_predicts_each_token_from_the_row_before():
    plain, shifted = (
        TrainSequences(corpus(np.arange(1, 42)), 8, 3, masking=DIFFUSION, shifted=s).chunk(0, 9, 5)
        for s in (False, True)
    )
    hidden = shifted.tokens == MASK
    assert not hidden[..., 0].any()  # no row is before the first
    assert (plain.tokens == MASK)[..., 0].any()
    np.testing.assert_array_equal((shifted.weights > 0)[..., :-1], hidden[..., 1:])
    assert not shifted.weights[..., -1].any()
    # Both read the same sequences, whose tokens are the targets of the model that is not shifted.
    np.testing.assert_array_equal(shifted.targets[..., :-1], plain.targets[..., 1:])
    np.testing.assert_allclose(shifted.weights.sum(-1), 7, rtol=1e-6)


def test_a_shifted_model_never_predicts_over_the_border_of_documents():
    stream = [5, 6, EOS, 7, 8, 9, EOS, 10, 11]
    train = TrainSequences(
        corpus(stream), 8, 0, document_mask=True, masking=DIFFUSION, shifted=True
    )
    batch = train.chunk(0, 50, 1)
    for first in (0, 3, 7):  # of a document
        assert (batch.tokens[..., first] != MASK).all()
    np.testing.assert_allclose(batch.weights.sum(-1), 5, rtol=1e-6)


def test_some_training_sequences_are_cut_and_no_held_out_one():
    config = MaskingConfig(kind="diffusion", cut=0.5)
    text = corpus(np.tile(np.arange(1, 33), 30), valid=np.arange(1, 42), masking=config)
    batch = TrainSequences(text, 8, 0, masking=config).chunk(0, 100, 20)
    real = batch.segments == 0
    lengths = real.sum(-1)
    assert (np.sort(~real, -1) == ~real).all()  # what is left comes first
    assert not batch.weights[~real].any()
    np.testing.assert_allclose(batch.weights.sum(-1), lengths, rtol=1e-6)
    share = 0.5 * 7 / 8  # an eighth of the cuts takes nothing
    assert abs((lengths < 8).mean() - share) < 5 * math.sqrt(share * (1 - share) / 2000)
    assert set(lengths.reshape(-1).tolist()) == set(range(1, 9))
    (held_out,) = ValidSequences(text, 8, masking=config).batches(5, 5)
    assert (held_out.segments == 0).all()


def test_draws_are_other_masks_of_the_same_sequences():
    held_out = ValidSequences(corpus(np.arange(1, 42), np.arange(1, 42)), 8, masking=DIFFUSION)
    batches = list(held_out.batches(3, 5, draws=2))
    assert len(batches) == 4
    for first, second in ((0, 2), (1, 3)):
        a, b = batches[first], batches[second]
        np.testing.assert_array_equal(a.targets, b.targets)
        assert (a.tokens != b.tokens).any()
    again = list(held_out.batches(3, 5))
    np.testing.assert_array_equal(again[0].tokens, batches[0].tokens)


PLACES = np.array([[0, 3, 6], [6, 7, 9], [9, 9, 14]])


def examples(masking, **kwargs):
    stream = [5, 6, 7, 8, 9, EOS, 10, 11, EOS, 12, 13, 14, 15, EOS]
    text = corpus(stream, stream, masking=masking, train_examples=PLACES, valid_examples=PLACES)
    return ValidSequences(text, 8, masking=masking, **kwargs)


def test_prompts_are_seen_and_answers_are_predicted():
    (batch,) = examples(None).batches(4, 4)
    np.testing.assert_array_equal(batch.tokens[0], [5, 6, 7, 8, 9, EOS, 0, 0])
    np.testing.assert_array_equal(batch.weights[0], [0, 0, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(batch.targets[0][2:5], [8, 9, EOS])
    np.testing.assert_array_equal(batch.weights[1], [1, 1, 0, 0, 0, 0, 0, 0])
    assert not batch.weights[3].any()  # there are three


def test_under_diffusion_end_of_text_fills_the_canvas_and_is_predicted():
    batches = list(examples(DIFFUSION).batches(3, 3, draws=200))
    weights = np.stack([b.weights for b in batches])
    tokens = np.stack([b.tokens for b in batches])
    ever = (weights > 0).any(0)
    np.testing.assert_array_equal(ever[0], [False] * 3 + [True] * 5)
    np.testing.assert_array_equal(ever[1], [False] + [True] * 7)
    assert ever[2].all()
    np.testing.assert_allclose(weights.sum(-1), np.tile([5, 7, 8], (200, 1)), rtol=1e-6)
    assert (batches[0].targets[0][5:] == EOS).all()
    assert (tokens[:, 0, :3] == [5, 6, 7]).all()


def test_bert_masks_answers_only_and_no_end_of_text():
    batches = examples(MaskingConfig(fraction=0.5)).batches(3, 3, draws=50)
    ever = np.any([b.weights > 0 for b in batches], axis=0)
    np.testing.assert_array_equal(ever[0], [0, 0, 0, 1, 1, 0, 0, 0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "diffusion", "fraction": 0.3}, r"fraction 0\.3 means nothing .* leave it unset"),
        ({"cut": 0.1}, r"cut 0\.1 goes with .* 'diffusion' only"),
        ({"kind": "diffusion", "cut": 1.5}, r"cut 1\.5 must lie in 0\.\.1"),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        MaskingConfig(**fields)
