# SPDX-License-Identifier: Apache-2.0
"""What a wheel holds, and a run from one, installed where nothing else is."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from geojax.track.metrics import read_records

ROOT = Path(__file__).parents[1]
PLACES = {"geojax": "geojax", "models": "geojax/models", "meshes": "geojax/meshes"} | {
    "configs": "geojax/configs"
}

pytestmark = pytest.mark.runs


def run(*command: object, cwd: Path, **variables: str) -> str:
    """What it prints; a failure shows all of it."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "JAX_PLATFORMS", "XLA_FLAGS")
    kept = {k: v for k, v in os.environ.items() if k not in hidden} | variables
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def uv() -> list[str]:
    """Its command, or pip's where there is no uv."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    return [found, "pip"] if found else [sys.executable, "-m", "pip"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left in the tree, nor taken from what lies there."""
    place = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", *PLACES):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, place / name)
    pip = [sys.executable, "-m", "pip"]
    if shutil.which("pip", path=str(Path(sys.executable).parent)) is None:
        found = uv()[0]
        run(found, "build", "--wheel", "--out-dir", place / "dist", place, cwd=place)
    else:
        run(*pip, "wheel", "--no-deps", "--wheel-dir", place / "dist", place, cwd=place)
    (made,) = (place / "dist").glob("*.whl")
    return made


def test_a_wheel_holds_every_module_and_data_file_of_the_tree_and_no_more(wheel):
    wanted = {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in PLACES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == wanted


def test_quickstart_trains_from_a_wheel_in_an_empty_environment(wheel, tmp_path):
    venv, away = tmp_path / "venv", tmp_path / "away"
    away.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=away)
    python = venv / "bin" / "python"
    command, tool = uv(), []
    if command[-2:] == ["-m", "pip"]:
        tool = ["--python", python]  # before the command, as pip wants it
        run(*command, *tool, "install", "-c", ROOT / "constraints.txt", wheel, cwd=away)
    else:
        limits = ["--constraint", ROOT / "constraints.txt"]
        run(*command, "install", "--python", python, *limits, wheel, cwd=away)
    where = run(python, "-c", "import geojax; print(geojax.__file__)", cwd=away)
    assert str(venv) in where
    geojax = venv / "bin" / "geojax"
    assert "train" in run(geojax, "--help", cwd=away)
    run(geojax, "train", "quickstart", "--train.total-tokens", 20_000, cwd=away)
    records = read_records(away / "runs" / "quickstart" / "metrics.jsonl")
    assert records[-1]["kind"] == "end"
    assert records[-1]["tokens"] >= 20_000
