# SPDX-License-Identifier: Apache-2.0
"""Prompts with answers, from files to sequences."""

import json
from dataclasses import replace

import numpy as np
import pytest

from geojax.config import ConfigError, DataConfig, MaskingConfig, SourceConfig, TokenizerConfig
from geojax.data import TrainSequences, prepare


def write(path, pairs):
    lines = (json.dumps({"ask": p, "say": a, "other": 1}) for p, a in pairs)
    path.write_text("\n".join(lines) + "\n")
    return DataConfig(
        source=SourceConfig(kind="files", paths=(str(path),), text_field="say", prompt_field="ask"),
        tokenizer=TokenizerConfig(vocab_size=257),
        seq_len=64,
        valid_fraction=0.2,
        masking=MaskingConfig(kind="diffusion"),
    )


PAIRS = [(f"question {i}?", f"answer {i * i}.") for i in range(60)]


def texts(corpus, split):
    tokenizer, sequences = corpus.tokenizer(), corpus.split(split, 64)
    windows = sequences.read(range(sequences.sequences))
    for tokens, real, scored in zip(*windows, strict=True):
        prompt = tokenizer.decode(tokens[real & ~scored])
        yield prompt, tokenizer.decode(tokens[scored])


def test_every_example_is_a_sequence_of_its_own_split_by_its_prompt(tmp_path):
    twice = [*PAIRS, *((p, a + " really") for p, a in PAIRS)]
    corpus = prepare(write(tmp_path / "a.jsonl", twice), 300, tmp_path / "cache")
    train, valid = list(texts(corpus, "train")), list(texts(corpus, "valid"))
    assert sorted(train + valid) == sorted(twice)
    assert not {p for p, _ in train} & {p for p, _ in valid}
    assert len(valid) >= 4


def test_an_example_that_does_not_fit_is_refused_and_named(tmp_path):
    data = write(tmp_path / "a.jsonl", [*PAIRS, ("long", "a" * 80)])
    with pytest.raises(ConfigError, match=r"has 85 tokens .* \(1 of \d+ have\); set data.seq_len"):
        prepare(data, 300, tmp_path / "cache")
    assert prepare(replace(data, seq_len=85), 300, tmp_path / "cache").sequences > 40


def test_training_sequences_hide_answers_only(tmp_path):
    corpus = prepare(write(tmp_path / "a.jsonl", PAIRS), 300, tmp_path / "cache")
    batch = TrainSequences(corpus, 64, 0, masking=corpus.masking).chunk(0, 20, 4)
    tokenizer = corpus.tokenizer()
    for tokens in batch.tokens.reshape(-1, 64):
        assert tokenizer.decode(tokens[tokens < 257]).startswith("question ")
    assert (batch.tokens == corpus.mask_id).sum() == (batch.weights > 0).sum()
    assert np.isfinite(batch.weights).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_field": "no"}, r"no field 'no'; set data\.source\.prompt_field to one of"),
        ({"prompt_field": "other"}, r"has a int in field 'other'; set data\.source\.prompt_field"),
    ],
)
def test_a_prompt_that_is_not_there_is_refused(tmp_path, change, message):
    data = write(tmp_path / "a.jsonl", PAIRS)
    data = replace(data, source=replace(data.source, **change))
    with pytest.raises(ConfigError, match=message):
        prepare(data, 300, tmp_path / "cache")


def test_text_files_have_no_prompts(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    data = write(tmp_path / "a.jsonl", PAIRS)
    source = replace(data.source, paths=(str(tmp_path / "a.txt"),))
    with pytest.raises(ConfigError, match=r"has no fields.*; give \.jsonl files"):
        prepare(replace(data, source=source), 300, tmp_path / "cache")


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="means nothing to kind 'wiki'"):
        SourceConfig(prompt_field="ask")
    with pytest.raises(ConfigError, match="are both 'text'"):
        SourceConfig(kind="files", paths=("a",), prompt_field="text")
