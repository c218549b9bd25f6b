# SPDX-License-Identifier: Apache-2.0
"""scripts/setup, which both commands of README call first."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).parent.parent / "scripts" / "setup"
PROJECT = """
[project]
name = "made-up"
version = "1"

[project.optional-dependencies]
none = []

[tool.setuptools]
py-modules = []
"""


@pytest.mark.runs
def test_an_environment_can_be_made_anew_from_within(tmp_path):
    # As `make test` does after an update, where the environment is activated.
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "constraints.txt").touch()
    shutil.copy(SETUP, tmp_path / "setup")

    def make(path):
        env = os.environ | {"PATH": path}
        command = ["sh", "setup", ".venv", "none"]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    done = make(os.environ["PATH"])
    assert done.returncode == 0, done.stderr
    ready = tmp_path / ".venv" / ".ready"
    ready.unlink()
    done = make(f"{tmp_path / '.venv' / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert ready.exists()


def test_a_machine_without_python_is_told_what_to_install(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "cat"):
        (tools / name).symlink_to(shutil.which(name))
    env = {"PATH": str(tools), "HOME": str(tmp_path)}
    command = ["sh", SETUP, tmp_path / ".venv", "test"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "geojax needs Python 3.12 or newer, and none was found" in done.stderr
    assert "apt-get install" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.xdist_group("of its own")
def test_tests_of_a_group_share_a_worker(request):
    """And so what they compiled: some versions of pytest and xdist drop groups without a word."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("all tests are in one process")
    assert request.node.nodeid.endswith("@of its own")
