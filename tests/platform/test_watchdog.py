# SPDX-License-Identifier: Apache-2.0
"""A hang ends the process with its stacks; a slow run, a pause or a stopped process does not."""

import os
import signal
import subprocess
import sys
import time

import pytest

from geojax.config import WatchdogConfig
from geojax.platform import EXIT_CODE, Watchdog

START = """
import ctypes, sys, threading, time
from pathlib import Path
from geojax.config import WatchdogConfig
from geojax.platform import Watchdog

def dog(**settings):
    settings = {"factor": 3.0, "minimum_seconds": 0.4, "first_seconds": 20.0} | settings
    return Watchdog(WatchdogConfig(enabled=True, **settings), Path(sys.argv[1]))

def stuck_in_a_collective():
    ctypes.CDLL(None).pause()  # waits for ever in C, without Python's lock
"""


def start(body, folder):
    return subprocess.Popen(
        [sys.executable, "-c", START + body, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(body, folder, timeout=120):
    with start(body, folder) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return process.returncode, out, err


def test_a_hang_ends_the_process_with_the_stacks_of_all_threads(tmp_path):
    body = """
def waits_too(): time.sleep(60)
threading.Thread(target=waits_too).start()
with dog() as watchdog:
    for step in range(3):
        watchdog.beat(f"step {step}")
    stuck_in_a_collective()
"""
    code, _, err = run(body, tmp_path)
    assert code == EXIT_CODE == 70 != os.EX_TEMPFAIL
    (file,) = tmp_path.glob("hang-*.txt")
    for text in (err, file.read_text()):
        assert "since step 2 (limit " in text
        assert "stuck_in_a_collective" in text
        assert "waits_too" in text


def test_the_process_ends_where_the_folder_is_gone_too(tmp_path):
    body = """
with dog(first_seconds=0.4):
    stuck_in_a_collective()
"""
    code, _, err = run(body, tmp_path / "gone")
    assert code == EXIT_CODE
    assert "since the start" in err


@pytest.mark.runs
def test_the_limit_follows_the_pace_of_the_run(tmp_path):
    # Steps of 1 s: a gap of 1.5 s is above the minimum and far below 3 x 1.
    body = """
with dog() as watchdog:
    time.sleep(0.5)  # compilation
    for step in range(3):
        watchdog.beat(f"step {step}")
        time.sleep(1.0)
    watchdog.beat("step 3")
    time.sleep(1.5)
    print("not ended", flush=True)
    watchdog.beat("slow step")
    time.sleep(100)
"""
    code, out, err = run(body, tmp_path)
    assert out == "not ended\n"
    assert code == EXIT_CODE
    limit = float(err.partition("since slow step (limit ")[2].partition(" s)")[0])
    assert 4.5 <= limit < 9.0  # 3 x 1.5, and what a busy machine adds


def test_a_pause_is_no_hang_and_teaches_no_pace(tmp_path):
    body = """
with dog(minimum_seconds=1.5) as watchdog:
    for step in range(3):
        watchdog.beat("step")
    with watchdog.pause():
        time.sleep(3.0)
        watchdog.beat("inside")
        with watchdog.pause():
            time.sleep(0.1)
        time.sleep(2.0)
    time.sleep(0.2)
    watchdog.beat("after")
    print("not ended", flush=True)
    stuck_in_a_collective()
"""
    code, out, err = run(body, tmp_path)
    assert out == "not ended\n"
    assert code == EXIT_CODE
    limit = float(err.partition("since after (limit ")[2].partition(" s)")[0])
    assert limit < 6  # 3 x what the pause lasted would be 9 and 15


def test_a_stopped_process_goes_on_when_it_is_continued(tmp_path):
    body = """
with dog(minimum_seconds=1.0) as watchdog:
    for step in range(3):
        watchdog.beat("step")
    print("stop me", flush=True)
    for step in range(15):
        time.sleep(0.05)
        watchdog.beat("step")
    sys.exit(7)
"""
    with start(body, tmp_path) as process:
        assert process.stdout.readline() == "stop me\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(timeout=120) == 7
    assert not list(tmp_path.iterdir())


def test_the_watching_thread_does_not_keep_the_process(tmp_path):
    code, _, err = run("dog().__enter__()", tmp_path)
    assert (code, err) == (0, "")  # one that is kept ends by the watchdog


def test_errors_pass_through_and_end_the_watch(tmp_path):
    dog = Watchdog(WatchdogConfig(enabled=True), tmp_path)
    with pytest.raises(ZeroDivisionError), dog:
        raise ZeroDivisionError
    assert dog._thread is not None
    assert not dog._thread.is_alive()
    with Watchdog(WatchdogConfig(), tmp_path) as dog:
        dog.beat("step")
        assert dog._thread is None
