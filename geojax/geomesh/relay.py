# SPDX-License-Identifier: Apache-2.0
"""Lines between the processes of one slice: the first one speaks, and all hear the same.

For what collectives are not made for: waits of unknown length, news from outside, bytes of any
number. Invariant: `first` returns the same in all processes, call by call. A process that ends
without a good-bye ends the others, at once and with a message; JAX would leave them waiting in a
collective, or for its heartbeat.
"""

import contextlib
import json
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np
from jaxtyping import UInt8

from geojax.config import RunError
from geojax.platform import EXIT_CODE
from geojax.train.agree import first_chooses

Bytes = UInt8[np.ndarray, "_"]

_FRAME = struct.Struct("<4sI")
"""Kind of a frame, and the bytes of its JSON, which says how long the arrays after it are."""
_SAID, _STOP, _BYE, _FAIL = b"said", b"stop", b"bye.", b"fail"
_HELLO = struct.Struct("<4sII")
"""First words of a caller: its number, and the secret that JAX's cluster told it."""
_HELLO_WORD = b"gjxr"
_PIECE_BYTES = 2**20
_POLL_SECONDS = 0.2
_CONNECT_SECONDS, _HELLO_SECONDS = 60.0, 5.0
_GRACE_SECONDS = 3.0
"""For a process to end by itself, once another has said that it fails."""


class Relay:
    """In a `with` block, on each process's main thread."""

    def __init__(
        self,
        number: int,
        lines: dict[int, socket.socket],
        stop: threading.Event,
        name: str,
        end: Callable[[str], None] | None = None,
    ):
        """`number`: of this process; `lines`: to all others, in the first process; to that one,
        elsewhere. `stop` is set here where any process's is. `end` ends this process, with a
        text."""
        self._number, self._lines, self._stop, self._name = number, lines, stop, name
        self._end = end or _exit
        self.beat: Callable[[], None] = lambda: None
        """Called while this process waits for what the first one says."""
        self._heard: queue.SimpleQueue[tuple[Any, list[Bytes]]] = queue.SimpleQueue()
        self._told_stop = False
        self._ending, self._left = threading.Event(), threading.Event()
        self._sending = threading.Lock()
        self._readers = [
            threading.Thread(target=self._read, args=item, name=f"relay {item[0]}", daemon=True)
            for item in lines.items()
        ]

    def __enter__(self) -> Self:
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._ending.set()
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # it may have ended already
                self._send(line, _FAIL if kind else _BYE, str(error) if kind else "")
                line.shutdown(socket.SHUT_WR)
        for reader in self._readers:
            reader.join(_GRACE_SECONDS)
        for line in self._lines.values():
            line.close()

    @property
    def is_first(self) -> bool:
        return self._number == 0

    def first(self, ask: Callable[[], tuple[Any, Sequence[Bytes]]]) -> tuple[Any, Sequence[Bytes]]:
        """What `ask` returns in the first process, in all of them: a JSON value and arrays. All
        call this in the same order; `ask` is called in the first one only."""
        if not self.is_first:
            return self._hear()
        value, arrays = ask()
        for line in self._lines.values():
            try:
                self._send(line, _SAID, value, arrays)
            except OSError as error:
                raise RunError(f"a process of {self._name} has gone: {error.strerror}") from error
        return value, arrays

    def _hear(self) -> tuple[Any, list[Bytes]]:
        while True:
            if self._stop.is_set() and not self._told_stop:
                self._told_stop = True
                with contextlib.suppress(OSError):  # the reader sees that, too
                    self._send(self._lines[0], _STOP, "")
            try:
                return self._heard.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._left.is_set():
                    raise RunError(
                        f"{self._name}: the first process has ended its part, and this one has not"
                    ) from None
                self.beat()

    def _send(
        self, line: socket.socket, kind: bytes, value: Any, arrays: Sequence[Bytes] = ()
    ) -> None:
        text = json.dumps([value, [a.size for a in arrays]]).encode()
        with self._sending:
            line.sendall(_FRAME.pack(kind, len(text)) + text)
            for array in arrays:
                line.sendall(memoryview(np.ascontiguousarray(array)))

    def _read(self, other: int, line: socket.socket) -> None:
        """All that process `other` says."""
        try:
            while True:
                kind, text_bytes = _FRAME.unpack(_receive(line, _FRAME.size))
                value, sizes = json.loads(bytes(_receive(line, text_bytes)))
                arrays = [_receive(line, size) for size in sizes]
                if kind == _SAID:
                    self._heard.put((value, arrays))
                elif kind == _STOP:
                    self._stop.set()
                elif kind == _FAIL:
                    return self._lost(other, f"fails: {value}", _GRACE_SECONDS)
                else:
                    self._left.set()
                    return None
        except OSError as error:
            return self._lost(other, f"has ended ({error.strerror or error})", 0.0)

    def _lost(self, other: int, how: str, grace_seconds: float) -> None:
        if self._ending.wait(grace_seconds):
            return
        self._end(
            f"{self._name}: process {other} of the slice {how}; the slice's processes are one JAX "
            f"cluster, so process {self._number} ends too. Start all of them again"
        )


