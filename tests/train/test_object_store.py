# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in an object store: whole or none, the newest kept, damage found, nothing of a run's
local files there, through Orbax, TensorStore and gcsfs as they are."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fsspec.config
import jax
import numpy as np
import pytest
from etils import epath
from object_store import BUCKET, object_store
from tiny_run import QUIET, records, stop_after

from geojax import runs
from geojax.config import CheckpointConfig, ConfigError, RunError
from geojax.launch.processes import fingerprint
from geojax.train import checksums, storage
from geojax.train.checkpoint import Checkpoints, read_params
from geojax.train.storage import checkpoint_folder

COMMIT = "commit_success.txt"


@pytest.fixture(scope="module")
def variables():
    with object_store() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setitem(fsspec.config.conf, "gcs", {"token": variables["FSSPEC_GCS_TOKEN"]})
        yield variables


@pytest.fixture
def url(variables, request) -> str:
    """A folder of the test's own."""
    return f"gs://{BUCKET}/runs/{request.node.name}"


def state(number: int):
    rng = np.random.default_rng(number)
    return {"state": {"params": {"w": rng.standard_normal((300, 4)).astype(np.float32)}}}


def meta(number: int):
    return {"number": number, "layer_order": None}


def opened(url: str, keep: int = 3, **options) -> Checkpoints:
    config = CheckpointConfig(folder=url, keep=keep)
    return Checkpoints(checkpoint_folder(config, Path("unused")), config, **options)


def write(url: str, *numbers: int, keep: int = 3) -> None:
    with opened(url, keep) as saving:
        for number in numbers:
            saving.save(state(number), meta(number))


def read(url: str, **options) -> int:
    """The number of the checkpoint that is found, which must be whole."""
    with opened(url, **options) as loading:
        found, facts = loading.restore(jax.eval_shape(lambda: state(0)))
    wanted = state(facts["number"])
    np.testing.assert_array_equal(found["state"]["params"]["w"], wanted["state"]["params"]["w"])
    return facts["number"]


def names(url: str) -> set[str]:
    return {path.name for path in epath.Path(url).iterdir()}


