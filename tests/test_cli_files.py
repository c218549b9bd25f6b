# SPDX-License-Identifier: Apache-2.0
"""Files that commands write last are looked at first: no work for a place that takes none."""

import pytest

from geojax.cli import main
from geojax.config import ConfigError
from geojax.score import EvalOptions
from geojax.track.metrics import require_writable

COMMANDS = [
    "demo --json",
    "bench geomesh --json",
    "bench cona --json",
    "bench bicache MODEL --json",
    "bench guard MODEL --json",
    "bench throughput --json",
    "bench serve http://127.0.0.1:9 --json",
    "bench paper --page",
    "eval MODEL --json",
    "plan llama-tiny --json",
    "plan llama-tiny --chain-file",
    "plan quickstart --cluster c.toml --json",
    "profile depth MODEL --out",
    "profile strategies quickstart --out",
    "report RUN --html",
    "report RUN --json",
    "simulate quickstart --json",
    "simulate tables --json",
]


FOLDERS = [
    "demo",
    "bench geomesh",
    "bench cona",
    "bench tune geomesh",
    "bench bicache MODEL",
    "bench guard MODEL",
    "bench throughput",
    "bench paper",
    "plan llama-tiny",
    "plan quickstart --cluster c.toml",
    "report RUN",
    "simulate quickstart",
]


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_that_cannot_be_made_is_said_at_once(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").touch()
    assert main([*command.split(), "--out", "plain/x"]) == 2
    assert "--out plain/x cannot be written" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_cannot_be_written_is_said_at_once(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").touch()
    *args, option = command.split()
    assert main([*args, option, "plain/x.json"]) == 2
    assert f"{option} plain/x.json cannot be written" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_missing_folder_is_made_and_what_is_there_stays(tmp_path):
    path = tmp_path / "new" / "er" / "x.json"
    require_writable(EvalOptions(tmp_path, json=path))
    assert [*path.parent.iterdir()] == []
    path.write_text("old")
    require_writable(EvalOptions(tmp_path, json=path))
    assert path.read_text() == "old"
    with pytest.raises(ConfigError, match=f"--json {path.parent} is a folder"):
        require_writable(EvalOptions(tmp_path, json=path.parent))
