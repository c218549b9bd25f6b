# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a disk: what was saved stays, what was damaged is found, named and passed
over, and a run ends in one line that says what to do."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from geojax.config import CheckpointConfig, RunError
from geojax.train import checkpoint
from geojax.train.checkpoint import Checkpoints, read_params

as_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounts file systems of its own"
)


def state(number: int, size: int = 300):
    rng = np.random.default_rng(number)
    return {"state": {"params": {"w": rng.standard_normal((size, 4)).astype(np.float32)}}}


def write(folder: Path, *numbers: int, keep: int = 3) -> None:
    with Checkpoints(folder, CheckpointConfig(keep=keep)) as saving:
        for number in numbers:
            saving.save(state(number), {"number": number, "layer_order": None})


def read(folder: Path, **options) -> int:
    """The number of the checkpoint that is found, which must be whole."""
    with Checkpoints(folder, CheckpointConfig(), **options) as loading:
        found, meta = loading.restore(jax.eval_shape(lambda: state(0)))
    wanted = state(meta["number"])
    np.testing.assert_array_equal(found["state"]["params"]["w"], wanted["state"]["params"]["w"])
    return meta["number"]


def flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "checkpoints"
    write(folder, 0, 1)
    return folder


def test_any_file_of_the_newest_that_changed_is_found_and_the_one_before_is_used(
    written, tmp_path, capsys
):
    names = [p.relative_to(written) for p in sorted((written / "1").rglob("*")) if p.is_file()]
    assert len(names) > 8
    for name in names:
        for harm in (flip, cut, Path.unlink):
            copy = tmp_path / "copy"
            shutil.copytree(written, copy)
            harm(copy / name)
            with Checkpoints(copy, CheckpointConfig(), reads_only=True) as found:
                number = found.meta()["number"]
            if name.name == "checksums.json" and harm is Path.unlink:
                assert number == 1  # nothing else is wrong with it
            else:
                assert number == 0, (name, harm)
            said = capsys.readouterr().err
            assert bool(said) == (number == 0)
            shutil.rmtree(copy)


