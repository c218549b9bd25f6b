# SPDX-License-Identifier: Apache-2.0
"""A run is followed while it is written, and left when it ends or the user does."""

import os
import re
import signal
import threading
import time
from contextlib import contextmanager

import pytest
from made_run import write_chained
from pages import read

from geojax.cli import main
from geojax.report.command import with_seconds


@pytest.fixture
def growing(tmp_path):
    """A run's folder without its records, and those."""
    folder = write_chained(tmp_path / "run", rounds=2)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").unlink()
    return folder / "metrics.jsonl", lines, tmp_path / "page.html"


@contextmanager
def meanwhile(work):
    """Do `work` in another thread; what it raises is raised here, after the user's Ctrl-C."""
    failed = []

    def run():
        try:
            work()
        except BaseException as error:
            failed.append(error)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failed:
        raise failed[0]


def wait_for(page, pattern, seconds=240):
    """The page as it says `pattern`; whenever it is read, it is whole."""
    end = time.monotonic() + seconds
    while True:
        text = page.read_text() if page.exists() else ""
        assert not text or text.endswith("</html>\n")
        if re.search(pattern, text):
            return text
        assert time.monotonic() < end, f"never said {pattern}: {text[-3000:]}"
        time.sleep(0.01)


def until_round(lines, number):
    return (
        next(i for i, line in enumerate(lines) if f'"kind": "eval", "round": {number}' in line) + 1
    )


def test_a_run_is_followed_from_before_its_start_to_its_end(growing, capsys):
    path, lines, page = growing

    def train():
        text = wait_for(page, "waiting: .* has no metrics.jsonl")
        assert len(read(text).scripts) == 1
        path.write_text("")
        wait_for(page, "has no start record yet")
        with path.open("a") as file:
            for line in lines[: until_round(lines, 1)]:
                file.write(line)
            half = lines[until_round(lines, 1)]
            file.write(half[:30])  # torn, as a reader may find it
            file.flush()
            text = wait_for(page, "after round 1<")
            assert "figures are up to round 1." in text
            assert len(read(text).scripts) == 1
            file.write(half[30:] + "".join(lines[until_round(lines, 1) + 1 :]))

    with meanwhile(train):
        assert main(["report", str(path.parent), "--html", str(page), "--watch", "0.02"]) == 0
    last = page.read_text()
    assert "ended: " in last
    assert read(last).scripts == []  # nothing more will come
    assert not list(page.parent.glob("*.tmp"))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown  # no terminal
    assert shown.index("up to round 1.") < shown.rindex("Target perplexity")


def test_ctrl_c_ends_it_in_good_order(growing):
    path, lines, page = growing
    path.write_text("".join(lines[: until_round(lines, 1)]))

    def user():
        wait_for(page, "location.reload")
        os.kill(os.getpid(), signal.SIGINT)

    with meanwhile(user):
        assert main(["report", str(path.parent), "--html", str(page), "--watch=0.02"]) == 0
    assert read(page.read_text()).scripts == []
    assert "not ended" in page.read_text()


def test_a_broken_line_ends_it_with_its_place(growing, capsys):
    path, lines, page = growing
    count = until_round(lines, 1)
    path.write_text("".join(lines[:count]))

    def damage():
        wait_for(page, "location.reload")
        with path.open("a") as file:
            file.write('{"kind": \n' + lines[count])

    with meanwhile(damage):
        assert main(["report", str(path.parent), "--html", str(page), "--watch=0.02"]) == 2
    assert f"metrics.jsonl:{count + 1} is not JSON" in capsys.readouterr().err
    assert read(page.read_text()).scripts == []
    assert "after round 1<" in page.read_text()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["run", "--watch"], ["run", "--watch", "2"]),
        (["--watch", "run"], ["--watch", "2", "run"]),
        (["run", "--watch", "0.5"], ["run", "--watch", "0.5"]),
        (["run", "--watch=7"], ["run", "--watch=7"]),
        (["run", "--watch", "--html", "p"], ["run", "--watch", "2", "--html", "p"]),
        (["run"], ["run"]),
    ],
)
def test_seconds_may_be_left_out(given, meant):
    assert with_seconds(given) == meant


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--watch=0"], "seconds must be above 0"),
        (["--watch=-1"], "seconds must be above 0"),
        (["--watch", "--tensorboard", "t"], "leave it out to export"),
    ],
)
def test_what_makes_no_sense_is_refused(make_run, capsys, args, message):
    assert main(["report", str(make_run()), *args]) == 2
    assert message in capsys.readouterr().err
