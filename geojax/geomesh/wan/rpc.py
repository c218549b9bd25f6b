# SPDX-License-Identifier: Apache-2.0
"""Calls over gRPC: a JSON header and bytes, as one message or as a stream of chunks.

Invariant: every call has a deadline, every idle connection is kept alive, and no message is larger
than a chunk, whatever it is a part of.
"""

import errno
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, cast

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what fails is raised, and said here

import grpc
import numpy as np

from geojax.config import ConfigError, GrpcConfig, RunError, require

CHUNK_BYTES = 2 << 20
_SERVICE = "geojax"
_SLOWEST_BYTES_A_SECOND = 125_000.0  # of a link; a stream is given the time that this takes
_LARGEST_BYTES = 2 * CHUNK_BYTES
_TLS_SIGNS = ("handshake", "verification", "socket closed")
"""In what gRPC says of a connection without trust."""
_POLL_SECONDS = 0.1  # between looks whether a push is still needed

Header = dict[str, Any]
Unary = Callable[[Header], Header]
Receive = Callable[[Header, np.ndarray], Header]
"""Header and bytes of a stream that has arrived; the reply."""
Send = Callable[[Header], tuple[Header, Iterable[memoryview]]]
"""What to stream in reply: a header, with `size_bytes`, and its bytes."""


class Streamed:
    """Counts what streams handed to gRPC, their headers among it; by several threads."""

    def __init__(self):
        self._lock, self.sent_bytes = threading.Lock(), 0

    def through(self, parts: Iterable[bytes | memoryview]) -> Iterator[bytes]:
        for part in parts:
            with self._lock:
                self.sent_bytes += len(part)
            yield bytes(part)


class CallError(RunError):
    """A call that failed; says how."""

    refused = False
    """Whether the other side answered, and will give no other answer."""


def _options(idle_seconds: float) -> list[tuple[str, int]]:
    millis = int(idle_seconds * 1000)
    return [
        ("grpc.so_reuseport", 0),  # two servers on one port would each get some of the calls
        ("grpc.keepalive_time_ms", millis),
        ("grpc.keepalive_timeout_ms", millis),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", millis),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", millis // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_send_message_length", _LARGEST_BYTES),
        ("grpc.max_receive_message_length", _LARGEST_BYTES),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 5000),
    ]


class Server:
    """Answers calls until it is stopped."""

    def __init__(
        self,
        config: GrpcConfig,
        port: int,
        threads: int,
        unary: Mapping[str, Unary] = {},
        receive: Mapping[str, Receive] = {},
        send: Mapping[str, Send] = {},
        largest_bytes: int = 0,
        streamed: Streamed | None = None,
    ):
        """Methods by name and kind. `port` 0: any; `largest_bytes`: of what `receive` takes;
        `streamed` counts what `send` sends.

        ConfigError where it cannot listen there.
        """
        # A wildcard address, and any other that is not this machine's, is refused by name.
        _require_bindable(config.bind, port)
        _require_certificates(config)
        handlers: dict[str, grpc.RpcMethodHandler] = {}
        for name, function in unary.items():
            handlers[name] = grpc.unary_unary_rpc_method_handler(_unary(function))
        for name, function in receive.items():
            handlers[name] = grpc.stream_unary_rpc_method_handler(_receive(function, largest_bytes))
        for name, function in send.items():
            handlers[name] = grpc.unary_stream_rpc_method_handler(
                _send(function, streamed or Streamed())
            )
        self._pool = ThreadPoolExecutor(threads, "rpc")
        self._server = grpc.server(self._pool, options=_options(config.lease_seconds / 2))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, handlers),)
        )
        place = f"{_bracketed(config.bind)}:{port}"
        try:
            if config.tls_cert:
                pair = (_read(config.tls_key), _read(config.tls_cert))
                credentials = grpc.ssl_server_credentials([pair], _read(config.tls_ca), True)
                self.port = self._server.add_secure_port(place, credentials)
            else:
                self.port = self._server.add_insecure_port(place)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {place}: {error}") from error
        require(self.port, f"cannot listen on {place}; is the port taken?")
        self.address = f"{_bracketed(config.advertise or config.bind)}:{self.port}"
        """Where others reach it."""
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0.5).wait()
        self._pool.shutdown(wait=False)


