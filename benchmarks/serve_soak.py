# SPDX-License-Identifier: Apache-2.0
"""A server at twice its capacity, for long: clients that go away, read slowly, send what is none.

    python benchmarks/serve_soak.py [--seconds 600] [--seed 0]

The server is a process of its own with a small random model. Its capacity is measured first; then
requests arrive at twice that rate, whatever becomes of them. Tokens are long words, so that a slow
reader's canvases do not fit into what sockets hold. Fails (exit code 1) where a request is stuck,
an answer is neither an answer nor an error of the client's making, the server's counts are not the
clients', it never had to wait for a slow reader, its memory grows by more than 5 % after the first
third, or when all clients have gone it has more files open than before them, or more threads than
its pool may keep.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # sooner compiled

import httpx2

from geojax.track.environment import machine

LONGEST_SECONDS = 60.0  # until whoever has no answer is stuck
POOL = 40  # threads that anyio starts for calls that block, and keeps
WORD = 2000  # characters of a token
WAITED_SECONDS = 0.1  # for a reader to take an event: it is slow
KINDS = {"whole": 30, "stream": 30, "leaves": 15, "slow": 8, "late": 5, "broken": 7, "huge": 5}
BROKEN = [b"", b"{", b"[1]", b'{"prompt": 3}', b'{"prompt": "a", "max_tokens": -1}', b"\xff\x00"]
JSON = {"Content-Type": "application/json"}


def serve() -> None:
    """In the server's process: says its address, and serves until it is told to stop."""
    import tempfile

    import tokenizers

    from geojax.bicache.depth import Depths
    from geojax.bicache.engine import Engine, Sizes
    from geojax.bicache.policy import get_policy
    from geojax.diffusion.load import Model
    from geojax.models.config import TransformerConfig
    from geojax.models.transformer import init_params
    from geojax.models.weights import SpecialTokens
    from geojax.serve.app import make_app
    from geojax.serve.loop import EngineLoop
    from geojax.serve.metrics import Metrics
    from geojax.serve.options import Limits, Pace
    from geojax.serve.prompts import Prompts
    from geojax.serve.server import Server, listen
    from geojax.serve.service import Service
    from geojax.serve.tenants import Tenants

    config = TransformerConfig(
        vocab_size=264, dim=32, layers=2, heads=2, kv_heads=2, mlp_dim=64, bidirectional=True
    )
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {f"w{i}".ljust(WORD, "-"): i for i in range(256)}, unk_token="w0".ljust(WORD, "-")
        )
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = SpecialTokens(256, 257, 257)
    with tempfile.TemporaryDirectory() as folder:
        model = Model(Path(folder), config, init_params(config, 0), special, words, (257,))
        sizes = Sizes(2e6, 1e6, page=16)
        engine = Engine(model.sampler(), get_policy("bicache", 8), sizes, Depths(((0.0, 1),)))
        metrics = Metrics("soak")
        loop = EngineLoop(engine, Pace(rows=2, queue=16), metrics)
        limits = Limits(tokens=64)
        service = Service("soak", Prompts(model), loop, limits, metrics)
        listening = listen("127.0.0.1", 0, limits.stall_seconds)
        waits = Waits(make_app(service, Tenants(), 60.0, True))

        def begin() -> None:
            print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
            loop.start(lambda say: _warm(engine))

        asyncio.run(Server(waits, loop, 20.0, begin).serve([listening]))
        engine.check_books()
        assert engine.kv.taken == engine.store.kv_pages, "a request's pages were not given back"
        loop.stop(10.0)
        print(waits.count, flush=True)


class Waits:
    """An application whose sends are timed."""

    def __init__(self, app):
        self._app, self.count = app, 0

    async def __call__(self, scope, receive, send) -> None:
        async def timed(message) -> None:
            began = time.monotonic()
            await send(message)
            self.count += time.monotonic() - began > WAITED_SECONDS

        await self._app(scope, receive, timed)


def _warm(engine) -> None:
    engine.warm([1, 2], prefix=32, suffix=64, block=32)