def connect(name: str, host: str, stop: threading.Event) -> Relay:
    """The relay of this JAX cluster, whose first process others reach at `host`; all processes call
    this. RunError where they do not find each other."""
    number, count = jax.process_index(), jax.process_count()
    with _listen() if number == 0 else contextlib.nullcontext() as listener:
        port = first_chooses(listener.getsockname()[1] if listener else 0)
        secret = first_chooses(secrets.randbits(31))
        if listener:
            lines = admit(name, listener, count - 1, secret)
        else:
            lines = {0: call(name, (host, port), number, secret)}
    return Relay(number, lines, stop, name)


def admit(
    name: str,
    listener: socket.socket,
    others: int,
    secret: int,
    seconds: float = _CONNECT_SECONDS,
) -> dict[int, socket.socket]:
    """Lines to so many other processes, by number; whoever does not know `secret` is sent away.
    RunError where they do not come."""
    lines: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    while len(lines) < others:
        try:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            line, _ = listener.accept()
        except TimeoutError as error:
            raise RunError(
                f"{name}: {others - len(lines)} of its {others + 1} processes did not reach port "
                f"{listener.getsockname()[1]} of the first within {seconds:g} s; open the ports "
                "between the machines of a slice"
            ) from error
        number = _hear_hello(line, secret)
        if number is None or number in lines:
            line.close()
        else:
            lines[number] = _set_up(line)
    return lines


def call(name: str, address: tuple[str, int], number: int, secret: int) -> socket.socket:
    """The line of process `number` to the first one; RunError where that cannot be reached."""
    try:
        line = _set_up(socket.create_connection(address, timeout=_CONNECT_SECONDS))
        line.sendall(_HELLO.pack(_HELLO_WORD, number, secret))  # a first word does not wait
    except OSError as error:
        raise RunError(
            f"{name}: cannot reach its first process at {address[0]}:{address[1]} "
            f"({error.strerror or error}); open the ports between the machines of a slice"
        ) from error
    return line


def _hear_hello(line: socket.socket, secret: int) -> int | None:
    """The caller's number; None: a stranger."""
    line.settimeout(_HELLO_SECONDS)
    try:
        word, number, theirs = _HELLO.unpack(bytes(_receive(line, _HELLO.size)))
    except OSError:
        return None
    return number if word == _HELLO_WORD and theirs == secret else None


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _set_up(line: socket.socket) -> socket.socket:
    """Set so that a machine that vanishes is noticed in half a minute."""
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # not on every system
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return line


def _receive(line: socket.socket, size: int) -> Bytes:
    """So many bytes; OSError where the other side has closed before."""
    data = np.empty(size, np.uint8)
    view, done = memoryview(data), 0
    while done < size:
        got = line.recv_into(view[done : done + _PIECE_BYTES])
        if not got:
            raise ConnectionResetError("it hung up")
        done += got
    return data


def _exit(text: str) -> None:
    os.write(2, f"geojax: {text}\n".encode())
    os._exit(EXIT_CODE)
