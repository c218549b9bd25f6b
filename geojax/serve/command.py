# SPDX-License-Identifier: Apache-2.0
"""`geojax serve`: load, listen, warm up, answer, stop.

Invariant: what cannot be served is said before anything listens; /health answers from the moment
that it does, and /ready once all sizes that were asked for are compiled.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import partial

from rich.console import Console

from geojax.bicache.engine import Engine, Sizes
from geojax.bicache.policy import get_policy
from geojax.bicache.table import read_table
from geojax.config import PlatformConfig, RunError, require
from geojax.diffusion.canvas import power_of_two
from geojax.diffusion.load import DTYPES, Model, load
from geojax.serve.app import make_app
from geojax.serve.loop import EngineLoop
from geojax.serve.metrics import Metrics
from geojax.serve.options import ServeOptions, check, names_only
from geojax.serve.prompts import Prompts
from geojax.serve.server import Server, listen
from geojax.serve.service import Service
from geojax.serve.tenants import Tenants

_JOIN_SECONDS = 5.0  # for the engine's thread, after the last response


def run_serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT. ConfigError on bad input; RunError where the engine dies."""
    from geojax import platform

    check(options)
    platform.apply(PlatformConfig())
    console = Console(stderr=True, highlight=False, markup=False)
    tenants = Tenants(options.keys)
    model = load(options.model, DTYPES[options.dtype])
    require(
        model.tokenizer is not None,
        f"{options.model} has no tokenizer, so it has no text to serve; put its tokenizer.json "
        "beside its weights",
    )
    name = options.name or options.model.expanduser().resolve().name
    engine, metrics = make_engine(model, options), Metrics(name)
    loop = EngineLoop(engine, options.pace, metrics)
    service = Service(name, Prompts(model), loop, options.limits, metrics)
    app = make_app(service, tenants, options.stuck_seconds, names_only(options))
    socket_ = listen(options.host, options.port, options.limits.stall_seconds)
    _log_to_stderr()
    say = partial(console.print, soft_wrap=True)

    def begin() -> None:
        say(f"{name} at {url_of(socket_)}: {describe(engine, options)}")
        loop.start(partial(warm, engine, options, say))

    asyncio.run(Server(app, loop, options.drain_seconds, begin).serve([socket_]))
    hung = loop.stuck_for() > options.stuck_seconds
    loop.stop(_JOIN_SECONDS)
    if loop.finished:
        if loop.state == "dead":
            raise RunError("the engine died; its error is in the log above")
        say("stopped")
        return
    # A thread that is inside XLA while Python takes itself apart crashes the process.
    say("stopped; a call of the engine was cut off")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if hung else 0)


def _log_to_stderr() -> None:
    """Each line with its time, whatever handler a library has left before."""
    logging.basicConfig(
        stream=sys.stderr,
        format="%(asctime)s %(message)s",
        level=logging.WARNING,
        force=True,
    )
    for name in ("geojax.serve", "geojax.bicache"):  # which kernel runs, and why, among it
        logging.getLogger(name).setLevel(logging.INFO)


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_engine(model: Model, options: ServeOptions) -> Engine:
    """ConfigError where policy, table, memory and model do not go together."""
    name = options.policy or ("bicache" if options.depths else "refresh")
    policy = get_policy(name, options.every)
    depths = guard = None
    if options.depths:
        require(
            policy.shared and not policy.whole,
            f"policy {name!r} has no use for --depths; leave it out, or use bicache",
        )
        depths, guard = read_table(options.depths, model.revision, options.builder)
    return Engine(
        model.sampler(),
        policy,
        Sizes(options.kv_bytes, options.hidden_bytes, quota_bytes=options.quota_bytes),
        depths,
        options.builder,
        model.revision,
        guard if options.guard else None,
    )


def describe(engine: Engine, options: ServeOptions) -> str:
    """One line: what is reused, and for whom."""
    shares = "prefixes are shared" if engine.policy.shared else "no prefix is shared"
    if not engine.policy.shared and options.policy is None:
        shares += " (make a table with `geojax profile depth`, give --depths)"
    who = "keys" if options.keys else "anybody" if options.open else "this machine"
    return f"policy {engine.policy.name}, {shares}, for {who}"


def warm(
    engine: Engine, options: ServeOptions, say: Callable[[str], None], done: Callable[[str], None]
) -> None:
    """Compile what batches of each size need. `done` is told how far it is, after each size and
    before each program; it may raise."""
    if not options.warm:
        return
    most = power_of_two(options.pace.rows)
    counts = [1 << i for i in range(most.bit_length())]
    total, text = 0.0, ""
    for number, rows in enumerate(counts, 1):
        # A block is 32 wide unless a request asks for another; builds are of single requests.
        segments = 2 if rows == 1 else 1
        prefix, suffix = options.warm_prefix, options.warm_suffix
        total += engine.warm([rows], prefix, suffix, 32, segments, partial(done, text))
        text = f"batches of up to {rows}: {number} of {len(counts)} sizes, {total:.0f} s"
        say(f"warming up: {text}")
        done(text)
    say(f"ready: {engine.programs} programs in {total:.0f} s")
