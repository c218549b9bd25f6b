# SPDX-License-Identifier: Apache-2.0
"""`geojax serve` as a process: what it refuses, says, answers, and how it ends."""

import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from tiny_serve import tiny_model, wait_until

from geojax import arguments, cli

KEY = "a-key-that-nobody-may-see"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.getbasetemp()).folder


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["MODEL", "--host", "0.0.0.0"], "no key is asked for; give --keys FILE"),
        (["MODEL", "--keys", "nowhere"], "cannot read the keys nowhere"),
        (["MODEL", "--policy", "bicahce"], "did you mean 'bicache'"),
        (["MODEL", "--policy", "bicache"], "geojax profile depth"),
        (["MODEL", "--policy", "refresh", "--depths", "d.json"], "has no use for --depths"),
        (["MODEL", "--depths", "d.json"], "d.json is no table of depths"),
        (["MODEL", "--pace.rows", "0"], "rows 0 must be above 0"),
        (["MODEL", "--limits.tokens", "0"], "tokens 0 must be above 0"),
        (["MODEL", "--kv-bytes", "10"], "holds nothing"),
        (["MODEL", "--port", "70000"], "must lie in 0..65535"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(folder, args, message, capsys):
    given = [str(folder) if arg == "MODEL" else arg for arg in args]
    assert cli.main(["serve", *given]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_port_that_is_taken_is_said(folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", str(folder), "--port", port]) == 2
        assert f"cannot listen at 127.0.0.1 port {port}" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(folder, monkeypatch, capsys):
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    assert cli.main(["serve", str(folder)]) == 2
    assert "pip install 'geojax[serve]'" in capsys.readouterr().err


class Process:
    """A server of its own, and what it said."""

    def __init__(self, *args: str):
        command = [sys.executable, "-m", "geojax", "serve", *args, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        self._reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr))
        self._reader.start()
        wait_until(lambda: re.search(r"http://[\d.:]+", self.text) or self.process.poll(), 60)
        self.url = re.search(r"http://[\d.:]+\d", self.text)[0]

    @property
    def text(self) -> str:
        return "".join(self.said)

    def end(self) -> int:
        code = self.process.wait(60)
        self._reader.join(10)
        self.process.stderr.close()
        return code


@pytest.mark.full
def test_sigterm_under_load_answers_what_was_accepted(folder, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"alice {KEY}\n")
    served = Process(str(folder), "--no-warm", "--keys", str(keys), "--policy", "none")
    headers = {"Authorization": f"Bearer {KEY}"}

    def ask(seed):
        body = {"prompt": "A secret prompt", "max_tokens": 64, "seed": seed}
        return httpx2.post(served.url + "/v1/completions", json=body, headers=headers, timeout=120)

    with ThreadPoolExecutor(12) as pool:
        assert ask(0).status_code == 200
        asked = [pool.submit(ask, seed) for seed in range(12)]

        def accepted():
            text = httpx2.get(served.url + "/metrics", timeout=60).text
            found = re.findall(r"vllm:num_requests_(?:running|waiting)\{.*\} (\S+)", text)
            return sum(map(float, found)) == 12 or any(one.done() for one in asked)

        wait_until(accepted, 60)
        served.process.send_signal(signal.SIGTERM)
        codes = [one.result().status_code for one in asked]
    # A few may have come after the signal; whoever was accepted has an answer.
    assert set(codes) <= {200, 503}
    assert codes.count(200) >= 8
    assert served.end() == 0
    assert "stopped" in served.text
    assert KEY not in served.text
    assert "secret" not in served.text
    assert "alice" in served.text


@pytest.mark.full
def test_a_warm_up_shows_how_far_it_is_and_can_be_stopped(folder):
    args = ["--pace.rows", "2", "--warm-prefix", "64", "--warm-suffix", "64"]
    served = Process(str(folder), *args)
    wait_until(lambda: httpx2.get(served.url + "/ready").status_code == 200, 120)
    assert re.search(r"warming up: batches of up to 2: 2 of 2 sizes", served.text)
    served.process.send_signal(signal.SIGINT)
    assert served.end() == 0
    stopped = Process(str(folder), *args)
    assert httpx2.get(stopped.url + "/ready").json()["state"] == "warming"
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.end() == 0