def flip(path: epath.Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(bytes(content))


def cut(path: epath.Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def test_the_newest_are_kept_and_come_back_bit_for_bit(url):
    write(url, 0, 1, keep=1)
    assert names(f"{url}/checkpoints") == {"1"}
    assert read(url) == 1


def test_damage_is_found_and_set_aside_and_the_one_before_is_used(url, capsys):
    write(url, 0, 1)
    newest = epath.Path(url) / "checkpoints" / "1"
    flip(max((newest / "state" / "d").iterdir(), key=lambda path: path.stat().length))
    assert read(url) == 0
    said = capsys.readouterr().err
    assert f"checkpoint {newest} is damaged (state/d/" in said
    assert "it is now damaged-1, and checkpoint 0 is used" in said
    assert names(url) == {"checkpoints", "damaged-1"}
    assert COMMIT not in names(f"{url}/damaged-1"), "it is no checkpoint wherever it lies"


def test_a_store_that_is_away_is_no_damage(url, monkeypatch):
    write(url, 0, 1)

    def down(folder):
        raise ConnectionError("the network is down")

    monkeypatch.setattr(checksums, "stored", down)
    with pytest.raises(RunError, match=r"cannot be read: the network is down; see to the network"):
        read(url)
    monkeypatch.undo()
    assert names(f"{url}/checkpoints") == {"0", "1"}
    assert names(url) == {"checkpoints"}


@pytest.mark.full
def test_whatever_happens_to_an_object_reading_passes_the_checkpoint_over(url, capsys):
    write(url, 0, 1)
    newest = epath.Path(url) / "checkpoints" / "1"
    data = max((newest / "state" / "d").iterdir(), key=lambda path: path.stat().length)
    whole = data.read_bytes()
    for harm, why in (
        (flip, "is not what was written"),
        (cut, "has"),
        (lambda path: path.unlink(), "is"),
    ):
        harm(data)
        assert read(url, reads_only=True) == 0
        said = capsys.readouterr().err
        assert f"checkpoint {newest} is damaged (state/d/{data.name} {why}" in said
        assert "it is left out, and checkpoint 0 is used in its place" in said
        data.write_bytes(whole)
    assert read(url, reads_only=True) == 1
    assert not capsys.readouterr().err
    cut(data)
    write(url, 2, 3)
    assert read(url) == 3
    assert names(f"{url}/checkpoints") == {"0", "1", "2"}


@pytest.mark.full
def test_setting_aside_that_is_cut_short_leaves_no_checkpoint(url, monkeypatch):
    write(url, 0, 1)
    cut(epath.Path(url) / "checkpoints" / "1" / "state" / "manifest.ocdbt")

    def down(self, target):
        raise ConnectionError("the network is down")

    monkeypatch.setattr(type(epath.Path(url)), "rename", down)
    with pytest.raises(RunError, match=r"1 is damaged .* set aside: the network is down"):
        read(url)
    monkeypatch.undo()
    assert read(url) == 0
    assert names(f"{url}/checkpoints") == {"0"}


_DIES = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from orbax.checkpoint.path import atomicity
from test_object_store import opened, state, meta

with opened(sys.argv[1]) as saving:
    saving.save(state(0), meta(0))
    saving.wait()

    async def finalize(self):
        os.kill(os.getpid(), signal.SIGKILL)

    atomicity.CommitFileTemporaryPath.finalize = finalize
    saving.save(state(1), meta(1))
"""


@pytest.mark.full
def test_a_save_that_was_killed_is_passed_over_and_cleared_away(url, variables):
    command = [sys.executable, "-c", _DIES, url, str(Path(__file__).parent)]
    done = subprocess.run(command, env=os.environ | variables, check=False)
    assert done.returncode == -signal.SIGKILL
    assert "state" in names(f"{url}/checkpoints/1"), "it was on its way"
    assert read(url, reads_only=True) == 0
    assert names(f"{url}/checkpoints") == {"0", "1"}, "a run may be writing it"
    write(url, 2)
    assert read(url) == 2
    assert names(f"{url}/checkpoints") == {"0", "1"}


@pytest.mark.full
def test_of_slices_the_one_that_is_farthest_is_read(url, tmp_path, config):
    checkpoint = CheckpointConfig(folder=url)
    for name, border in (("a", 3), ("b", 2)):
        place = checkpoint_folder(checkpoint, tmp_path / "slices" / name, name)
        assert str(place) == f"{url}/slices/{name}/checkpoints"
        with Checkpoints(place, checkpoint) as saving:
            saving.save({"params": np.full(3, border)}, {"epoch": 1, "border": border})
    runs.save_config(replace(config, checkpoint=checkpoint), tmp_path / "config.json")
    assert read_params(tmp_path)[1]["border"] == 3
    cut(epath.Path(url) / "slices" / "a" / "checkpoints" / "0" / "state" / "manifest.ocdbt")
    assert read_params(tmp_path)[1]["border"] == 2
    assert not (tmp_path / "slices").exists()


def test_a_store_that_cannot_be_used_is_said_before_a_folder_is_made(url, tmp_path, config):
    write(url, 0)
    run = tmp_path / "run"
    for folder, message in (
        (url, "has another run's checkpoints; set it to a folder of this run's own"),
        ("gs://nobody/runs/a", "there is no bucket 'nobody'"),
    ):
        taken = replace(config, checkpoint=CheckpointConfig(folder=folder))
        with pytest.raises(ConfigError, match=message):
            runs.start(taken, run, QUIET)
        assert not run.exists()


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs gcsfs, .* install it with `pip .*geojax\[gcs\]'"):
        checkpoint_folder(CheckpointConfig(folder="gs://bucket/a"), tmp_path)


def test_a_folder_on_another_disk_has_what_the_run_folder_would_have(tmp_path, config):
    elsewhere, run = tmp_path / "disk", tmp_path / "run"
    assert checkpoint_folder(CheckpointConfig(), run) == run / "checkpoints"
    assert checkpoint_folder(CheckpointConfig(), run, "east") == run / "checkpoints"
    checkpoint = CheckpointConfig(folder=str(elsewhere))
    place = checkpoint_folder(checkpoint, run)
    assert place == elsewhere / "checkpoints"
    run.mkdir()
    runs.save_config(replace(config, checkpoint=checkpoint), run / "config.json")
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        read_params(run)
    with Checkpoints(place, checkpoint) as saving:
        saving.save(state(7), meta(7))
    assert read_params(run)[1]["number"] == 7
    with pytest.raises(ConfigError, match="has another run's checkpoints"):
        runs.start(replace(config, checkpoint=checkpoint), tmp_path / "second", QUIET)


def test_slices_may_each_have_a_store_of_their_own(config):
    ours, theirs = (
        replace(config, checkpoint=replace(config.checkpoint, folder=folder))
        for folder in ("gs://eu/a", "gs://us/a")
    )
    assert fingerprint(ours) == fingerprint(theirs) == fingerprint(config)


@pytest.mark.full
@pytest.mark.usefixtures("cache")
def test_a_run_goes_on_from_a_store_as_from_a_disk(url, tmp_path, config):
    assert runs.start(config, tmp_path / "local", QUIET)
    remote = replace(config, checkpoint=replace(config.checkpoint, folder=url))
    run = tmp_path / "remote"
    stop_after(remote, run, rounds=3)
    assert not (run / "checkpoints").exists()
    assert runs.resume(run, QUIET)
    ours, theirs = read_params(run)[0], read_params(tmp_path / "local")[0]
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    for ours, theirs in zip(records(run, "eval"), records(tmp_path / "local", "eval"), strict=True):
        assert ours["loss"] == theirs["loss"]
