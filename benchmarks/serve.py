# SPDX-License-Identifier: Apache-2.0
"""What HTTP and scheduling cost beside the engine, and what reuse and batches bring, in one run.

    python benchmarks/serve.py [--rounds N] [--clients N]
    python benchmarks/serve.py --overhead PAIRS

Requests share one prefix; the model has random weights. By turns, clients being another process:
the engine alone on whole batches; the server with as many clients; the same clients asking for no
reuse; and one client, one request after another. Then what HTTP and scheduling add, in pairs of
one request to the engine and one by HTTP, of two steps and with the client in this process; in
processor time as well, which other jobs on the machine disturb less. --overhead is that alone.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

os.environ["JAX_PLATFORMS"] = "cpu"

import httpx2
import numpy as np
import tokenizers

from geojax.bicache.depth import Depths
from geojax.bicache.engine import Engine, Job, Sizes
from geojax.bicache.policy import get_policy
from geojax.diffusion.load import Model
from geojax.diffusion.request import Request, SamplingConfig
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
from geojax.track.environment import machine

VOCAB, MASK, EOS = 4096, 4095, 4094
PAIRS = 100
ASKED = {
    "server / engine": (">=", 0.9),
    "server / no reuse": (">", 1.0),
    "server / one after another": (">", 1.0),
    "HTTP and scheduling, ms": ("<=", 5.0),
}
"""Of medians, by the name of a figure."""
CONFIG = TransformerConfig(
    vocab_size=VOCAB, dim=128, layers=6, heads=4, kv_heads=4, mlp_dim=352, bidirectional=True
)
PREFIX, SUFFIX, TOKENS, STEPS = 256, 16, 32, 32
"""Of a prefix that clients do not mark, the server shares 64, 128, 256 tokens and so on: so all of
it, as the engine does."""


def make_model() -> Model:
    """Random weights; a token is a word."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = SpecialTokens(MASK, EOS, EOS)
    return Model(Path("random"), CONFIG, init_params(CONFIG, 0), special, words, (EOS,))


def make_engine(model: Model) -> Engine:
    return Engine(model.sampler(), get_policy("bicache"), Sizes(5e8, 1e8), Depths(((0.0, 3),)))


class Served:
    """A server in this process."""

    def __init__(self, model: Model, rows: int, keys: Path | None = None):
        metrics = Metrics("random")
        self.loop = EngineLoop(make_engine(model), Pace(rows=rows), metrics)
        service = Service("random", Prompts(model), self.loop, Limits(), metrics)
        socket = listen("127.0.0.1", 0, 30.0)
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        app = make_app(service, Tenants(keys), 600.0, keys is None)
        self._server = Server(app, self.loop, 60.0, self.loop.start)
        run = self._server.serve([socket])
        self._thread = threading.Thread(target=asyncio.run, args=(run,))
        self._thread.start()
        while self.loop.state != "ready":
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.begin_stop()
        self._thread.join()


