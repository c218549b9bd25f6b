# SPDX-License-Identifier: Apache-2.0
"""Every geojax command in README works as it stands, in the order in which it stands."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from geojax.cli import main
from geojax.meshes.aot import AotUnavailableError
from geojax.plan import command as plan_command

README = Path(__file__).parent.parent / "README.md"
PROGRAM = ".venv/bin/geojax"


def readme_commands() -> list[list[str]]:
    lines = re.findall(rf"^    {re.escape(PROGRAM)} (.*)$", README.read_text(), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def shown_output() -> dict[str, list[str]]:
    """What README shows right after a command, but for its dots, by command."""
    found: dict[str, list[str]] = {}
    lines = None
    for line in README.read_text().splitlines():
        if line.startswith(f"    {PROGRAM} "):
            lines = found.setdefault(line.strip(), [])
        elif line and not line.startswith("    "):
            lines = None
        elif lines is not None and line.strip() not in ("", "..."):
            lines.append(line)
    return {command.removeprefix(PROGRAM).strip(): shown for command, shown in found.items()}


def plain(text: str) -> str:
    return " ".join(text.split())


PLANS = [c for c, shown in shown_output().items() if shown and c.startswith("plan")]


def test_readme_shows_three_plans():
    assert len(PLANS) == 3


@pytest.mark.parametrize("command", PLANS)
def test_readme_shows_what_plans_say(command, tmp_path, monkeypatch, capsys):
    def none(*_):
        raise AotUnavailableError("not here")  # as where README was written

    monkeypatch.setattr(plan_command, "exact_bytes", none)
    monkeypatch.setenv("COLUMNS", "80")
    shutil.copytree(README.parent / "docs" / "examples", tmp_path / "docs" / "examples")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    said = [plain(line) for line in capsys.readouterr().out.splitlines()]
    for line in shown_output()[command]:
        assert plain(line) in said


@pytest.mark.runs
def test_every_command_in_readme_works(tmp_path, monkeypatch, capsys):
    text = "\n\n".join(topics[key] for key in sorted(topics))
    (tmp_path / "mytext.txt").write_text(text, encoding="utf-8")
    config = re.search(r"```python\n# myrun\.py\n(.*?)```", README.read_text(), re.DOTALL)
    assert config
    (tmp_path / "myrun.py").write_text(config[1], encoding="utf-8")
    shutil.copytree(README.parent / "docs" / "examples", tmp_path / "docs" / "examples")
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
        "launch",
        "simulate",
        "serve",
    }
    monkeypatch.chdir(tmp_path)
    for command in commands:
        if command[0] == "serve":
            ask_as_readme_does(command, tmp_path)
            continue
        if command[0] not in ("train", "launch"):  # what starts no run needs no process of its own
            code = main(command)
            output = capsys.readouterr()
            assert code == 0, f"geojax {shlex.join(command)}: {output.err}{output.out}"
            continue
        done = subprocess.run(
            [sys.executable, "-m", "geojax", *command],
            env=os.environ | {"XLA_FLAGS": ""},  # as a user's: one device, optimised
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"geojax {shlex.join(command)}: {done.stderr}{done.stdout}"
    assert (tmp_path / "figures.json").exists()
    assert (tmp_path / "report.html").read_text().endswith("</html>\n")
    assert (tmp_path / "pictures" / "gantt.png").exists()
    assert (tmp_path / "runs" / "myrun" / "metrics.jsonl").exists()
    assert (tmp_path / "weights" / "model.safetensors").exists()
    assert (tmp_path / "depths.png").exists()
    assert (tmp_path / "runs" / "apart" / "metrics.jsonl").exists()


def ask_as_readme_does(command, folder):
    """Start the server, run what README says to ask it, on a port that is free, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    text = README.read_text()
    (curl,) = re.findall(r"^    (curl .*)$", text, re.MULTILINE)
    client = re.search(r"```python\n(from openai.*?)```", text, re.DOTALL)
    assert client
    with subprocess.Popen(
        [sys.executable, "-m", "geojax", *command, "--port", port],
        cwd=folder,
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            wait_until_ready(f"http://127.0.0.1:{port}/ready")
            asked = subprocess.run(
                shlex.split(curl.replace(":8000", f":{port}")), capture_output=True, check=True
            )
            assert json.loads(asked.stdout)["usage"]["completion_tokens"] > 0
            program = client[1].replace(":8000", f":{port}")
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()
            server.send_signal(signal.SIGTERM)
            output, _ = server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == 0, output


def wait_until_ready(url, seconds=120):
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert time.monotonic() < end, "the server never became ready"
            time.sleep(0.5)


def test_make_targets_in_readme_exist():
    makefile = README.with_name("Makefile").read_text()
    targets = set(
        re.findall(r"`make ([\w-]+)`|^    make ([\w-]+)", README.read_text(), re.MULTILINE)
    )
    names = {name for pair in targets for name in pair if name}
    assert {"demo", "test"} <= names
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in names)
