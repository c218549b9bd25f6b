# SPDX-License-Identifier: Apache-2.0
import json
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from geojax.config import ConfigError, DataConfig, MaskingConfig, SourceConfig, TokenizerConfig
from geojax.data import corpus as corpus_module
from geojax.data import describe, iter_documents, prepare
from geojax.data.corpus import cache_dir

PYDOC = DataConfig(source=SourceConfig(kind="pydoc"), seq_len=32, valid_fraction=0.1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def pydoc(cache):
    return prepare(PYDOC, 512, cache)


def jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return replace(PYDOC, source=SourceConfig(kind="files", paths=(str(path),)))


def documents(corpus, stream):
    """Texts of a stream, cut at end-of-text."""
    ends = np.flatnonzero(stream == corpus.eos_id)
    tokenizer = corpus.tokenizer()
    starts = [0, *(ends[:-1] + 1)]
    return [tokenizer.decode(stream[a:b]) for a, b in zip(starts, ends, strict=True)]


def test_streams_hold_every_document_once(pydoc, cache):
    train, valid = documents(pydoc, pydoc.train), documents(pydoc, pydoc.valid)
    texts = [document.text for document in iter_documents(PYDOC.source, cache)]
    assert sorted(train + valid) == sorted(texts)
    assert (len(train), len(valid)) == (pydoc.train_documents, pydoc.valid_documents)
    assert pydoc.text_bytes == sum(len(text.encode()) for text in texts)
    assert pydoc.train.dtype == np.uint16
    assert pydoc.train.max() < pydoc.vocab_size


def test_split_follows_the_text_alone(tmp_path):
    texts = [f"document number {i} " * 5 for i in range(200)]
    first = prepare(jsonl(tmp_path / "a.jsonl", texts), 512, tmp_path)
    again = prepare(
        replace(jsonl(tmp_path / "b.jsonl", [*reversed(texts), texts[0]]), seed=5), 512, tmp_path
    )
    held_out = set(documents(first, first.valid))
    assert set(documents(again, again.valid)) == held_out
    assert not held_out & set(documents(again, again.train))
    assert 5 <= len(held_out) <= 40  # binomial(200, 0.1): mean 20, 4.2 a standard deviation


def test_second_prepare_reads_the_cache(pydoc, cache, monkeypatch):
    monkeypatch.setattr(corpus_module, "_write", None)
    monkeypatch.setattr(corpus_module, "load_tokenizer", None)
    again = prepare(replace(PYDOC, seq_len=8), 1024, cache)
    assert again.folder == pydoc.folder
    np.testing.assert_array_equal(again.train, pydoc.train)


def test_a_changed_file_setting_or_tokenizer_is_another_corpus(tmp_path):
    texts = [f"document {i}" * 9 for i in range(60)]
    base = jsonl(tmp_path / "a.jsonl", texts)
    folders = [prepare(base, 512, tmp_path).folder]
    folders.append(prepare(replace(base, valid_fraction=0.2), 512, tmp_path).folder)
    small = replace(base, tokenizer=TokenizerConfig(vocab_size=260))
    folders.append(prepare(small, 512, tmp_path).folder)
    jsonl(tmp_path / "a.jsonl", [*texts[:-1], "document x" * 9])
    folders.append(prepare(base, 512, tmp_path).folder)
    assert len(set(folders)) == 4


def test_tokenizer_sees_the_training_split_only(tmp_path, monkeypatch):
    seen = []

    def load(config, documents, cache):
        seen.extend(documents())
        return original(config, documents, cache)

    original = corpus_module.load_tokenizer
    monkeypatch.setattr(corpus_module, "load_tokenizer", load)
    corpus = prepare(PYDOC, 512, tmp_path)
    assert seen == documents(corpus, corpus.train)


def test_two_at_once_both_succeed(tmp_path):
    base = jsonl(tmp_path / "a.jsonl", [f"document {i}" * 9 for i in range(60)])
    meet = threading.Barrier(2, timeout=20)
    reached, corpora = set(), []

    def run(name):
        def progress(line):
            if "tokenising" in line and name not in reached:  # both write, neither has renamed
                reached.add(name)
                meet.wait()

        corpora.append(prepare(base, 512, tmp_path / "cache", progress))

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(corpora) == 2
    np.testing.assert_array_equal(corpora[0].train, corpora[1].train)
    assert list((tmp_path / "cache" / "corpora").iterdir()) == [corpora[0].folder]


def test_killed_prepare_is_not_used(tmp_path, monkeypatch):
    def stop(line):
        if "tokenising" in line:
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", id)  # a killed process does not tidy up
    with pytest.raises(KeyboardInterrupt):
        prepare(PYDOC, 512, tmp_path, stop)
    (left,) = (tmp_path / "corpora").iterdir()
    assert left.name.startswith(".")
    corpus = prepare(PYDOC, 512, tmp_path)
    assert len(documents(corpus, corpus.train)) == corpus.train_documents


def test_damaged_corpus_is_refused(tmp_path):
    base = jsonl(tmp_path / "a.jsonl", [f"document {i}" * 9 for i in range(60)])
    folder = prepare(base, 512, tmp_path).folder
    (folder / "train.bin").write_bytes(b"12")
    with pytest.raises(ConfigError, match=r"is damaged .*; delete the folder and run again"):
        prepare(base, 512, tmp_path)


def test_text_too_small_is_refused_with_a_fraction_that_works(tmp_path):
    texts = [f"document {i}" * 9 for i in range(8)]
    base = replace(jsonl(tmp_path / "a.jsonl", texts), valid_fraction=1e-6)
    with pytest.raises(ConfigError, match="holds out 0 of 8 documents; use 0") as caught:
        prepare(base, 512, tmp_path)
    fraction = float(str(caught.value).split("use ")[1].split(",")[0])
    corpus = prepare(replace(base, valid_fraction=fraction), 512, tmp_path)
    assert corpus.valid_documents >= 1
    with pytest.raises(ConfigError, match="holds out 8 of 8"):
        prepare(replace(base, valid_fraction=1 - 1e-9), 512, tmp_path)


def test_one_document_is_refused(tmp_path):
    base = jsonl(tmp_path / "a.jsonl", ["the same"] * 5)
    with pytest.raises(ConfigError, match="holds one document"):
        prepare(base, 512, tmp_path)


def test_no_document_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "iter_documents", lambda source, cache: iter(()))
    with pytest.raises(ConfigError, match="holds no documents"):
        prepare(PYDOC, 512, tmp_path)


