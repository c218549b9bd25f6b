# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from geojax.choice import tasks
from geojax.choice.items import digest, pick
from geojax.choice.tasks import BIGBENCH, EVALS, TASKS, known, load_items
from geojax.config import ConfigError
from geojax.data import cache_dir

SOCIAL = "Kai fell off a horse. How would Kai feel? A: sore; B: proud: very; C: at home."
LOGIQA = (
    "\nPassage: All swans swim.\nSome birds are swans.Question: Which follows?\n"
    "A. A.Some birds swim.\nB. B.No bird swims.\nC. C.All swim.\nD. D.None.\nAnswer:"
)
DIGESTS = {
    "socialiqa": "281537880e11ccf1",
    "logiqa": "3aa9ed72b0687148",
    "wikihow_goal": "fea296021fa895ae",
    "wikihow_step": "d021b27c5da55de4",
    "winowhy": "69642fa296aaf386",
    "disambiguation_qa": "1d703bd3c6fb4203",
    "strategyqa": "92347dee0f69a29d",
    "truthful_qa": "43cbcde0472e8118",
    "timedial": "6459d86f440b59c1",
    "logical_deduction": "142d8b1f582d5adf",
}
"""Of the 250 items of each that are asked; others would make figures that do not compare."""


def lines(*rows):
    return "".join(
        json.dumps({"input": [{"role": "user", "content": text}], "ideal": ideal}) + "\n"
        for text, ideal in rows
    )


def put(cache, name, text):
    """The file of a task, as if it had been fetched."""
    task = TASKS[name]
    path = cache / "packages" / task.package.replace("==", "-") / task.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_dialogues_become_questions_with_answers_as_text(tmp_path):
    put(tmp_path, "socialiqa", lines((SOCIAL, "B")))
    put(tmp_path, "logiqa", lines((LOGIQA, "A")))
    (item,) = load_items("socialiqa", tmp_path)
    assert item.context == "Q: Kai fell off a horse. How would Kai feel?\nA:"
    assert item.choices == ("sore", "proud: very", "at home")
    assert item.gold == 1
    (item,) = load_items("logiqa", tmp_path)
    assert item.context == (
        "Passage: All swans swim.\nSome birds are swans.\nQuestion: Which follows?\nAnswer:"
    )
    assert item.choices == ("Some birds swim.", "No bird swims.", "All swim.", "None.")
    assert item.gold == 0


def test_a_bigbench_task_has_its_own_prompt_and_one_right_choice(tmp_path):
    examples = [
        {"input": "I left it ", "target_scores": {"here ": 0, "there": 1}},
        {"input": "Both", "target_scores": {"a": 1, "b": 1}},
        {"input": "Neither", "target_scores": {"a": 0, "b": 0}},
        {"input": "Twice", "target_scores": {"a": 0, "a ": 1}},
    ]
    put(tmp_path, "winowhy", json.dumps({"examples": examples}))
    (item,) = load_items("winowhy", tmp_path)
    assert (item.context, item.choices, item.gold) == ("Q: I left it\nA:", ("here", "there"), 1)
    own = {"task_prefix": "Say so.\n", "example_input_prefix": "\n", "example_output_prefix": " - "}
    put(tmp_path, "winowhy", json.dumps({"examples": examples, **own}))
    assert load_items("winowhy", tmp_path)[0].context == "Say so.\n\nI left it -"


def test_a_package_is_fetched_once_and_only_its_files_are_kept(tmp_path, monkeypatch):
    fetched = []

    def install(package, target, what, instead=""):
        fetched.append(package)
        for task in TASKS.values():
            if task.package == package:
                (target / task.file).parent.mkdir(parents=True, exist_ok=True)
                (target / task.file).write_text(lines((LOGIQA, "A")))
        (target / "large.bin").write_text("of no use")

    monkeypatch.setattr(tasks, "install", install)
    said = []
    for _ in range(2):
        assert len(load_items("logiqa", tmp_path, said.append)) == 1
    assert fetched == [EVALS]
    assert len(said) == 1
    kept = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert kept == ["logiqa.jsonl", "test.jsonl"]


def test_what_cannot_be_fetched_or_read_is_said(tmp_path, monkeypatch):
    def install(package, target, what, instead=""):
        raise ConfigError(f"{what} is in package {package}, and there is no network{instead}")

    monkeypatch.setattr(tasks, "install", install)
    with pytest.raises(ConfigError, match=rf"task 'winowhy' is in package {BIGBENCH}"):
        load_items("winowhy", tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    for text in ("{", "{}", "[]", '{"examples": [{"input": "x"}]}'):
        put(tmp_path, "winowhy", text)
        with pytest.raises(ConfigError, match="is not a file of task 'winowhy'"):
            load_items("winowhy", tmp_path)
    put(tmp_path, "socialiqa", lines(("Who? A: I; B: you.", "A")))
    with pytest.raises(ConfigError, match="does not list the answers as it did"):
        load_items("socialiqa", tmp_path)


def test_an_unknown_task_has_a_near_one():
    with pytest.raises(ConfigError, match="no task named 'winowy'; did you mean 'winowhy'"):
        known("winowy")
    with pytest.raises(ConfigError, match="known: all, socialiqa, logiqa"):
        known("xyz")


def test_no_task_is_a_source_of_training_text():
    """BIG-bench asks for it: no part of what makes training text knows these packages."""
    folder = Path(tasks.__file__).parents[1]
    for path in [*(folder / "data").glob("*.py"), *(folder / "train").glob("*.py")]:
        assert "bigbench" not in path.read_text("utf-8").lower()


@pytest.mark.full
@pytest.mark.parametrize("name", TASKS)
def test_a_real_task_has_items_enough(name):
    items = load_items(name, cache_dir())
    picked = pick(items, 250)
    assert len(picked) == 250
    assert {item.gold for item in picked} != {0} or name == "truthful_qa"
    for item in picked:
        assert "target_scores" not in item.context
        assert 0 <= item.gold < len(item.choices)
    assert digest(picked) == DIGESTS[name]
