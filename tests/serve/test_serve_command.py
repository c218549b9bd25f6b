# SPDX-License-Identifier: Apache-2.0
"""`geojax serve` as a process: what it refuses, says, answers, and how it ends."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from tiny_serve import tiny_model, wait_until

from geojax import arguments, cli
from geojax.config import ConfigError
from geojax.serve.command import url_of
from geojax.serve.server import listen

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
        (["MODEL", "--kv-bytes", "inf"], "kv-bytes inf must be at most 1e+13"),
        (["MODEL", "--kv-bytes", "nan"], "kv-bytes nan must be above 0"),
        (["MODEL", "--quota-bytes", "0"], "quota-bytes 0.0 must be above 0"),
        (["MODEL", "--limits.stall-seconds", "inf"], "stall-seconds inf must be at most 1e+06"),
        (["MODEL", "--limits.stall-seconds", "1e10"], "must be at most 1e+06"),
        (["MODEL", "--drain-seconds", "inf"], "must be at most 1e+06"),
        (["MODEL", "--warm-prefix", "-5"], "warm-prefix -5 must be 0 or more"),
        (["MODEL", "--warm-suffix", "0"], "warm-suffix 0 must be at least 1"),
        (["MODEL", "--limits.default-tokens", "4096"], "limits.tokens 2048; lower the one"),
        (["MODEL", "--port", "70000"], "must lie in 0..65535"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(folder, args, message, capsys):
    given = [str(folder) if arg == "MODEL" else arg for arg in args]
    assert cli.main(["serve", *given]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("host", "begin"), [("127.0.0.1", "http://127."), ("::1", "http://[::1]:")]
)
def test_addresses_are_said_as_browsers_take_them(host, begin):
    try:
        listening = listen(host, 0, 30.0)
    except ConfigError:
        pytest.skip("this machine has no such address")
    with listening:
        assert url_of(listening).startswith(begin)


def test_small_parts_of_answers_are_sent_at_once():
    """Else the last one of an answer waits for the acknowledgement of those before it."""

    async def accepted() -> int:
        found: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        async with await asyncio.start_server(lambda r, w: found.put(w), sock=listening):
            with socket.create_connection(listening.getsockname()):
                writer = await found.get()
                option = writer.get_extra_info("socket").getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_NODELAY
                )
                writer.close()
        return option

    listening = listen("127.0.0.1", 0, 30.0)
    assert asyncio.run(accepted()) != 0


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

    def __init__(self, *args: str, program: Sequence[str] = ("-m", "geojax", "serve")):
        memory = ["--kv-bytes", "2e7", "--hidden-bytes", "1e7"]
        command = [sys.executable, *program, *args, "--port", "0", *memory]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        self._reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr))
        self._reader.start()

    def wait(self) -> None:
        """Until it listens."""
        wait_until(lambda: re.search(r"http://[\d.:]+", self.text) or self.process.poll(), 300)
        self.url = re.search(r"http://[\d.:]+\d", self.text)[0]

    @property
    def text(self) -> str:
        return "".join(self.said)

    def end(self) -> int:
        code = self.process.wait(120)
        self._reader.join(10)
        self.process.stderr.close()
        return code


@pytest.fixture
def start():
    """Starts servers; those that a test leaves are ended."""
    made = []

    def make(*args, **kwargs):
        made.append(Process(*args, **kwargs))
        made[-1].wait()
        return made[-1]

    yield make
    for served in made:
        if served.process.poll() is None:
            served.process.kill()
            served.end()


@pytest.mark.runs
def test_sigterm_under_load_answers_what_was_accepted(start, folder, tmp_path):
    """Those that wait for a row as well as those that have one."""
    keys = tmp_path / "keys"
    keys.write_text(f"alice {KEY}\n")
    args = ["--no-warm", "--policy", "none", "--pace.rows", "2", "--keys", str(keys)]
    args += ["--name", "tiny [/b] [red]"]
    served = start(str(folder), *args)
    headers = {"Authorization": f"Bearer {KEY}"}

    def ask(seed):
        body = {"prompt": "A secret prompt", "max_tokens": 64, "seed": seed}
        return httpx2.post(served.url + "/v1/completions", json=body, headers=headers, timeout=120)

    def count(name):
        text = httpx2.get(served.url + "/metrics", timeout=60).text
        return sum(map(float, re.findall(rf"{name}\{{.*\}} (\S+)", text)))

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, seed) for seed in range(12)]

        def accepted():
            over = sum(one.done() for one in asked)
            return over + count("vllm:num_requests_(?:running|waiting)") == 12

        wait_until(accepted, 120)
        assert count("vllm:num_requests_waiting") >= 4
        served.process.send_signal(signal.SIGTERM)
        assert [one.result().status_code for one in asked] == [200] * 12
    assert served.end() == 0
    assert "stopped" in served.text
    assert "tiny [/b] [red] at http://" in served.text
    assert KEY not in served.text
    assert "secret" not in served.text
    assert len(re.findall(r"^[\d-]+ [\d:,]+ .* of alice: ", served.text, re.MULTILINE)) == 12


@pytest.mark.runs
def test_a_warm_up_shows_how_far_it_is_and_can_be_stopped(start, folder):
    args = ["--pace.rows", "2", "--warm-prefix", "16", "--warm-suffix", "32"]
    served = start(str(folder), *args)
    wait_until(lambda: httpx2.get(served.url + "/ready").status_code == 200, 300)
    assert re.search(r"warming up: batches of up to 2: 2 of 2 sizes", served.text)
    served.process.send_signal(signal.SIGINT)
    assert served.end() == 0
    stopped = start(str(folder), *args)
    assert httpx2.get(stopped.url + "/ready").json()["state"] == "warming"
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.end() == 0


# Signals are caught late: whoever reads the first line may send one at once.
_ENDLESS = """
import sys
import time
import jax
import uvicorn
from geojax import cli
from geojax.bicache.engine import Engine

def warm(*args, **kwargs):
    print("inside", file=sys.stderr, flush=True)
    spin = jax.jit(lambda x: jax.lax.while_loop(lambda x: x >= 0, lambda x: (7 * x + 1) % 99, x))
    spin(1).block_until_ready()

def catch(server, catch=uvicorn.Server.capture_signals):
    time.sleep(2)
    return catch(server)

Engine.warm = warm
uvicorn.Server.capture_signals = catch
sys.exit(cli.main(["serve", *sys.argv[1:]]))
"""


@pytest.mark.runs
def test_it_stops_in_time_inside_a_call_that_does_not(start, folder):
    """As one that compiles a large program."""
    served = start(str(folder), program=["-c", _ENDLESS])
    wait_until(lambda: "inside" in served.text, 120)
    began = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    assert served.end() == 0
    assert time.monotonic() - began < 40
    assert "stopped; a call of the engine was cut off" in served.text
