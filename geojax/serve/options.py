# SPDX-License-Identifier: Apache-2.0
"""What a server is told at its start. Limits are the server's; requests may ask for less."""

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

import tyro

from geojax.bicache.store import Builder
from geojax.config import require

_MOST, _MOST_SECONDS = 1e13, 1e6  # what clocks and sockets can hold: eleven days


@dataclass(frozen=True)
class Limits:
    """Most that one request may take."""

    body_bytes: int = 2**20
    """Of a request's body."""
    prompt_tokens: int = 8192
    """Of a prompt."""
    tokens: int = 2048
    """New ones of an answer."""
    default_tokens: int = 128
    """The same, where a request says nothing."""
    canvas: int = 256
    """Masks at once; longer answers grow canvas by canvas."""
    choices: int = 16
    """Answers of a request: n times its prompts."""
    request_seconds: float = 600.0
    """From its arrival to the end of its answer."""
    body_seconds: float = 30.0
    """Until its body is here."""
    stall_seconds: float = 30.0
    """That a reader of a stream may take for what lies before it."""


@dataclass(frozen=True)
class Pace:
    """How the engine's time is shared out."""

    rows: int = 8
    """Requests that are denoised together."""
    queue: int = 128
    """Answers of one tenant that may wait; beyond them requests are refused with 429."""
    quantum_seconds: float = 0.25
    """Most between two moments at which requests join and leave, where a step is shorter."""
    patience_seconds: float = 5.0
    """That others may pass a request which memory is too small for just now."""
    aging_seconds: float = 10.0
    """Of waiting, that count as much as one level of priority."""


@dataclass(frozen=True)
class ServeOptions:
    """Answer HTTP requests, as OpenAI's clients send them, by a diffusion model."""

    model: tyro.conf.Positional[Path]
    """Folder of a run, or of weights that `geojax convert` wrote."""
    host: str = "127.0.0.1"
    """Address to listen at. Others than this machine's own need --keys."""
    port: int = 8000
    """0: any that is free."""
    name: str | None = None
    """The model's, for clients; unset: the folder's."""
    keys: Path | None = None
    """File of API keys, lines of `NAME KEY`; prefixes are shared within a name only."""
    open: bool = False
    """Answer anybody who reaches the address, without a key, wherever it is."""
    policy: str | None = None
    """Of reuse, see docs/bicache.md; unset: bicache with --depths, else refresh."""
    every: int | None = None
    """Steps from one refresh to the next; unset: the policy's own."""
    depths: Path | None = None
    """Table of `geojax profile depth`: how deep requests share prefixes."""
    builder: Builder = "prefix"
    """How prefixes are built; the table's."""
    guard: bool = True
    """Requests that drift beyond the table's bounds stop sharing."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and of the computation."""
    kv_bytes: float = 1e9
    """Memory for keys and values."""
    hidden_bytes: float = 2.5e8
    """Memory for hidden states of shared prefixes."""
    quota_bytes: float | None = None
    """Keys and values that prefixes of one tenant may hold; unset: all."""
    limits: Limits = Limits()
    pace: Pace = Pace()
    warm: bool = True
    """Compile before the first request what requests within the next two sizes need; others are
    compiled when they come."""
    warm_prefix: int = 128
    """Tokens of a prefix."""
    warm_suffix: int = 192
    """Tokens after it, those of the answer among them."""
    drain_seconds: float = 60.0
    """After SIGTERM, for requests that were accepted."""
    stuck_seconds: float = 300.0
    """/health fails where one call of the engine takes longer."""


def check(options: ServeOptions) -> None:
    """ConfigError where a value means nothing, or others could ask without a key."""
    require(0 <= options.port < 2**16, f"port {options.port} must lie in 0..65535")
    values = {**vars(options.limits), **vars(options.pace)}
    for name in ("kv_bytes", "hidden_bytes", "quota_bytes", "drain_seconds", "stuck_seconds"):
        values[name] = getattr(options, name)
    for name, value in values.items():
        if value is None:
            continue
        flag = name.replace("_", "-")
        require(value > 0, f"{flag} {value} must be above 0")
        most = _MOST_SECONDS if name.endswith("_seconds") else _MOST
        require(value <= most, f"{flag} {value} must be at most {most:g}")
    require(options.warm_prefix >= 0, f"warm-prefix {options.warm_prefix} must be 0 or more")
    require(options.warm_suffix >= 1, f"warm-suffix {options.warm_suffix} must be at least 1")
    limits = options.limits
    require(
        limits.default_tokens <= limits.tokens,
        f"limits.default-tokens {limits.default_tokens} is more than an answer may have, "
        f"limits.tokens {limits.tokens}; lower the one or raise the other",
    )
    require(
        options.keys or options.open or is_loopback(options.host),
        f"host {options.host!r} can be reached from other machines, and no key is asked for; give "
        "--keys FILE, or --open where something in front checks who asks",
    )


def names_only(options: ServeOptions) -> bool:
    """Whether requests must name this machine as their host, since nothing else keeps the pages of
    other sites from asking through a browser here."""
    return is_loopback(options.host) and options.keys is None and not options.open


def is_loopback(host: str) -> bool:
    """Whether it is an address of this machine, or localhost. No other name is: whoever owns one,
    such as 127.evil.example, says where it leads."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
