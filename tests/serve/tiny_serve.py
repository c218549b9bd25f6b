# SPDX-License-Identifier: Apache-2.0
"""A tiny model with text, an engine that answers at once, and a live server of either."""

import asyncio
import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import httpx2
import numpy as np
import tokenizers

from geojax.bicache.depth import Depths
from geojax.bicache.engine import Engine, Sizes
from geojax.bicache.policy import get_policy
from geojax.diffusion.load import Model, load
from geojax.models.config import TransformerConfig
from geojax.models.transformer import init_params
from geojax.models.weights import SpecialTokens, save_safetensors
from geojax.serve.app import make_app
from geojax.serve.loop import EngineLoop
from geojax.serve.metrics import Metrics
from geojax.serve.options import Limits, Pace
from geojax.serve.prompts import Prompts
from geojax.serve.server import Server, listen
from geojax.serve.service import Service
from geojax.serve.tenants import Tenants

NAMES = ("<|mask|>", "<|endoftext|>", "<|startoftext|>", "<|eot_id|>")
NAMES += ("<|start_header_id|>", "<|end_header_id|>")
MASK, EOS = 256, 257
CONFIG = TransformerConfig(
    vocab_size=264, dim=16, layers=2, heads=2, kv_heads=2, mlp_dim=24, bidirectional=True
)
PAGE = 16


def save_model(folder: Path) -> None:
    """Weights of a LLaDA with random weights, whose tokens are bytes."""
    special = SpecialTokens(MASK, EOS, EOS)
    save_safetensors(init_params(CONFIG, 3), CONFIG, folder, special=special)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    found = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    )
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in NAMES])
    found.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": NAMES[2]}))


@cache
def tiny_model(folder: Path) -> Model:
    """Of `save_model`; written where it is not there yet."""
    if not (folder / "tiny").exists():
        save_model(folder / "tiny")
    return load(folder / "tiny")


class QuickEngine(Engine):
    """Admits as the real one does, and answers letters without computing: position p of seed s is
    letter (p + s) mod 26; seeds that end in 99 end after five."""

    def __init__(self, model: Model, kv_bytes: float = 1e6, quota_bytes: float | None = None):
        """With a quota prefixes are shared."""
        policy = get_policy("bicache" if quota_bytes else "refresh")
        sizes = Sizes(kv_bytes, 1e5, page=PAGE, quota_bytes=quota_bytes)
        super().__init__(model.sampler(), policy, sizes, Depths(((0.0, 1),)))
        self._builds._fill = lambda masks, entry: None  # pages are taken and not filled
        self.step_seconds = 0.0
        self.fails = False
        self.steps_run = 0

    def probe(self):
        if self.fails:
            raise RuntimeError("the device is lost")

    def run(self, slots, steps=None):
        if self.fails:
            raise RuntimeError("the device is lost")
        taken = 0
        while taken < (steps or 16) and not all(slot.done for slot in slots):
            time.sleep(self.step_seconds)
            taken += 1
            for slot in slots:
                if not slot.done:
                    self._step(slot)
        self.steps_run += taken

    def _step(self, slot) -> None:
        canvas, rules = slot.canvas, slot.rules
        tokens, begin = canvas.tokens.copy(), int(rules.begin[0])
        hidden = np.flatnonzero(tokens[0] == MASK)
        seed = int(rules.seed[0])
        for place in hidden[: -(-len(hidden) // max(int(rules.steps[0] - canvas.steps[0]), 1))]:
            over = seed % 100 == 99 and place - begin >= 5
            letter = tokenizers_id(chr(97 + (place + seed) % 26))
            tokens[0, place] = EOS if over else letter
        found = tokens[0, begin : int(rules.end[0])]
        first = np.flatnonzero(found == MASK)
        ended = EOS in found[: first[0] if len(first) else len(found)] and rules.ends[0]
        done = np.array([ended or not len(first)])
        slot.canvas = canvas._replace(tokens=tokens, steps=canvas.steps + 1, done=done)


def tokenizers_id(letter: str) -> int:
    """Of a byte that prints."""
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()).index(letter)


def letters(prompt_tokens: int, count: int, seed: int = 0) -> str:
    """What a QuickEngine answers."""
    return "".join(chr(97 + (prompt_tokens + i + seed) % 26) for i in range(count))


@dataclass
class Live:
    """A server that listens."""

    url: str
    loop: EngineLoop
    server: Server
    service: Service

    def post(self, body, path="/v1/completions", **kwargs) -> httpx2.Response:
        return httpx2.post(self.url + path, json=body, timeout=120, **kwargs)

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=120)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of its values over other labels."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total


@contextmanager
def running(
    model: Model,
    engine: Engine,
    keys: Path | None = None,
    limits: Limits | None = None,
    pace: Pace | None = None,
    drain_seconds: float = 20.0,
    warm=None,
    stuck_seconds: float = 60.0,
) -> Generator[Live]:
    limits = limits or Limits()
    metrics = Metrics("tiny")
    loop = EngineLoop(engine, pace or Pace(), metrics)
    service = Service("tiny", Prompts(model), loop, limits, metrics)
    app = make_app(service, Tenants(keys), stuck_seconds, local=keys is None)
    server = Server(app, loop, drain_seconds, partial(loop.start, warm))
    listening = listen("127.0.0.1", 0, limits.stall_seconds)
    port = listening.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    live = Live(f"http://127.0.0.1:{port}", loop, server, service)
    try:
        if warm is None:
            wait_until(lambda: live.get("/ready").status_code == 200)
        yield live
    finally:
        server.begin_stop()
        server.begin_stop()  # at once
        thread.join(60)
        assert not thread.is_alive()


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