def test_text_shorter_than_a_sequence_or_a_batch_is_refused(pydoc, cache):
    with pytest.raises(ConfigError, match=r"fewer than one sequence of data.seq_len 10000000"):
        prepare(replace(PYDOC, seq_len=10_000_000), 512, cache)
    longest = prepare(replace(PYDOC, seq_len=len(pydoc.train) - 1), 512, cache)
    longest.require_batch(1)
    with pytest.raises(ConfigError, match=r"holds 1 training sequences .* one batch of 2"):
        longest.require_batch(2)


@pytest.mark.parametrize("cached", [True, False])
def test_model_smaller_than_the_tokenizer_is_refused(pydoc, cache, tmp_path, cached):
    with pytest.raises(ConfigError, match=r"ids up to 511, beyond model.vocab_size 500"):
        prepare(PYDOC, 500, cache if cached else tmp_path)


@pytest.mark.parametrize("cached", [True, False])
def test_model_without_room_for_the_mask_token_is_refused(pydoc, cache, tmp_path, cached):
    masked, cache = replace(PYDOC, masking=MaskingConfig()), cache if cached else tmp_path
    with pytest.raises(
        ConfigError,
        match=r"ids up to 511 and no mask token, which takes id 512, beyond model.vocab_size 512; "
        r"set model.vocab_size to at least 513",
    ):
        prepare(masked, 512, cache)
    assert prepare(masked, 513, cache).mask_id == 512


def test_a_mask_token_of_the_tokenizer_needs_no_room(pydoc, tmp_path):
    inner = pydoc.tokenizer().inner
    inner.add_special_tokens(["[MASK]"])
    inner.save(str(tmp_path / "tokenizer.json"))
    file = TokenizerConfig(kind="file", path=str(tmp_path / "tokenizer.json"))
    masked = replace(PYDOC, tokenizer=file, masking=MaskingConfig())
    corpus = prepare(masked, 513, tmp_path)
    assert (corpus.mask_id, corpus.vocab_size) == (512, 513)
    assert not corpus.ordinary[512]


def test_masking_shares_the_corpus_made_without(pydoc, cache, monkeypatch):
    before = {path: path.read_bytes() for path in pydoc.folder.iterdir()}
    monkeypatch.setattr(corpus_module, "_write", None)
    masked = prepare(replace(PYDOC, masking=MaskingConfig()), 513, cache)
    assert masked.folder == pydoc.folder
    assert {path: path.read_bytes() for path in masked.folder.iterdir()} == before


def test_vocabulary_beyond_16_bits_takes_32(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(70_000)} | {"<|endoftext|>": 70_000}
    inner = Tokenizer(models.WordLevel(words))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    base = jsonl(tmp_path / "a.jsonl", [" ".join(["w69999"] * 9 + [f"w{i}"]) for i in range(60)])
    file = TokenizerConfig(kind="file", path=str(tmp_path / "tokenizer.json"))
    corpus = prepare(replace(base, tokenizer=file), 80_000, tmp_path)
    assert corpus.train.dtype == np.uint32
    assert corpus.train.max() == corpus.eos_id == 70_000
    assert np.sum(corpus.train == 69_999) == 9 * corpus.train_documents


def test_cache_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set GEOJAX_CACHE"):
        prepare(PYDOC, 512, tmp_path / "file")


def test_cache_dir_follows_the_environment(monkeypatch):
    monkeypatch.setenv("GEOJAX_CACHE", "/somewhere")
    assert str(cache_dir()) == "/somewhere"
    monkeypatch.delenv("GEOJAX_CACHE")
    assert cache_dir().parts[-2:] == (".cache", "geojax")


def test_description_names_what_was_made(pydoc):
    rows = dict(describe(pydoc))
    assert rows["sequences"].startswith(f"{pydoc.sequences:,} ")
    assert rows["folder"] == str(pydoc.folder)
    assert rows["stored as"] == "uint16"
    assert "masking" not in rows


def test_description_says_what_is_masked(cache):
    masking = MaskingConfig(fraction=0.125, keep=0.1, randomize=0.2)
    rows = dict(describe(prepare(replace(PYDOC, masking=masking), 513, cache)))
    assert rows["masking"] == (
        "12.5% of a sequence predicted, of it 70% token 512, 20% random, 10% unchanged"
    )


def test_import_is_light():
    code = "import sys, geojax.data; print({'jax', 'grain', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
