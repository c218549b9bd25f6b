# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of folders without a tokenizer.json, as Dream is published."""

import json

import pytest
from checkpoints import make
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from geojax.config import ConfigError
from geojax.convert import convert
from geojax.diffusion.load import find_tokenizer
from geojax.models.weights.bpe_files import read_bpe

TEXTS = [
    "It's 2026, and WE'LL have 1234 words in 3 lines.\n\n  Cafe\u0301 au lait?!  ",
    "def f(x):\n\treturn x  # 4.5e10\r\n",
    "<|mask|><|endoftext|> tail <think>",
    "日本語 και ελληνικά",
]
ADDED = {
    "900": {"content": "<|endoftext|>", "special": True},
    "904": {"content": "<|mask|>", "special": True, "lstrip": True},
    "905": {"content": "<think>", "special": False},
}


@pytest.fixture
def folder(tmp_path):
    """vocab.json and merges.txt of a BPE of 600 entries; ids of added tokens have gaps."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([*TEXTS, "234 1234 word words return 'll café"] * 9, trainer)
    inner.model.save(str(tmp_path))
    named = {"tokenizer_class": "DreamTokenizer", "added_tokens_decoder": ADDED}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    return tmp_path


def ids(inner, text):
    return inner.encode(text, add_special_tokens=False).ids


def test_ids_are_those_of_the_files(folder):
    inner = read_bpe(folder)
    vocabulary = json.loads((folder / "vocab.json").read_text())
    added = {entry["content"]: int(number) for number, entry in ADDED.items()}
    assert inner.get_vocab(with_added_tokens=True) == vocabulary | added
    assert ids(inner, "<|mask|><think>") == [904, 905]
    for text in TEXTS:
        plain = inner.decode(ids(inner, text), skip_special_tokens=False)
        # Blanks before the mask are its own, and letters come composed.
        assert plain == text.replace("e\u0301", "é")


def test_text_is_cut_as_the_class_cuts_it(folder):
    """Numbers are single digits, a sign stands with the word behind it, letters are composed."""
    inner = read_bpe(folder)
    tokens = inner.encode("see 1234", add_special_tokens=False).tokens
    assert tokens[-4:] == ["1", "2", "3", "4"]
    assert ids(inner, "cafe\u0301") == ids(inner, "café")
    cuts = [text for text, _ in inner.pre_tokenizer.pre_tokenize_str("(It's 12\n\n  x)")]
    assert cuts == ["(It", "'s", "Ġ", "1", "2", "ĊĊ", "Ġ", "Ġx", ")"]
    named = json.loads((folder / "tokenizer_config.json").read_text())
    named["tokenizer_class"] = "GPT2Tokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    plain = read_bpe(folder)
    assert "1234" in plain.encode("see x1234", add_special_tokens=False).tokens
    assert ids(plain, "cafe\u0301") != ids(plain, "café")


def test_a_converted_folder_has_a_tokenizer_json_with_the_same_ids(folder, tmp_path):
    source, _ = make(tmp_path / "source", "dream")
    hf = json.loads((source / "config.json").read_text())
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (source / name).write_text((folder / name).read_text())
    (source / "tokenizer.json").unlink(missing_ok=True)
    assert hf["model_type"] == "Dream"
    assert convert(source, tmp_path / "target").tokenizer
    made, before = find_tokenizer(tmp_path / "target"), find_tokenizer(source)
    assert made.eos_id == before.eos_id == 900
    for text in TEXTS:
        assert made.encode_batch([text])[0].tolist() == before.encode_batch([text])[0].tolist()
        assert 904 not in made.encode_batch([text])[0]  # a text's mask is text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", "{", r"vocab\.json cannot be used"),
        ("vocab.json", '["a"]', "not an object of ids"),
        ("vocab.json", '{"a": "b"}', "not an object of ids"),
        ("vocab.json", '{"a": 900}', "have one id"),
        ("vocab.json", '{"<think>": 7}', "is 7 in vocab.json and 905"),
        ("merges.txt", "a b c", r"merges\.txt:1 'a b c' is not two tokens"),
        ("merges.txt", "zz qq", "its tokenizer cannot be made"),
    ],
)
def test_damaged_files_are_refused(folder, name, content, message):
    (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_bpe(folder)


def test_an_unknown_class_or_a_missing_file_gives_none(folder):
    (folder / "merges.txt").rename(folder / "m")
    assert find_tokenizer(folder) is None
    (folder / "m").rename(folder / "merges.txt")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "OtherTokenizer"}')
    assert find_tokenizer(folder) is None
