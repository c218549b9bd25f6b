# SPDX-License-Identifier: Apache-2.0
"""`geojax bench serve URL`: load for a server, and what its clients see.

Prompts are as those of `vllm bench serve --dataset-name prefix_repetition`: one of a few prefixes
of random tokens, and a suffix of its own. Figures have the names that it gives them; times are of
the wall clock, at the client.

Invariant: arrivals follow from the seed alone, never from how fast answers come (an open loop),
unless `concurrency` bounds them.
"""

import asyncio
import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np
import tyro
from rich.console import Console

from geojax.bench.serve_client import Sent, send
from geojax.bench.serve_table import load_table
from geojax.config import ConfigError, RunError, require
from geojax.track.environment import machine
from geojax.track.metrics import NewFile, to_json, write_atomically

KEY = "GEOJAX_API_KEY"
"""Environment variable with the key, so that no command line shows it."""


@dataclass(frozen=True)
class LoadOptions:
    """Load for a server: streams of /v1/completions. A key is read from GEOJAX_API_KEY."""

    url: tyro.conf.Positional[str] = "http://127.0.0.1:8000"
    """Of the server."""
    requests: int = 100
    """How many."""
    rate: float = math.inf
    """Of arrivals, requests a second; inf: all at once."""
    burstiness: float = 1.0
    """1: a Poisson process; less: more in bursts (gamma-distributed gaps)."""
    concurrency: int | None = None
    """Most at a time; later ones wait at the client. Unset: no bound."""
    prefixes: int = 10
    """Different shared prefixes."""
    prefix_tokens: int = 256
    """Of each."""
    shared: float = 1.0
    """Share of requests that begin with one of them; others have a prefix of their own."""
    suffix_tokens: int = 256
    """Of a request's own."""
    tokens: int = 128
    """New ones; end-of-text is ignored."""
    steps: int | None = None
    """Denoising steps; unset: the server's choice."""
    exact: bool = False
    """Ask for no reuse."""
    seed: int = 0
    """Of prompts and arrivals."""
    json: NewFile | None = None
    """File for the figures, and those of each request."""

    def __post_init__(self):
        require(self.requests >= 1, f"requests {self.requests} must be at least 1")
        require(self.rate > 0, f"rate {self.rate} must be above 0; inf: all at once")
        require(
            0 < self.burstiness < math.inf, f"burstiness {self.burstiness} must be above 0, finite"
        )
        require(
            self.concurrency is None or self.concurrency >= 1,
            f"concurrency {self.concurrency} must be at least 1; leave it unset for no bound",
        )
        require(
            self.steps is None or self.steps >= 1,
            f"steps {self.steps} must be at least 1; leave them unset for the server's choice",
        )
        require(self.seed >= 0, f"seed {self.seed} must be 0 or more")
        require(self.prefixes >= 1, f"prefixes {self.prefixes} must be at least 1")
        require(0 <= self.shared <= 1, f"shared {self.shared} must lie in [0, 1]")
        require(
            self.prefix_tokens >= 0 and self.suffix_tokens >= 1 and self.tokens >= 1,
            "prefix-tokens must be 0 or more, suffix-tokens and tokens 1 or more",
        )


def run_load(options: LoadOptions) -> dict[str, Any]:
    """Send all, wait for all, print. ConfigError where there is no server, RunError where it
    answered none."""
    figures = asyncio.run(load(options))
    console = Console(highlight=False, markup=False)
    console.print(load_table(figures))
    for line in failures(figures):
        console.print(line, soft_wrap=True)
    if options.json:
        write_atomically(options.json, json.dumps(to_json(figures), indent=2) + "\n")
        console.print(f"wrote {options.json}", soft_wrap=True)
    if not figures["completed"]:
        raise RunError(f"none of {options.requests} requests was answered; see their errors above")
    return figures


async def load(options: LoadOptions) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if KEY in os.environ else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx2.AsyncClient(
        base_url=options.url.rstrip("/"), headers=headers, limits=limits, timeout=None
    ) as client:
        model = await _model(client, options.url)
        prompts = make_prompts(options, model.get("vocab_size"), model.get("mask_id"))
        gate = asyncio.Semaphore(options.concurrency or options.requests)  # unset: no bound
        began = time.perf_counter()

        async def one(prompt: list[int] | str, at: float) -> Sent:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            async with gate:
                return await send(client, body_of(prompt, model["id"], options))

        times = arrivals(options)
        sent = await asyncio.gather(*(one(p, at) for p, at in zip(prompts, times, strict=True)))
        seconds = time.perf_counter() - began
    return figures_of(sent, seconds, options, model["id"])