class Clients:
    """All of them, and what they saw."""

    def __init__(self, url: str, seed: int):
        self.random, self.url = random.Random(seed), url
        self.statuses: Counter[int] = Counter()
        self.answers = self.tokens = self.given = self.unknown = self.sent = 0
        self.faults: list[str] = []
        self.client = self.connect()

    def connect(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=self.url,
            timeout=LONGEST_SECONDS,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32),
        )

    def body(self, kind: str) -> dict:
        ids = [self.random.randrange(4)] * 32  # one of four shared prefixes
        ids += [self.random.randrange(256) for _ in range(self.random.randint(1, 8))]
        found = {"prompt": ids, "max_tokens": self.random.randint(1, 24)}
        found |= {"seed": self.random.randrange(1000), "ignore_eos": True, "steps": 8}
        found |= {"prefix_tokens": 32, "exact": self.random.random() < 0.1}
        if kind == "late":
            found["deadline_seconds"] = 0.05
        if kind in ("stream", "slow", "leaves"):
            options = {"include_usage": True, "include_snapshots": kind == "slow"}
            found |= {"stream": True, "stream_options": options}
        if found["exact"]:
            del found["prefix_tokens"]
        return found

    async def one(self, kind: str) -> None:
        self.sent += 1
        try:
            async with asyncio.timeout(2 * LONGEST_SECONDS):
                await self._one(kind)
        except TimeoutError:
            self.faults.append(f"{kind}: stuck")
        except (httpx2.HTTPError, OSError) as error:
            self.faults.append(f"{kind}: {error!r}")

    async def _one(self, kind: str) -> None:
        path = "/v1/completions"
        if kind in ("broken", "huge"):
            content = b"x" * 2**21 if kind == "huge" else self.random.choice(BROKEN)
            response = await self.client.post(path, content=content, headers=JSON)
            self._note(kind, response.status_code, {400, 413})
        elif kind in ("whole", "late"):
            response = await self.client.post(path, json=self.body(kind))
            allowed = {200, 429, 504} if kind == "late" else {200, 429}
            self._note(kind, response.status_code, allowed)
            if response.status_code == 200:
                self._count(response.json()["usage"])
        elif kind == "slow":
            await self._slow()
        else:
            await self._stream(kind)

    async def _slow(self) -> None:
        """Takes little at a time, from a connection that holds little."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        body = json.dumps(self.body("slow") | {"max_tokens": 24, "steps": 24}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        with connection:
            await loop.sock_connect(connection, (host, int(port)))
            head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
            await loop.sock_sendall(connection, head.encode() + body)
            found = b""
            while part := await loop.sock_recv(connection, 4096):
                found += part
                await asyncio.sleep(0.1 * self.random.random())
        status = int(found.split(b" ", 2)[1])
        self._note("slow", status, {200, 429})
        if status == 200:
            lines = [line[6:] for line in found.split(b"\n") if line.startswith(b"data: ")]
            if lines[-1] == b"[DONE]":
                self._count(json.loads(lines[-2])["usage"])
            else:
                self.faults.append("slow: the stream ended early")

    async def _stream(self, kind: str) -> None:
        leave_at = self.random.choice([0, 1, 2]) if kind == "leaves" else None
        body = self.body(kind)
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            if leave_at == 0 and response.status_code == 200:
                self.unknown += 1
                return
            self._note(kind, response.status_code, {200, 429})
            if response.status_code != 200:
                return
            usage, ended, seen = None, False, 0
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                seen += 1
                if leave_at and seen >= leave_at:
                    self.statuses[200] -= 1
                    self.unknown += 1
                    return
                ended = line == "data: [DONE]"
                usage = (not ended and json.loads(line[6:]).get("usage")) or usage
            if not ended or not usage:
                self.faults.append(f"{kind}: the stream ended early")
            else:
                self._count(usage)

    def _note(self, kind: str, status: int, allowed: set[int]) -> None:
        self.statuses[status] += 1
        if status not in allowed:
            self.faults.append(f"{kind}: status {status}")

    def _count(self, usage: dict) -> None:
        self.answers += 1
        self.tokens += usage["completion_tokens"]
        self.given += usage["prompt_tokens"]

    async def metrics(self) -> dict[str, float]:
        """Sums by name, and by name and reason or status."""
        text = (await self.client.get("/metrics")).text
        found: Counter[str] = Counter()
        for line in text.splitlines():
            if "{" in line and not line.startswith("#"):
                name, _, rest = line.partition("{")
                labels, _, value = rest.rpartition("} ")
                found[name] += float(value)
                for label in labels.split(","):
                    if label.startswith(("finished_reason", "status")):
                        found[name + label.partition("=")[2]] += float(value)
        return found


async def soak(url: str, process: int, seconds: float, seed: int) -> list[str]:
    clients = Clients(url, seed)
    while (await clients.client.get("/ready")).status_code != 200:
        await asyncio.sleep(0.2)
    await clients.client.aclose()
    await asyncio.sleep(2.0)  # until the server has closed its end
    held = held_by(process)
    clients.client = clients.connect()
    began = time.monotonic()
    while time.monotonic() - began < min(5.0, seconds / 6):
        await asyncio.gather(*(clients.one("whole") for _ in range(8)))
    capacity = clients.answers / (time.monotonic() - began)
    rate = 2 * capacity
    print(f"capacity {capacity:.1f} requests/s, load {rate:.1f} requests/s", flush=True)
    kinds, weights = zip(*KINDS.items(), strict=True)
    tasks, memory = set(), []
    began = at = time.monotonic()
    while time.monotonic() - began < seconds:
        at += clients.random.expovariate(rate)
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        task = asyncio.create_task(clients.one(clients.random.choices(kinds, weights)[0]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if not memory or time.monotonic() - memory[-1][0] > 0.5:
            memory.append((time.monotonic(), rss_bytes(process)))
    if tasks:
        await asyncio.wait(tasks, timeout=2 * LONGEST_SECONDS)
    faults = clients.faults + [f"{len(tasks)} requests are stuck"] * bool(tasks)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        found = await clients.metrics()
        if not found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.2)
    found = await clients.metrics()
    faults += compare(clients, found)
    third = began + seconds / 3
    early = [m for t, m in memory if third <= t < third + seconds / 6]
    late = [m for t, m in memory if t >= began + 5 * seconds / 6]
    growth = median(late) / median(early) - 1
    print(
        f"{clients.sent} requests in {seconds:.0f} s: {dict(clients.statuses)}, {clients.unknown} "
        f"went away; {clients.answers} answers, {clients.tokens} tokens; memory "
        f"{median(late) / 2**20:.0f} MiB, {growth:+.1%} since the first third"
    )
    if growth > 0.05:
        faults.append(f"memory grew by {growth:.1%}")
    await clients.client.aclose()
    end = time.monotonic() + 10
    while (left := held_by(process))["fd"] > held["fd"] and time.monotonic() < end:
        await asyncio.sleep(0.1)
    print(
        f"open files of the server: {held['fd']} before, {left['fd']} after; "
        f"threads: {held['task']}, {left['task']}"
    )
    if left["fd"] > held["fd"] or left["task"] > held["task"] + POOL:
        faults.append("files or threads were left")
    return faults


def compare(clients: Clients, found: dict[str, float]) -> list[str]:
    """Where the server's counts are not the clients'."""
    wrong = []
    name = "vllm:request_success_total"
    good = found[name + '"stop"'] + found[name + '"length"']
    # Of those that went away the server may have been done before it knew.
    if not clients.answers <= good <= clients.answers + clients.unknown:
        wrong.append(f"{good:.0f} answers for the server, {clients.answers} for clients")
    accepted = clients.statuses[200] + clients.statuses[504]
    if not accepted <= found[name] <= accepted + clients.unknown:
        wrong.append(f"{found[name]:.0f} ends for the server, {accepted} for clients")
    for status in (400, 413, 429):
        theirs = found[f'geojax_refused_total"{status}"']
        if theirs != clients.statuses[status]:
            wrong.append(f"{theirs:.0f} refused with {status}, {clients.statuses[status]} seen")
    for name, theirs, most in (
        ("vllm:generation_tokens_total", clients.tokens, 24),
        ("vllm:prompt_tokens_total", clients.given, 40),
    ):
        if not theirs <= found[name] <= theirs + most * clients.unknown:
            wrong.append(f"{name} is {found[name]:.0f} for the server, {theirs} for clients")
    return wrong


def rss_bytes(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def held_by(process: int) -> dict[str, int]:
    """Files that it has open (`fd`), and its threads (`task`)."""
    return {kind: len(os.listdir(f"/proc/{process}/{kind}")) for kind in ("fd", "task")}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    command = [sys.executable, __file__, "--serve"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout
    try:
        url = server.stdout.readline().strip()
        faults = asyncio.run(soak(url, server.pid, options.seconds, options.seed))
    finally:
        server.terminate()
        code = server.wait(60)
    waits = int(server.stdout.read() or 0)
    print(f"the server waited {waits} times over {WAITED_SECONDS} s for a reader")
    if not waits:
        faults.append("no reader was slow enough to be waited for")
    if code:
        faults.append(f"the server ended with exit code {code}")
    print(f"measured clock, {machine()}")
    for fault, count in Counter(faults).items():
        print(f"FAULT {fault} ({count} times)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