class Client:
    """Calls to other processes; connections are kept."""

    def __init__(self, config: GrpcConfig, streamed: Streamed | None = None):
        """`streamed` counts what is pushed."""
        self._config, self._streamed = config, streamed or Streamed()
        _require_certificates(config)
        self._credentials = None
        if config.tls_cert:  # read once: a file that goes later ends nothing that runs
            self._credentials = grpc.ssl_channel_credentials(
                _read(config.tls_ca), _read(config.tls_key), _read(config.tls_cert)
            )
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()

    def call(self, address: str, method: str, header: Header, wait_seconds: float = 0.0) -> Header:
        """The reply; `wait_seconds`: what the other side may take on purpose. CallError."""
        stub = self._channel(address).unary_unary(_path(method))
        deadline = self._config.call_seconds + wait_seconds
        return _loads(self._tried(address, lambda: stub(_dumps(header), timeout=deadline)))

    def push(
        self,
        address: str,
        method: str,
        header: Header,
        data: np.ndarray,
        over: Callable[[], bool] = lambda: False,
    ) -> Header:
        """Send bytes in chunks; the reply. CallError, also soon after they are `over`: what is not
        sent by then leaves the link to others."""
        stub = self._channel(address).stream_unary(_path(method))
        header = header | {"size_bytes": data.size}

        def send() -> bytes:
            stream = self._streamed.through(chain([_dumps(header)], chunks([data])))
            call = stub.future(stream, timeout=self._deadline(data.size))
            while True:
                try:
                    return call.result(_POLL_SECONDS)
                except grpc.FutureTimeoutError:
                    if over():
                        call.cancel()
                        raise CallError(f"{address}: not needed any more") from None

        return _loads(self._tried(address, send))

    def pull(
        self, address: str, method: str, header: Header, size_bytes: int
    ) -> tuple[Header, np.ndarray]:
        """Header and that many bytes from the other side. CallError."""
        stub = self._channel(address).unary_stream(_path(method))

        def receive() -> tuple[Header, np.ndarray]:
            stream = stub(_dumps(header), timeout=self._deadline(size_bytes))
            reply = _loads(next(stream))
            if reply["size_bytes"] != size_bytes:
                raise ValueError(f"{reply['size_bytes']} bytes, and {size_bytes} are meant")
            return reply, _gathered(stream, size_bytes)

        return self._tried(address, receive)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _tried[T](self, address: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except grpc.RpcError as error:
            call = cast(grpc.Call, error)
            details = " ".join((call.details() or "").split())
            if self._credentials and any(sign in details.lower() for sign in _TLS_SIGNS):
                details = (
                    f"perhaps no TLS connection; that side must hold a certificate of "
                    f"{self._config.tls_ca} for the name by which it is reached, and take "
                    f"{self._config.tls_cert}: {details}"
                )
            details = details[:400]
            failed = CallError(f"{address}: {call.code().name.lower()} ({details})")
            failed.refused = call.code() == grpc.StatusCode.FAILED_PRECONDITION
            raise failed from error
        except (ValueError, StopIteration, KeyError) as error:
            raise CallError(f"{address}: an answer that is none ({error})") from error

    def _deadline(self, size_bytes: int) -> float:
        return self._config.call_seconds + size_bytes / _SLOWEST_BYTES_A_SECOND

    def _channel(self, address: str) -> grpc.Channel:
        with self._lock:
            if address not in self._channels:
                self._channels[address] = self._connect(address)
            return self._channels[address]

    def _connect(self, address: str) -> grpc.Channel:
        options = _options(self._config.lease_seconds / 2)
        if self._credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self._credentials, options=options)