async def _model(client: httpx2.AsyncClient, url: str) -> dict[str, Any]:
    try:
        found = await client.get("/v1/models")
        found.raise_for_status()
        return found.json()["data"][0]
    except (httpx2.HTTPError, KeyError, ValueError) as error:
        raise ConfigError(
            f"no model is served at {url} ({error}); start `geojax serve`, and where it asks for a "
            f"key set {KEY}"
        ) from error


def arrivals(options: LoadOptions) -> np.ndarray:
    """Seconds after the start [requests]."""
    if math.isinf(options.rate):
        return np.zeros(options.requests)
    rng = np.random.default_rng((options.seed, 1))
    shape = options.burstiness
    return np.cumsum(rng.gamma(shape, 1 / (options.rate * shape), options.requests))


def make_prompts(
    options: LoadOptions, vocab_size: int | None, mask_id: int | None
) -> list[list[int]] | list[str]:
    """Ids; words, of about a token each, where the server does not say its vocabulary."""
    rng = np.random.default_rng((options.seed, 0))
    ids = np.setdiff1d(np.arange(vocab_size or 1000), [] if mask_id is None else [mask_id])
    prefixes = rng.choice(ids, (options.prefixes, options.prefix_tokens))
    prompts = []
    for i in range(options.requests):
        prefix = prefixes[i % options.prefixes]
        if rng.random() >= options.shared:
            prefix = rng.choice(ids, options.prefix_tokens)
        prompts.append([*prefix.tolist(), *rng.choice(ids, options.suffix_tokens).tolist()])
    if vocab_size is None:
        return [" ".join(f"w{i}" for i in prompt) for prompt in prompts]
    return prompts


def body_of(prompt: list[int] | str, model: str, options: LoadOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": options.tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.steps:
        body["steps"] = options.steps
    if options.exact:
        body["exact"] = True
    return body


def figures_of(
    sent: Sequence[Sent], seconds: float, options: LoadOptions, model: str
) -> dict[str, Any]:
    """Sums, rates and percentiles, over requests that were answered."""
    good = [s for s in sent if s.good]
    given, new = sum(s.given for s in good), sum(s.new for s in good)
    found: dict[str, Any] = {
        "model_id": model,
        "num_prompts": options.requests,
        "request_rate": "inf" if math.isinf(options.rate) else options.rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.concurrency,
        "duration": seconds,
        "completed": len(good),
        "failed": len(sent) - len(good),
        "total_input_tokens": given,
        "total_output_tokens": new,
        "total_cached_tokens": sum(s.cached for s in good),
        "request_throughput": len(good) / seconds,
        "output_throughput": new / seconds,
        "total_token_throughput": (given + new) / seconds,
        "statuses": {str(code): sum(s.status == code for s in sent) for code in _codes(sent)},
        "errors": sorted({s.error for s in sent if s.error}),
    }
    series = {
        "ttft": [s.first for s in good],
        "tpot": [(s.whole - s.first) / (s.new - 1) for s in good if s.new > 1],
        "itl": [gap for s in good for gap in s.gaps],
        "e2el": [s.whole for s in good],
    }
    for name, values in series.items():
        times = 1000 * np.array(values or [math.nan])
        found[f"mean_{name}_ms"] = float(times.mean())
        found[f"median_{name}_ms"] = float(np.median(times))
        found[f"std_{name}_ms"] = float(times.std())
        for p in (90, 99):
            found[f"p{p}_{name}_ms"] = float(np.percentile(times, p))
    found["clock"], found["machine"] = "measured", machine()
    found["requests"] = [vars(s) for s in sent]
    return found


def failures(figures: Mapping[str, Any]) -> list[str]:
    """A line for each status and reason of requests that were not answered, the most frequent
    first."""
    kinds = Counter((r["status"], r["error"]) for r in figures["requests"] if r["error"])
    return [
        f"{count} not answered, {f'status {status}' if status else 'no response'}: {error}"
        for (status, error), count in kinds.most_common()
    ]


def _codes(sent: Sequence[Sent]) -> list[int]:
    return sorted({s.status for s in sent})
