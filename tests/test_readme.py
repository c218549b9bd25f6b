# SPDX-License-Identifier: Apache-2.0
"""Every geojax command in README works as it stands, in the order in which it stands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from geojax.cli import main

README = Path(__file__).parent.parent / "README.md"
PROGRAM = ".venv/bin/geojax"


def readme_commands() -> list[list[str]]:
    lines = re.findall(rf"^    {re.escape(PROGRAM)} (.*)$", README.read_text(), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.runs
def test_every_command_in_readme_works(tmp_path, monkeypatch, capsys):
    text = "\n\n".join(topics[key] for key in sorted(topics))
    (tmp_path / "mytext.txt").write_text(text, encoding="utf-8")
    config = re.search(r"```python\n# myrun\.py\n(.*?)```", README.read_text(), re.DOTALL)
    assert config
    (tmp_path / "myrun.py").write_text(config[1], encoding="utf-8")
    commands = readme_commands()
    assert {command[0] for command in commands} == {
        "train",
        "report",
        "data",
        "plan",
        "convert",
        "eval",
        "generate",
        "profile",
    }
    monkeypatch.chdir(tmp_path)
    for command in commands:
        if command[0] != "train":  # what starts no run needs no process of its own
            code = main(command)
            output = capsys.readouterr()
            assert code == 0, f"geojax {shlex.join(command)}: {output.err}{output.out}"
            continue
        done = subprocess.run(
            [sys.executable, "-m", "geojax", *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"geojax {shlex.join(command)}: {done.stderr}{done.stdout}"
    assert (tmp_path / "figures.json").exists()
    assert (tmp_path / "pictures" / "gantt.png").exists()
    assert (tmp_path / "runs" / "myrun" / "metrics.jsonl").exists()
    assert (tmp_path / "weights" / "model.safetensors").exists()
    assert (tmp_path / "depths.png").exists()


def test_make_targets_in_readme_exist():
    makefile = README.with_name("Makefile").read_text()
    targets = set(
        re.findall(r"`make ([\w-]+)`|^    make ([\w-]+)", README.read_text(), re.MULTILINE)
    )
    names = {name for pair in targets for name in pair if name}
    assert {"demo", "test"} <= names
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in names)