def clients(url: str, count: int, requests: int, *more: str) -> dict:
    """What `geojax bench serve` says, from another process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "load.json"
        sizes = ["--prefixes", "1", "--prefix-tokens", str(PREFIX), "--suffix-tokens", str(SUFFIX)]
        work = ["--tokens", str(TOKENS), "--steps", str(STEPS), "--requests", str(requests)]
        command = [sys.executable, "-m", "geojax", "bench", "serve", url, *sizes, *work]
        command += ["--concurrency", str(count), "--json", str(path), *more]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(path.read_text())
    assert found["failed"] == 0, found["errors"]
    return found


def overhead(pairs: int) -> bool:
    """Of requests by HTTP over those to the engine, in pairs, the client's own work included;
    whether it is as was asked."""
    model = make_model()
    alone, served = make_engine(model), Served(model, 1)

    def timed(work) -> np.ndarray:
        """Milliseconds of the wall clock and of the processor."""
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        return 1000 * np.array([time.perf_counter() - wall, time.process_time() - cpu])

    found = []
    try:
        with httpx2.Client(base_url=served.url, timeout=600) as client:

            def ask(job: Job) -> None:
                ids = [int(i) for i in job.request.tokens if i != MASK]
                body = {"prompt": ids, "prefix_tokens": PREFIX, "seed": 0, "ignore_eos": True}
                client.post("/v1/completions", json=body | {"max_tokens": 2}).raise_for_status()

            for i in range(-5, pairs):  # the first ones compile
                (job,) = jobs(1, 1000 + i, 2, 2)
                direct = timed(lambda job=job: alone.answer([job]))
                by_http = timed(lambda job=job: ask(job))
                if i >= 0:
                    found.append(by_http - direct)
    finally:
        served.stop()
    asked = "HTTP and scheduling, ms"
    medians = np.median(found, axis=0)
    for name, column in zip(("wall clock", "processor"), np.array(found).T, strict=True):
        low, middle, high = np.percentile(column, [25, 50, 75])
        said = verdict(asked, middle)
        print(
            f"HTTP and scheduling add {middle:.1f} ms of the {name} ({low:.1f}-{high:.1f}); {said}"
        )
    print(f"median and quartiles of {pairs} pairs, measured clock, {machine()}")
    return met(asked, medians[0])


def verdict(name: str, value: float) -> str:
    """What was asked of a figure, and whether it is so."""
    if name not in ASKED:
        return ""
    sign, bound = ASKED[name]
    return f"asked: {sign} {bound:g}, {'met' if met(name, value) else 'NOT met'}"


def met(name: str, value: float) -> bool:
    if name not in ASKED:
        return True
    sign, bound = ASKED[name]
    return {">=": value >= bound, ">": value > bound, "<=": value <= bound}[sign]


def jobs(count: int, seed: int, tokens: int = TOKENS, steps: int = STEPS) -> list[Job]:
    rng = np.random.default_rng(seed)
    prefix = np.random.default_rng(99).integers(0, EOS, PREFIX).tolist()
    ask = SamplingConfig(steps=steps)
    return [
        Job(
            Request([*prefix, *rng.integers(0, EOS, SUFFIX).tolist(), *[MASK] * tokens], ask),
            (PREFIX,),
        )
        for _ in range(count)
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--overhead", type=int, metavar="PAIRS", help="measure that alone")
    options = parser.parse_args()
    if options.overhead:
        return 0 if overhead(options.overhead) else 1
    model, many = make_model(), options.clients
    alone, served = make_engine(model), Served(model, many)

    def offline(count: int, batches: int, seed: int) -> float:
        """Seconds."""
        began = time.perf_counter()
        for i in range(batches):
            alone.answer(jobs(count, seed * 100 + i))
        return time.perf_counter() - began

    try:
        offline(many, 1, 0)
        for count in (1, many):  # compile all sizes, store the prefix
            clients(served.url, count, 3 * count)
            clients(served.url, count, count, "--exact")
        found: dict[str, list[float]] = {}
        for number in range(1, options.rounds + 1):
            engine = 2 * many * TOKENS / offline(many, 2, number)
            loaded = clients(served.url, many, 4 * many, "--seed", str(number))
            exact = clients(served.url, many, many, "--seed", str(number), "--exact")
            plain = clients(served.url, 1, 4, "--seed", str(number), "--exact")
            row = {
                "engine, tokens/s": engine,
                "server, tokens/s": loaded["output_throughput"],
                "server without reuse, tokens/s": exact["output_throughput"],
                "one after another without reuse, tokens/s": plain["output_throughput"],
                "server / engine": loaded["output_throughput"] / engine,
                "server / no reuse": loaded["output_throughput"] / exact["output_throughput"],
                "server / one after another": loaded["output_throughput"]
                / plain["output_throughput"],
            }
            for name, value in row.items():
                found.setdefault(name, []).append(value)
    finally:
        served.stop()
    print(f"{many} clients, one prefix of {PREFIX} tokens, {SUFFIX} of their own, {TOKENS} new")
    for name, values in found.items():
        middle = median(values)
        spread = f"{min(values):.2f}-{max(values):.2f}"
        print(f"{name:<45}{middle:8.2f}   {spread:<16}{verdict(name, middle)}")
    print(f"median and range of {options.rounds} rounds, measured clock, {machine()}")
    good = overhead(PAIRS)
    return 0 if good and all(met(name, median(values)) for name, values in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