def test_a_damaged_one_is_set_aside_and_the_run_saves_after_it(written, tmp_path, capsys):
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(written, folder)
    data = max((folder / "1").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    flip(data)
    assert read_params(tmp_path / "run")[1]["number"] == 0
    said = capsys.readouterr().err
    assert f"checkpoint {folder / '1'} is damaged ({data.relative_to(folder / '1')} is not" in said
    assert "it is left out, and checkpoint 0 is used in its place" in said
    assert read(folder) == 0
    assert "it is now 1.damaged, and checkpoint 0 is used" in capsys.readouterr().err
    assert {p.name for p in folder.iterdir()} == {"0", "1.damaged"}
    write(folder, 2, 3, keep=2)
    assert read(folder) == 3
    assert not capsys.readouterr().err
    assert {p.name for p in folder.iterdir()} == {"1", "2", "1.damaged"}


def test_a_second_one_of_the_same_number_is_set_aside_beside_the_first(written, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(written, folder)
    for names in ({"0", "1.damaged"}, {"0", "1.damaged", "1.damaged2"}):
        cut(folder / "1" / "state" / "manifest.ocdbt")
        assert read(folder) == 0
        assert {p.name for p in folder.iterdir()} == names
        write(folder, 5)


def test_a_checkpoint_whose_run_was_killed_before_its_sums_is_read_to_tell(
    written, tmp_path, capsys
):
    shutil.copytree(written, tmp_path / "copy")
    (tmp_path / "copy" / "1" / "checksums.json").unlink()
    assert read(tmp_path / "copy") == 1
    cut(tmp_path / "copy" / "1" / "state" / "manifest.ocdbt")
    assert read(tmp_path / "copy") == 0
    assert "it cannot be read" in capsys.readouterr().err


def test_where_all_are_damaged_nothing_begins_anew(written, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(written, folder)
    for step in ("0", "1"):
        cut(folder / step / "state" / "manifest.ocdbt")
    for use in (lambda: read(folder), lambda: read_params(tmp_path / "run")):
        with pytest.raises(RunError, match=r"no checkpoint in .* put a copy of one back, or start"):
            use()
    assert {p.name for p in folder.iterdir()} == {"0", "1"}


def test_reading_a_run_leaves_what_it_is_writing(written, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(written, folder)
    (folder / "2.orbax-checkpoint-tmp").mkdir()
    assert read(folder, reads_only=True) == 1
    assert (folder / "2.orbax-checkpoint-tmp").is_dir()
    assert read(folder) == 1
    assert not (folder / "2.orbax-checkpoint-tmp").exists()


def test_of_slices_the_one_that_is_farthest_counts_whatever_the_clock_says(written, tmp_path):
    for name, border in (("a", 3), ("b", 2)):
        folder = tmp_path / "slices" / name / "checkpoints"
        with Checkpoints(folder, CheckpointConfig()) as saving:
            saving.save({"params": np.full(3, border)}, {"epoch": 1, "border": border})
        os.utime(folder / "0", (border == 3, border == 3))  # 1970: a clock that was wrong
    assert read_params(tmp_path)[1]["border"] == 3
    cut(tmp_path / "slices" / "a" / "checkpoints" / "0" / "state" / "manifest.ocdbt")
    assert read_params(tmp_path)[1]["border"] == 2


def test_a_disk_that_is_full_when_sums_are_written_is_said_and_does_no_harm(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_sums", full)
    with pytest.raises(RunError, match=r"No space left on device; those before it are whole"):
        write(tmp_path, 0)
    monkeypatch.undo()
    assert read(tmp_path) == 0


@contextmanager
def mounted(folder: Path, options: str):
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=False
    )
    if done.returncode:
        pytest.skip("may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@as_root
def test_a_full_disk_keeps_what_was_saved_and_goes_on_once_there_is_room(tmp_path):
    with mounted(tmp_path / "small", "size=1m"):
        folder = tmp_path / "small" / "checkpoints"
        write(folder, 0)
        filler = tmp_path / "small" / "filler"
        filler.write_bytes(bytes(850_000))
        with (
            pytest.raises(RunError, match=r"could not be written .* make room, then go on"),
            Checkpoints(folder, CheckpointConfig()) as saving,
        ):
            saving.save(state(1, 60_000), {"number": 1})
        assert read(folder, reads_only=True) == 0
        filler.unlink()
        write(folder, 2)
        assert read(folder) == 2


def busy(before: set[threading.Thread]) -> list[threading.Thread]:
    """New threads that the interpreter would wait for, after some seconds; a pool's that wait for
    work end with it."""
    waiting = []
    for _ in range(50):
        frames = sys._current_frames()
        new = [t for t in set(threading.enumerate()) - before if not t.daemon]
        running = [(t, frames[t.ident]) for t in new if t.ident in frames]
        waiting = [t for t, frame in running if frame.f_code.co_name != "_worker"]
        if not waiting:
            break
        time.sleep(0.1)
    return waiting


@as_root
def test_a_read_only_folder_can_be_read_and_says_that_it_cannot_be_written(tmp_path):
    place = tmp_path / "fixed"
    with mounted(place, "size=1m"):
        write(place / "checkpoints", 0, 1)
        flip(place / "checkpoints" / "1" / "state" / "manifest.ocdbt")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        assert read_params(place)[1]["number"] == 0
        with pytest.raises(
            RunError, match=r"1 is damaged .* set aside: Read-only file system; make"
        ):
            write(place / "checkpoints", 2)
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        shutil.rmtree(place / "checkpoints" / "1")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        before = set(threading.enumerate())
        with pytest.raises(RunError, match=r"[Rr]ead-only file system.*make it writable, then go"):
            write(place / "checkpoints", 2)
        assert not busy(before), "they would keep the process from ending"