def chunks(arrays: Iterable[np.ndarray]) -> Iterator[memoryview]:
    """The bytes of contiguous arrays, piece by piece."""
    for array in arrays:
        flat = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        for start in range(0, len(flat), CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES]


def _gathered(stream: Iterable[bytes], size_bytes: int) -> np.ndarray:
    """A stream's bytes; ValueError unless it has as many as it said."""
    whole, end = np.empty(size_bytes, np.uint8), 0
    for chunk in stream:
        if end + len(chunk) > size_bytes:
            raise ValueError(f"more than the {size_bytes} bytes that were announced")
        whole[end : end + len(chunk)] = np.frombuffer(chunk, np.uint8)
        end += len(chunk)
    if end < size_bytes:
        raise ValueError(f"{end} of the {size_bytes} bytes that were announced")
    return whole


def _unary(function: Unary):
    def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
        return _dumps(_answer(context, lambda: function(_loads(request))))

    return handle


def _receive(function: Receive, largest_bytes: int):
    def handle(stream: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        def answer() -> Header:
            header = _loads(next(stream))
            size = header.get("size_bytes")
            if not isinstance(size, int) or not 0 <= size <= largest_bytes:
                raise ValueError(f"{size} bytes where at most {largest_bytes} can be meant")
            return function(header, _gathered(stream, size))

        return _dumps(_answer(context, answer))

    return handle


def _send(function: Send, streamed: Streamed):
    def handle(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        header, parts = _answer(context, lambda: function(_loads(request)))
        yield from streamed.through(chain([_dumps(header)], parts))

    return handle


def _answer[T](context: grpc.ServicerContext, function: Callable[[], T]) -> T:
    """Mistakes of the caller's, and what is not here, go back to it as words."""
    try:
        return function()
    except LookupError as error:
        context.abort(grpc.StatusCode.NOT_FOUND, str(error))
    except (ValueError, RunError) as error:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    raise AssertionError("abort raises")


def _path(method: str) -> str:
    return f"/{_SERVICE}/{method}"


def _dumps(header: Header) -> bytes:
    return json.dumps(header).encode()


def _loads(data: bytes) -> Header:
    header = json.loads(data)
    if not isinstance(header, dict):
        raise ValueError(f"a header that is no object: {header!r:.40}")
    return header


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"grpc.tls: cannot read {path}: {error.strerror}") from error


def _require_certificates(config: GrpcConfig) -> None:
    """ConfigError that names the file, where one is none of the kind that it should be."""
    if not config.tls_cert:
        return
    for path in (config.tls_ca, config.tls_cert, config.tls_key):
        _read(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT@SECLEVEL=0")  # how strong keys must be is gRPC's to say
    try:
        context.load_verify_locations(config.tls_ca)
    except ssl.SSLError as error:
        raise ConfigError(
            f"grpc.tls_ca: {config.tls_ca} cannot be read as certificates in PEM "
            f"({error.reason or error})"
        ) from error
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"grpc.tls_cert, grpc.tls_key: {config.tls_cert} and {config.tls_key} are no "
            "certificate and its private key, in PEM and without a password "
            f"({getattr(error, 'reason', None) or error})"
        ) from error


def _require_bindable(host: str, port: int) -> None:
    """ConfigError that says why, where a server could not listen there."""
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except socket.gaierror as error:
        raise ConfigError(f"grpc.bind {host!r}: no such host ({error.strerror})") from error
    except OSError as error:
        why = {
            errno.EADDRNOTAVAIL: "it is no address of this machine; use one that `ip address` "
            "lists, and say in grpc.advertise how others reach it",
            errno.EADDRINUSE: "the port is taken; choose another, or stop who has it",
            errno.EACCES: "ports below 1024 want rights; choose another",
        }.get(error.errno or 0, str(error.strerror))
        raise ConfigError(f"cannot listen on {host} port {port}: {why}") from error
